"""The frozen part of a model, which every device builds and none trains.

It consists of the parameters that require no gradient in the initial model, and of the
buffers outside of the state dict (``persistent=False``).
"""

import copy
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor, nn

from flwr_frl.common.sealed import digest
from flwr_frl.task.models.split_model import SplitModel
from flwr_frl.task.models.weights import bytes_of

if TYPE_CHECKING:
    from flwr_frl.task.base import BaseTask

Module = TypeVar("Module", bound=nn.Module)


def new_model(task: "BaseTask") -> SplitModel:
    """Return a task's initial model, with its frozen part outside of the state dict."""
    model = task.initial_model()
    set_apart(model)
    return model


def set_apart(model: nn.Module) -> None:
    """Turn parameters that require no gradient into buffers outside of the state dict.

    They are then neither trained nor sent nor reset, and move between devices with the
    model.
    """
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and not parameter.requires_grad:
                del module._parameters[name]
                # A shared parameter stays shared: `data` has the same memory.
                module.register_buffer(name, parameter.data, persistent=False)


def frozen_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the frozen tensors of a model of `new_model` by name, without copying."""
    persistent = model.state_dict().keys()
    named = dict(model.named_buffers(remove_duplicate=False))
    return {name: value for name, value in named.items() if name not in persistent}


def copy_sharing_frozen(module: Module) -> Module:
    """Return a copy of a model or part that shares the frozen tensors."""
    shared = {id(tensor): tensor for tensor in frozen_tensors(module).values()}
    return copy.deepcopy(module, shared)


def frozen_digest(model: nn.Module, names: tuple[str, ...]) -> str:
    """Return a short digest of some frozen tensors; empty for none.

    It covers names, dtypes, shapes and values. It is computed only once per model,
    because a buffer may be a cache that changes later.
    """
    if not names:
        return ""
    digests: dict[tuple[str, ...], str] = model.__dict__.setdefault("_digests", {})
    if names not in digests:
        tensors = frozen_tensors(model)
        chosen = {name: tensors[name].detach().cpu() for name in names}
        digests[names] = digest(bytes_of(chosen), {})[:16]
    return digests[names]
