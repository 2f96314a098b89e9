"""A model's parameters as one vector, and its sketch."""

from functools import lru_cache
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from flwr_frl.common.errors import require
from flwr_frl.common.messages import SKETCH
from flwr_frl.task.training.sgd import SGD

# Devices with private data send sketches of models with at least this many parameters.
SMALLEST_SKETCHED = 100 * SKETCH


class FlatParameters:
    """All parameters of a model as one vector, and their gradients as another.

    The parameters become views of the vector and share its memory. Buffers, such as
    batch-norm statistics, are not included.

    Parameters
    ----------
    model : nn.Module
        A model whose parameters are all float32.

    Attributes
    ----------
    vector, gradient : Tensor, shape (d,)
        In the order of ``model.parameters()``, each in its memory layout (channels
        last or contiguous).
    decayed : Tensor, shape (d,)
        1 for weights and 0 for biases, to which weight decay does not apply.
    names : tuple of str
        Names of the parameters.
    sizes : tuple of int
        Number of entries of each parameter.

    Raises
    ------
    SettingsError
        If a parameter has another dtype.
    """

    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_parameters())
        for name, parameter in named.items():
            valid, what = parameter.dtype == torch.float32, f"the model's {name!r}"
            require(valid, what, parameter.dtype, "torch.float32 for gossip")
        self._parameters = list(named.values())
        self.names = tuple(named)
        self.sizes = tuple(p.numel() for p in self._parameters)
        device = self._parameters[0].device
        decays = torch.tensor([float(not SGD.is_bias(name)) for name in named])
        self.decayed = decays.repeat_interleave(torch.tensor(self.sizes)).to(device)
        self.vector = torch.zeros_like(self.decayed)
        self.gradient = torch.zeros_like(self.decayed)
        self._gradients = list(self.views(self.gradient).values())
        for name, view in self.views(self.vector).items():
            view.copy_(named[name].data)
            named[name].data = view
        self.attach()

    @classmethod
    def of(cls, model: nn.Module) -> "FlatParameters":
        """Return the cached vectors of a model, attached to its parameters again."""
        if model not in _CACHE:
            _CACHE[model] = cls(model)
        _CACHE[model].attach()
        return _CACHE[model]

    def views(self, matrix: Tensor) -> dict[str, Tensor]:
        """Return views of a tensor (..., d), in the shapes of the parameters."""
        parts = torch.split(matrix, list(self.sizes), -1)
        each = zip(self.names, parts, self._parameters, strict=True)
        return {name: _shaped(part, parameter) for name, part, parameter in each}

    def attach(self) -> None:
        """Make the model's gradients accumulate in ``gradient``."""
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.requires_grad_(True)
            parameter.grad = gradient


_CACHE: WeakKeyDictionary[nn.Module, FlatParameters] = WeakKeyDictionary()


def _shaped(entries: Tensor, like: Tensor) -> Tensor:
    """Return a view of (..., size) with the shape and memory layout of a tensor."""
    leading = entries.shape[:-1]
    if like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last):
        n, c, h, w = like.shape
        return entries.view((*leading, n, h, w, c)).movedim(-1, -3)
    return entries.view((*leading, *like.shape))


def sketch(vector: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the count sketch of a vector, shape (SKETCH,).

    Each entry is added with a random sign to one of `SKETCH` sums (Charikar, Chen and
    Farach-Colton 2002). Signs and sums are the same for all nodes, so the length of the
    difference of two sketches estimates the length of the difference of the vectors.

    A sketch provides at most `SKETCH` linear equations for d unknowns, always the same
    ones, so repeated sketches reveal no further directions. Vectors of few entries can
    be reconstructed. In general, the best reconstruction without prior knowledge is a
    projection, which has a cosine of √(SKETCH / d) with the vector. For d ≥ 100
    `SKETCH` this is at most 0.1; devices send no sketches of smaller models.
    """
    index, signs = _hash(len(vector))
    return np.bincount(index, signs * vector, SKETCH).astype(np.float32)


@lru_cache(maxsize=2)
def _hash(dimension: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the index of the sum to which each entry is added, and its sign."""
    raw = np.random.Philox(key=0x5CE7).random_raw(dimension)
    index = (raw >> np.uint64(1)) % np.uint64(SKETCH)
    return index.astype(np.int64), np.where(raw & np.uint64(1), 1.0, -1.0)
