"""Layers and losses of several models of one kind at once, by batched products.

`torch.func.vmap` does the same for any module and takes some tenths of a millisecond
a layer for it; small models are done sooner.
"""

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional

Loss = Callable[..., Tensor]
# The class that cross-entropy leaves out.
IGNORED = -100
# Own tensors by their names within the layer, stacked, and inputs (models, batch, ...).
Layer = Callable[[nn.Module, Mapping[str, Tensor], Tensor], Tensor]


def _linear(layer: nn.Module, own: Mapping[str, Tensor], x: Tensor) -> Tensor:
    rows, weight = x.flatten(1, -2), own["weight"].transpose(1, 2)
    if "bias" in own:
        found = torch.baddbmm(own["bias"][:, None], rows, weight)
    else:
        found = torch.bmm(rows, weight)
    return found.view(*x.shape[:-1], -1)


def _convolution(layer: nn.Module, own: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Convolve each model's channels with its own filters, as a group of them."""
    layer = cast(nn.Conv2d, layer)
    models = len(x)
    convolve = {3: functional.conv1d, 4: functional.conv2d}[x.dim() - 1]
    found = convolve(
        x.transpose(0, 1).flatten(1, 2),
        own["weight"].flatten(0, 1),
        own["bias"].flatten() if "bias" in own else None,
        layer.stride,
        layer.padding,
        layer.dilation,
        models * layer.groups,
    )
    return torch.unflatten(found, 1, (models, -1)).transpose(0, 1)


def _flatten(layer: nn.Module, own: Mapping[str, Tensor], x: Tensor) -> Tensor:
    return x.flatten(2)


def _example_by_example(
    layer: nn.Module, own: Mapping[str, Tensor], x: Tensor
) -> Tensor:
    found: Tensor = layer(x.flatten(0, 1))
    return torch.unflatten(found, 0, x.shape[:2])


LAYERS: dict[type[nn.Module], Layer] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Flatten: _flatten,
    **dict.fromkeys(
        (
            *(nn.Identity, nn.Dropout, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU),
            *(nn.SiLU, nn.Tanh, nn.Sigmoid),
            *(nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d),
        ),
        _example_by_example,
    ),
}


def none_counts(targets: Tensor) -> Tensor:
    """Return of which batches cross-entropy ignores all targets, shape (batches,).

    Their loss is a mean over nothing. ``targets`` are of shape (batches, batch, ...).
    """
    if targets.is_floating_point():
        return torch.zeros(len(targets), dtype=torch.bool)
    return (targets == IGNORED).flatten(1).all(1)


def how_many_count(targets: Tensor) -> int:
    """Return how many of a batch's targets cross-entropy does not ignore."""
    if targets.is_floating_point():
        return len(targets)
    return int((targets != IGNORED).sum())


def covers(module: nn.Module) -> bool:
    """Return whether `applied` can be used: only layers in a row that it knows."""
    if type(module) is nn.Sequential:
        return all(map(covers, module))
    if isinstance(module, nn.Conv1d | nn.Conv2d) and module.padding_mode != "zeros":
        return False
    if isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) != (1, -1):
        return False
    return type(module) in LAYERS


def applied(
    module: nn.Module, state: Mapping[str, Tensor], name: str, x: Tensor
) -> Tensor:
    """Return the outputs of several models' modules.

    Parameters
    ----------
    module : nn.Module
        One that `covers` takes; of any of the models.
    state : mapping of str to Tensor
        The models' tensors, stacked, by the names that they have in a model.
    name : str
        What the module is called there, with a dot behind it.
    x : Tensor, shape (models, batch, ...)
        The inputs.

    Returns
    -------
    Tensor, shape (models, batch, ...)
        The outputs.
    """
    if isinstance(module, nn.Sequential):
        # A module that stands there twice is no child twice.
        for child, layer in zip(module._modules, module, strict=True):
            x = applied(layer, state, f"{name}{child}.", x)
        return x
    own = {n: state[name + n] for n in ("weight", "bias") if name + n in state}
    return LAYERS[type(module)](module, own, x)


def mean_losses(
    loss: Loss, outputs: Tensor, targets: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Return each model's loss, shape (models,).

    ``weights``, of shape (models, batch), are 0 where an example only fills the batch
    up. The loss is then taken to be a mean over the examples.
    """
    entropy = loss is functional.cross_entropy
    if entropy:
        flat = outputs.flatten(0, 1), targets.flatten(0, 1)
        each = functional.cross_entropy(*flat, reduction="none")
        each = each.reshape(*outputs.shape[:2], -1)
    elif loss is functional.mse_loss and outputs.shape == targets.shape:
        each = functional.mse_loss(outputs, targets, reduction="none")
        each = each.reshape(*outputs.shape[:2], -1)
    elif weights is None:
        return vmap(loss)(outputs, targets)
    else:
        each = vmap(vmap(lambda o, t: loss(o[None], t[None])))(outputs, targets)
        each = each[..., None]
    if weights is not None:
        counted = torch.where(weights > 0, each.mean(2), 0.0)
        return counted.sum(1) / weights.sum(1).clamp(min=1)
    if entropy and not targets.is_floating_point():
        counts = (targets != IGNORED).flatten(1).sum(1)
        return each.flatten(1).sum(1) / counts
    return each.flatten(1).mean(1)
