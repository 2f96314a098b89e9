"""Side effects of a model's forward pass, detected by a trial."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.overrides import TorchFunctionMode

from flwr_frl.task.devices import random_state, set_random_state


class Observed(NamedTuple):
    """Side effects of a forward pass in training mode.

    Parameters
    ----------
    random_parts : frozenset of str
        Parts that draw random numbers; both if an embedding has a maximum norm.
    has_padding : bool
        True if an embedding has a padding index.
    has_tensor_features : bool
        True if the representation returns a tensor.
    mixes_examples : bool
        True if the representation has batch norms without running statistics: even in
        evaluation mode, the features of an example depend on its batch.
    """

    random_parts: frozenset[str]
    has_padding: bool
    has_tensor_features: bool
    mixes_examples: bool


@contextmanager
def on_trial(model: nn.Module) -> Iterator[None]:
    """Restore a model's modes and buffers and torch's generators after a block.

    Gradients are off within the block.
    """
    modes = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    state = random_state()
    with torch.no_grad():
        try:
            yield
        finally:
            set_random_state(state)
            for module, training in modes.items():
                module.training = training
            for buffer, value in buffers:
                # Expanded buffers cannot be written, and have not changed.
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


class _Embeddings(TorchFunctionMode):
    """Detects embeddings with padding, also those that are called as functions."""

    have_padding = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        # torch passes all arguments except inputs and weights by name.
        if func is nn.functional.embedding and named["padding_idx"] is not None:
            self.have_padding = True
        return func(*args, **named)


def observe(model: nn.Module, inputs: Tensor) -> Observed:
    """Return the side effects of a split model's forward pass in training mode.

    Model and generators are left as they were.
    """
    kinds = nn.Embedding | nn.EmbeddingBag
    if any(isinstance(m, kinds) and m.max_norm is not None for m in model.modules()):
        # Such a forward pass shortens weights in place, so none is tried.
        return Observed(frozenset(("representation", "head")), False, False, False)
    if len(inputs) == 1:
        # Norms without running statistics refuse a single example.
        inputs = torch.cat([inputs, inputs])
    state, random_parts, embeddings = random_state(), set(), _Embeddings()
    with on_trial(model):
        for module in model.train().modules():
            # In evaluation mode norms accept one example and keep their statistics.
            if isinstance(module, _NormBase):
                module.eval()
        for name in ("representation", "head"):
            with embeddings:
                inputs = model.get_submodule(name)(inputs)
            if name == "representation":
                has_tensor_features = isinstance(inputs, Tensor)
            if not all(map(torch.equal, state, random_state())):
                random_parts.add(name)
                set_random_state(state)
    mixes_examples = any(
        map(uses_batch_statistics, model.get_submodule("representation").modules())
    )
    padding, parts = embeddings.have_padding, frozenset(random_parts)
    return Observed(parts, padding, has_tensor_features, mixes_examples)


def uses_batch_statistics(module: nn.Module) -> bool:
    """Return True for a batch norm without running statistics."""
    return isinstance(module, _BatchNorm) and module.running_mean is None
