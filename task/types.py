"""Interfaces of tasks, losses and metrics."""

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models.split_model import SplitModel

# Maps a batch's outputs and targets to the mean loss over the batch.
Loss = Callable[[Tensor, Tensor], Tensor]
# Maps all outputs and targets of a client's test examples to one number.
Metric = Callable[[Tensor, Tensor], Tensor | float]


class Task(Protocol):
    """A learning problem: a model, each client's examples, a loss and metrics."""

    @property
    def loss(self) -> Loss:
        """Loss of a batch's outputs and targets: the mean over the batch."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names in the order of the outputs; empty if targets are numbers."""

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """Metrics besides loss and accuracy, by name."""

    @property
    def initial_state(self) -> dict[str, Tensor]:
        """State dict of the common initial model. Treat it as read-only."""

    @property
    def scratch_model(self) -> SplitModel:
        """Model that all clients of a process share; its content is arbitrary."""

    @property
    def unused_settings(self) -> Mapping[str, str]:
        """Settings without effect on this task, each with the reason."""

    def initial_model(self) -> SplitModel:
        """Return a new model, the same for every client and every call."""

    def train_examples(self, client: int) -> ExampleSet:
        """Return a client's training examples.

        Parameters
        ----------
        client : int
            Index of the client, from 0.

        Returns
        -------
        ExampleSet
            The examples.
        """

    def test_examples(self, client: int) -> ExampleSet:
        """Return a client's test examples; see `train_examples`."""

    def check(self, client: int) -> None:
        """Raise `SettingsError` if a client's examples do not fit the task.

        Called once per client before the first round. The examples must fit the
        model, the loss and the metrics.
        """

    def read(self, line: str) -> Tensor:
        """Return the inputs of one example from a line of a file, for predictions."""
