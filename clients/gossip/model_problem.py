"""A node's model and examples as a problem of multi-task optimisation."""

import numpy as np
import numpy.typing as npt
import torch

from flwr_frl.clients.device.conversions import to_numpy
from flwr_frl.clients.device.parameter_groups import HEAD
from flwr_frl.clients.gossip.flat import FlatParameters
from flwr_frl.task.examples import Batch, ExampleSet, count_targets
from flwr_frl.task.models import SplitModel
from flwr_frl.task.saddle_point.problems import Float64s
from flwr_frl.task.training import SGD, Loss, gradient, trainable_examples


class ModelProblem:
    """The cost f_i of one node: the mean loss of its model on a batch of its examples.

    The parameters are those of `FlatParameters`. A sample is a batch, given by the
    indices of its examples. Parameters are float64 outside of the model, which is
    float32.

    Parameters
    ----------
    node : int
        Number of the node.
    model : SplitModel
        The model, which is in training mode from the first cost on. Its buffers, such
        as batch-norm statistics, change with every cost.
    examples : ExampleSet
        The node's training examples.
    loss : callable
        Maps a batch's outputs and targets to the mean over the batch.
    batch_size : int
        Examples per batch, drawn without replacement; all if there are fewer.

    Attributes
    ----------
    losses : list of float
        The costs so far.
    """

    def __init__(
        self,
        node: int,
        model: SplitModel,
        examples: ExampleSet,
        loss: Loss,
        batch_size: int,
    ) -> None:
        self.nodes = (node,)
        self.losses: list[float] = []
        self._model, self._loss = model, loss
        self._flat = FlatParameters.of(model)
        self._settings = SGD(batch_size=batch_size)
        self._examples = trainable_examples(model, examples, self._settings)
        self._batch: tuple[npt.NDArray[np.generic], Batch] | None = None

    @property
    def dimension(self) -> int:
        """Number of parameters d."""
        return len(self._flat.vector)

    def draw(
        self, row: int, generator: np.random.Generator, count: int
    ) -> npt.NDArray[np.float64]:
        """Draw batches of indices of the node's examples, shape (count, batch size)."""
        n = len(self._examples)
        size = min(n, self._settings.batch_size)
        drawn = [generator.choice(n, size, replace=False) for _ in range(count)]
        return np.array(drawn, np.float64)

    @torch.no_grad()
    def value(self, x: Float64s, samples: Float64s) -> Float64s:
        """Return the loss at `x`, shape (1, d), of a batch, shape (1, batch size)."""
        inputs, targets = self._prepare(x, samples)
        if not count_targets(targets):
            return np.zeros(1)
        loss = self._loss(self._model(inputs), targets).item()
        self.losses.append(loss)
        return np.array([loss])

    def gradient(self, x: Float64s, samples: Float64s) -> Float64s:
        """Return the gradient of the loss, shape (1, d); see `value`."""
        inputs, targets = self._prepare(x, samples)
        self._flat.gradient.zero_()
        if count_targets(targets):
            arguments = inputs, targets, self._loss, self._settings
            self.losses.append(gradient(self._model, *arguments).item())
        return to_numpy(self._flat.gradient)[None].astype(np.float64)

    def _prepare(self, x: Float64s, samples: Float64s) -> Batch:
        """Load parameters into the model, and return a batch of its examples."""
        load(self._flat, x[0])
        self._model.train()
        # Both values of bandit feedback use the same batch with the same augmentation.
        if self._batch is None or self._batch[0] is not samples:
            mask = torch.zeros(len(self._examples), dtype=torch.bool)
            mask[samples[0].astype(np.int64)] = True
            self._batch = samples, self._examples.chosen(mask)
        inputs, targets = self._batch[1]
        device = self._flat.vector.device
        return inputs.to(device), targets.to(device)


@torch.no_grad()
def load(flat: FlatParameters, x: Float64s) -> None:
    """Load parameters of shape (d,) into the model of flat parameters."""
    flat.vector.copy_(torch.from_numpy(x.astype(np.float32)))


def head_entries(model: SplitModel) -> tuple[npt.NDArray[np.int64], tuple[int, ...]]:
    """Return the indices of the head's entries of `FlatParameters`, and their sizes."""
    indices, sizes, start = [np.zeros(0, np.int64)], [], 0
    for name, parameter in model.named_parameters():
        if name.startswith(HEAD):
            indices.append(np.arange(start, start + parameter.numel()))
            sizes.append(parameter.numel())
        start += parameter.numel()
    return np.concatenate(indices), tuple(sizes)
