"""A model's parameters as one vector, for algorithms that exchange vectors."""

from typing import Self, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from flwr_frl.task.settings import SettingsError
from flwr_frl.task.sgd import SGD


class FlatParameters:
    """All parameters of a model as one vector, and their gradients as another.

    The parameters become views of the vector: what changes one changes the other.
    Buffers, such as the statistics of a batch norm, are no part of it.

    Parameters
    ----------
    model : nn.Module
        Its parameters, all float32, are moved into the vector.

    Attributes
    ----------
    vector, gradient : Tensor, shape (d,)
        In the order of ``model.parameters()``; a parameter that is channels last in
        memory lies so here.
    decayed : Tensor, shape (d,)
        1 for entries of weights, 0 for those of biases: where weight decay acts.
    sizes : tuple of int
        Entries of each parameter.
    """

    def __init__(self, model: nn.Module) -> None:
        named = list(model.named_parameters())
        for name, parameter in named:
            if parameter.dtype != torch.float32:
                kind = str(parameter.dtype).removeprefix("torch.")
                raise SettingsError(
                    f"the model's {name!r} is {kind}; gossip exchanges float32"
                )
        self.sizes = tuple(p.numel() for _, p in named)
        device = named[0][1].device
        self.vector = torch.empty(sum(self.sizes), device=device)
        self.gradient = torch.zeros(sum(self.sizes), device=device)
        self.decayed = torch.ones(sum(self.sizes), device=device)
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        start = 0
        for (name, parameter), size in zip(named, self.sizes, strict=True):
            piece = slice(start, start + size)
            view = _shaped(self.vector[piece], parameter)
            view.copy_(parameter.data)
            parameter.data = view
            self._gradients.append((parameter, _shaped(self.gradient[piece], view)))
            if SGD.is_bias(name):
                self.decayed[piece] = 0
            start += size
        self.attach()

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Return a model's, made only once; other training may have gone on since."""
        found = _MADE.get(model)
        if found is None:
            found = _MADE[model] = cls(model)
        found.attach()
        return cast(Self, found)

    def attach(self) -> None:
        """Let the model's gradients be computed, into ``gradient``."""
        for parameter, gradient in self._gradients:
            parameter.requires_grad_(True)
            parameter.grad = gradient


_MADE: WeakKeyDictionary[nn.Module, FlatParameters] = WeakKeyDictionary()


def _shaped(piece: Tensor, like: Tensor) -> Tensor:
    if like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last):
        n, c, h, w = like.shape
        return piece.view(n, h, w, c).permute(0, 3, 1, 2)
    return piece.view(like.shape)
