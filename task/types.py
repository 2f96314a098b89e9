"""Types of losses and metrics."""

from collections.abc import Callable

from torch import Tensor

# Maps a batch's outputs and targets to the mean loss over the batch.
Loss = Callable[[Tensor, Tensor], Tensor]
# Maps all outputs and targets of a client's test examples to one number.
Metric = Callable[[Tensor, Tensor], Tensor | float]
