"""Layers and losses of several models of one architecture, by batched products.

`torch.func.vmap` supports any module, but takes some tenths of a millisecond more per
layer, so small models are faster this way.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from flwr_frl.task.examples import IGNORED

# Maps a layer, its stacked tensors by name, and inputs (models, batch, ...) to outputs.
Layer = Callable[[nn.Module, Mapping[str, Tensor], Tensor], Tensor]


def _linear(layer: nn.Module, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
    rows, weight = x.flatten(1, -2), tensors["weight"].transpose(1, 2)
    if "bias" in tensors:
        outputs = torch.baddbmm(tensors["bias"][:, None], rows, weight)
    else:
        outputs = torch.bmm(rows, weight)
    return outputs.view(*x.shape[:-1], -1)


def _convolution(layer: nn.Module, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Convolve the models' inputs as groups of channels of one convolution."""
    layer = cast(nn.Conv2d, layer)
    models = len(x)
    outputs = {3: functional.conv1d, 4: functional.conv2d}[x.dim() - 1](
        x.transpose(0, 1).flatten(1, 2),
        tensors["weight"].flatten(0, 1),
        tensors["bias"].flatten() if "bias" in tensors else None,
        layer.stride,
        layer.padding,
        layer.dilation,
        models * layer.groups,
    )
    return torch.unflatten(outputs, 1, (models, -1)).transpose(0, 1)


def _per_example(layer: nn.Module, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
    outputs: Tensor = layer(x.flatten(0, 1))
    return torch.unflatten(outputs, 0, x.shape[:2])


LAYERS: dict[type[nn.Module], Layer] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    **dict.fromkeys(
        (
            *(nn.Identity, nn.Dropout, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU),
            *(nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Flatten),
            *(nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d),
        ),
        _per_example,
    ),
}


def covers(module: nn.Module) -> bool:
    """Return True if `applied` supports a module: a sequence of `LAYERS`."""
    if "forward" in vars(module):
        return False
    if type(module) is nn.Sequential:
        return all(map(covers, module))
    if isinstance(module, nn.Conv1d | nn.Conv2d) and module.padding_mode != "zeros":
        return False
    if isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) != (1, -1):
        return False
    return type(module) in LAYERS


def applied(
    module: nn.Module, state: Mapping[str, Tensor], prefix: str, x: Tensor
) -> Tensor:
    """Return the outputs of a module of several models.

    Parameters
    ----------
    module : nn.Module
        The module in any of the models; `covers` must be True.
    state : mapping of str to Tensor
        The models' tensors, stacked, by their names in a model.
    prefix : str
        Name of the module in the model, followed by a dot.
    x : Tensor, shape (models, batch, ...)
        The inputs.

    Returns
    -------
    Tensor, shape (models, batch, ...)
        The outputs.
    """
    if isinstance(module, nn.Sequential):
        # named_children() would skip a module that occurs a second time.
        for child, layer in zip(module._modules, module, strict=True):
            x = applied(layer, state, f"{prefix}{child}.", x)
        return x
    names = ("weight", "bias")
    tensors = {n: state[prefix + n] for n in names if prefix + n in state}
    return LAYERS[type(module)](module, tensors, x)


class _ChannelNorm(torch.autograd.Function):
    """Batch norm, which `vmap` applies to the channels of all models at once."""

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        """Return the result for one model."""
        return functional.batch_norm(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Do nothing: the operations within `vmap` have their own gradients."""

    @staticmethod
    def vmap(info: Any, dims: Any, *arguments: Any) -> Any:
        """Return the results of several models; statistics change in place."""
        pairs = zip(arguments[:5], dims, strict=False)
        x, *more = (t if dim is None else t.movedim(dim, 0) for t, dim in pairs)
        channels = x.transpose(0, 1).flatten(1, 2)
        vectors: list[Any] = [t if t is None else t.flatten() for t in more]
        outputs = functional.batch_norm(channels, *vectors, *arguments[5:])
        return torch.unflatten(outputs, 1, (info.batch_size, -1)), 1


class StackedNorms(TorchFunctionMode):
    """Applies batch norms within `vmap` that torch does not support there.

    These are norms of images whose channels come last in memory, on a GPU, and of
    inputs in bfloat16 with statistics in float32.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch."""
        if func is not functional.batch_norm:
            return func(*args, **(kwargs or {}))
        # torch passes the other arguments in their order, by name.
        arguments = *args, *kwargs.values()
        x, mean = args[:2]
        if x.device.type == "cpu" and (mean is None or mean.dtype == x.dtype):
            return func(*arguments)
        return _ChannelNorm.apply(*arguments)


def mean_losses(
    loss: Callable[..., Tensor],
    outputs: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
) -> Tensor:
    """Return each model's loss, shape (models,).

    Parameters
    ----------
    loss : callable
        Maps one model's outputs and targets to the mean over its batch.
    outputs, targets : Tensor, shape (models, batch, ...)
        Outputs and targets of all models.
    weights : Tensor, shape (models, batch), optional
        1 for examples and 0 for padding, with cross-entropy and the squared error.
    """
    entropy = loss is functional.cross_entropy
    if entropy:
        flat = outputs.flatten(0, 1), targets.flatten(0, 1)
        each = functional.cross_entropy(*flat, reduction="none")
    elif loss is functional.mse_loss:
        each = functional.mse_loss(outputs, targets, reduction="none")
    else:
        return vmap(loss)(outputs, targets)
    each = each.reshape(*outputs.shape[:2], -1)
    if weights is not None:
        counted = torch.where(weights > 0, each.mean(2), 0.0)
        return counted.sum(1) / weights.sum(1).clamp(min=1)
    if entropy and not targets.is_floating_point():
        return each.flatten(1).sum(1) / (targets != IGNORED).flatten(1).sum(1)
    return each.flatten(1).mean(1)
