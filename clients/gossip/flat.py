"""A model's parameters as one vector, for algorithms that exchange vectors."""

import torch
from torch import Tensor, nn


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
        model.requires_grad_(True)
        named = list(model.named_parameters())
        self.sizes = tuple(p.numel() for _, p in named)
        self.vector = torch.empty(sum(self.sizes))
        self.gradient = torch.zeros(sum(self.sizes))
        self.decayed = torch.ones(sum(self.sizes))
        start = 0
        for (name, parameter), size in zip(named, self.sizes, strict=True):
            piece = slice(start, start + size)
            view = _shaped(self.vector[piece], parameter)
            view.copy_(parameter.data)
            parameter.data = view
            parameter.grad = _shaped(self.gradient[piece], parameter)
            if name.endswith("bias"):
                self.decayed[piece] = 0
            start += size


def _shaped(piece: Tensor, like: Tensor) -> Tensor:
    if like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last):
        n, c, h, w = like.shape
        return piece.view(n, h, w, c).permute(0, 3, 1, 2)
    return piece.view(like.shape)
