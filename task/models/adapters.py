"""LoRA adapters (Hu et al., ICLR 2022) around a frozen model, by ``peft``.

An adapter adds a product B A of two small matrices to a weight W, which stays frozen:
h = W x + (α/r) B A x, with A of shape (r, inputs) and B of shape (outputs, r).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from flwr_frl.common.errors import SettingsError, need, require, unknown
from flwr_frl.common.settings import Checked, setting
from flwr_frl.task.base import Task
from flwr_frl.task.devices import seeded
from flwr_frl.task.held_out import changed
from flwr_frl.task.models.split_model import SplitModel

# Layers that ``peft`` can adapt. Types must be equal: the weight of a subclass may be
# read without calling the layer, as in `nn.MultiheadAttention`, and an adapter would
# have no effect.
LAYERS = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Names that ``peft`` gives to the matrices of linear layers and of embeddings.
NAMES = {"A": ("lora_A", "lora_embedding_A"), "B": ("lora_B", "lora_embedding_B")}


NO_ADAPTERS = {"adapters": ("none",)}


@dataclass(frozen=True)
class AdapterSettings(Checked):
    """Adapters of a task's model.

    Parameters
    ----------
    adapters : {"none", "lora"}, default "none"
        ``lora`` freezes the representation's parameters and adds LoRA adapters to it;
        the head trains as before. The statistics of batch norms still change, and are
        sent. A model that already has adapters stays as it is.
    lora_rank : int, default 8
        Rank r of an adapter.
    lora_alpha : float, default 16
        α of the factor α/r by which an adapter's output is multiplied.
    lora_targets : str, default ""
        Names of the layers with adapters, separated by spaces: the full name in the
        model or its end, such as ``query value``. By default, all linear layers of the
        representation.
    lora_share : {"both", "b"}, default "both"
        Matrices of an adapter that are trained and shared. With ``b``, A keeps its
        random initial values and is not sent. The algorithm ``fedsa-lora`` shares A
        only.
    seed : int, default 0
        Determines the initial values of A; B begins with zeros.
    """

    adapters: Literal["none", "lora"] = setting("none")
    lora_rank: int = setting(8, ge=1, unused_if=NO_ADAPTERS)
    lora_alpha: float = setting(16.0, gt=0, unused_if=NO_ADAPTERS)
    lora_targets: str = setting(
        "", form="names of layers", safe=True, unused_if=NO_ADAPTERS
    )
    lora_share: Literal["both", "b"] = setting("both")
    seed: int = setting(0, ge=0)


def is_lora(name: str, matrix: str) -> bool:
    """Return whether an array of a model is a LoRA matrix.

    Parameters
    ----------
    name : str
        Name of the array.
    matrix : {"A", "B"}
        The matrix.
    """
    return any(part in NAMES[matrix] for part in name.split("."))


def lora_layers(model: nn.Module) -> Iterator[Any]:
    """Yield the layers of a model that have LoRA adapters."""
    for module in model.modules():
        if hasattr(module, "base_layer") and hasattr(module, "get_delta_weight"):
            yield module


def needs_lora(task: Task) -> None:
    """Refuse models without LoRA adapters."""
    adapted = next(lora_layers(task.scratch_model), None) is not None
    allowed = "lora, or a task whose model has LoRA adapters of peft"
    require(adapted, "adapters", "none", allowed)


def needs_trained_a(task: Task) -> None:
    """Refuse models without LoRA adapters, or whose matrices A are all frozen."""
    needs_lora(task)
    trained = any(is_lora(name, "A") for name in task.initial_state)
    require(trained, "lora-share", "b", "both: the matrices A must be trained")


def with_adapters(task: Task, settings: AdapterSettings) -> Task:
    """Return a task whose model has the adapters of the settings.

    Without any, this is the same object.

    Raises
    ------
    SettingsError
        If ``peft`` is missing, or the task cannot have adapters; later, when the model
        is built, if it has no layer for them.
    """
    if settings.adapters == "none" and settings.lora_share == "both":
        return task
    name, value = "lora-share", str(settings.lora_share)
    if settings.adapters == "lora":
        need("peft", "transformers", "adapters='lora'")
        name, value = "adapters", settings.adapters
    allowed = f"the default for a {type(task).__name__}, which has no layers for them"
    require(task.adaptable and not task.untrainable, name, value, allowed)
    return changed(task, {"initial_model": partial(adapted_model, task, settings)})


def adapted_model(task: Task, settings: AdapterSettings) -> SplitModel:
    """Return a task's initial model with adapters, the same in every call."""
    model = task.initial_model()
    if next(lora_layers(model), None) is None:
        allowed = "both: the model has no adapters"
        require(settings.adapters == "lora", "lora-share", settings.lora_share, allowed)
        add_lora(model, settings)
    if settings.lora_share == "b":
        for name, parameter in model.named_parameters():
            if is_lora(name, "A"):
                parameter.requires_grad_(False)
    return model


def add_lora(model: SplitModel, settings: AdapterSettings) -> None:
    """Freeze a model's representation and add LoRA adapters to it, in place."""
    from peft import LoraConfig, inject_adapter_in_model

    targets = _targets(model, settings.lora_targets)
    names = [f"representation.{name}".rstrip(".") for name in targets]
    rank, alpha = settings.lora_rank, settings.lora_alpha
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=names)  # type: ignore[arg-type]
    trained = [p for p in model.head.parameters() if p.requires_grad]
    try:
        with seeded(settings.seed):
            inject_adapter_in_model(config, model)
    # The rank of a grouped convolution must be a multiple of its groups.
    except ValueError as error:
        raise SettingsError(f"lora-rank {rank}: {error}", "lora-rank") from None
    # `peft` freezes all parameters but those of the adapters.
    for parameter in trained:
        parameter.requires_grad_(True)
    if any(isinstance(m, nn.TransformerEncoderLayer) for m in model.modules()):
        # In evaluation torch's fast path reads the weights of the layers without a
        # call, and would leave out their adapters.
        torch.backends.mha.set_fastpath_enabled(False)


def _targets(model: SplitModel, text: str) -> set[str]:
    """Return the names of the layers of the representation that get adapters."""
    kinds = {n: type(m) for n, m in model.representation.named_modules()}
    # `transformers` has its own Conv1D, a linear layer.
    linear = {n for n, k in kinds.items() if k is nn.Linear or k.__name__ == "Conv1D"}
    layers = linear | {name for name, kind in kinds.items() if kind in LAYERS}
    if not text.split():
        allowed = "none, or lora-targets: the representation has no linear layers"
        require(bool(linear), "adapters", "lora", allowed)
        return linear
    targets = set[str]()
    for word in text.split():
        plain = word.removeprefix("representation.")
        named = {n for n in layers if f".{n}".endswith(f".{plain}")}
        if not named:
            names = {*layers, *(name.rpartition(".")[2] for name in layers)} - {""}
            raise unknown("lora-targets", word, names, "the names in the model")
        targets |= named
    return targets
