"""A model in two parts: a representation and a head."""

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from flwr_frl.common.errors import SettingsError
from flwr_frl.task.devices import random_state, set_random_state
from flwr_frl.task.models.layers import covers

Part = Literal["representation", "head", "all"]
# Above this many values, on a CPU, a single model stays in the cache, but a stack of
# models does not (``benchmarks/results/cohort.md``).
LARGE = 50_000
# Attributes of modules that contain hooks.
_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks"),
    *("_backward_hooks", "_backward_pre_hooks"),
)


class Observed(NamedTuple):
    """A forward pass in training mode, as observed.

    Parameters
    ----------
    is_stackable : bool
        True if it draws no random numbers, and no embedding has a padding index or a
        maximum norm.
    has_fixed_features : bool
        True if the features of an example are a tensor that depends on the example
        only.
    """

    is_stackable: bool
    has_fixed_features: bool


class SplitModel(nn.Module):
    """A model that computes ``head(representation(x))``.

    Parameter names start with ``representation.`` or ``head.``.

    Parameters
    ----------
    representation : nn.Module
        Maps inputs to features.
    head : nn.Module
        Maps features to outputs.

    Attributes
    ----------
    head_name : str
        Name of the head in the module that was split; empty if none was.
    """

    head_name = ""
    _observed: Observed | None = None

    def __init__(self, representation: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.representation = representation
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Return ``head(representation(x))``."""
        output: Tensor = self.head(self.representation(x))
        return output

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert the tensors, and drop the caches that contain old buffers."""
        for cached in ("tensors", "structure"):
            self.__dict__.pop(cached, None)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers, not copies, by their names in ``state_dict``."""
        state = self.state_dict(keep_vars=True)
        return {name: t for name, t in state.items() if isinstance(t, Tensor)}

    @cached_property
    def structure(self) -> "Structure":
        """Modules, parameters and buffers, cached, as torch collects them slowly."""
        return Structure(self)

    @cached_property
    def kind(self) -> Hashable:
        """Equal for models that compute the same function of the same tensors.

        Models are compared by ``repr``, so modules with equal ``repr`` must have equal
        attributes.
        """
        shapes = tuple((n, t.shape, t.dtype) for n, t in self.tensors.items())
        # One string for all equal models, as it is compared and hashed often.
        return sys.intern(f"{self!r} {shapes}")

    @cached_property
    def is_tied(self) -> bool:
        """True if representation and head share a parameter."""
        in_head = {id(parameter) for parameter in self.head.parameters()}
        return any(id(p) in in_head for p in self.representation.parameters())

    @cached_property
    def is_layered(self) -> bool:
        """True if both parts are sequences of layers that `layers.applied` supports."""
        parts = covers(self.representation) and covers(self.head)
        return parts and not _shares_parameters(self)

    @cached_property
    def has_layered_head(self) -> bool:
        """True if the head is a sequence of layers that `layers.applied` supports."""
        return covers(self.head) and not _shares_parameters(self.head)

    @property
    def is_large(self) -> bool:
        """True if, on a CPU, several such models are never faster together."""
        return self.structure.num_values > LARGE

    def observed(self, inputs: Callable[[], Tensor]) -> Observed:
        """Return facts about a forward pass in training mode, which is tried only once.

        Parameters
        ----------
        inputs : callable
            Returns inputs to try the model on.
        """
        if self._observed is None:
            self._observed = self._observe(inputs())
        return self._observed

    def _observe(self, inputs: Tensor) -> Observed:
        modules, kinds = self.structure.modules, nn.Embedding | nn.EmbeddingBag
        embeddings = [m for m in modules if isinstance(m, kinds)]
        if any(embedding.max_norm is not None for embedding in embeddings):
            # Such a forward pass shortens weights in place, so none is tried.
            return Observed(is_stackable=False, has_fixed_features=False)
        state = random_state()
        with on_trial(self):
            self.train()
            # In evaluation mode norms accept one example and keep their statistics.
            for norm in self.structure.norms:
                norm.eval()
            features = self.representation(inputs)
            # In evaluation mode, too, some norms compute statistics of the batch.
            uses_batch = any(
                isinstance(norm, _BatchNorm) and norm.running_mean is None
                for norm in self.structure.norms
                if norm in self.structure.members["representation"]
            )
            is_fixed = all(map(torch.equal, state, random_state())) and not uses_batch
            has_fixed_features = isinstance(features, Tensor) and is_fixed
            self.head(features)
            is_stackable = all(map(torch.equal, state, random_state()))
        if any(embedding.padding_idx is not None for embedding in embeddings):
            is_stackable = False
        return Observed(is_stackable, has_fixed_features)

    def can_be_stacked(self, inputs: Callable[[], Tensor]) -> bool:
        """Return True if several models of this kind can be trained as one.

        Such models differ only in their `tensors`: they have no hooks, and no buffers
        outside of the state dict. They draw no random numbers, because stacked models
        would draw other numbers than a single model. They have no embedding with
        padding or a maximum norm, because for stacked models some versions of torch
        compute a wrong gradient of the padding, and all shorten the rows of copies.
        """
        modules, hidden = self.structure.modules, self.structure.hidden_buffers
        hooks = (getattr(m, name) for m in (self, *modules) for name in _HOOKS)
        hooked = any(hooks) or any(
            p._backward_hooks or p._post_accumulate_grad_hooks
            for p in self.structure.parameters.values()
        )
        return not (hooked or hidden) and self.observed(inputs).is_stackable

    def refuses_one(self, inputs: Tensor) -> bool:
        """Return True if batch norms cannot train on a single example, by a trial.

        Parameters
        ----------
        inputs : Tensor, shape (1, ...)
            The inputs of one example.
        """
        norms = self.structure.norms
        if not any(norm.training or norm.running_mean is None for norm in norms):
            return False
        # torch raises this error; one of the user's own occurs in training as well.
        with on_trial(self):
            try:
                self(inputs)
            except ValueError:
                return True
        return False

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Overwrite all parameters and buffers with values of the same shapes."""
        values = [state[name] for name in self.tensors]
        for (name, tensor), value in zip(self.tensors.items(), values, strict=True):
            # torch would broadcast the value.
            if value.shape != tensor.shape:
                expected = f"{[*value.shape]}; expected {[*tensor.shape]}"
                raise SettingsError(f"the shape of {name!r} is {expected}")
        torch._foreach_copy_([*self.tensors.values()], values)

    @property
    def first_linear(self) -> nn.Linear | None:
        """First layer of the head if it is linear, None otherwise."""
        first = next((m for m in self.head.modules() if not any(m.children())), None)
        return first if isinstance(first, nn.Linear) else None

    def part(self, name: Part) -> nn.Module:
        """Return a part by name; ``"all"`` is the model itself."""
        return self if name == "all" else self.get_submodule(name)

    def linear_head(self, who: str) -> nn.Linear:
        """Return the head if it is a single linear layer.

        Parameters
        ----------
        who : str
            The algorithm that needs it, for the error message.

        Raises
        ------
        SettingsError
            If it is not.
        """
        if not isinstance(self.head, nn.Linear):
            raise SettingsError(
                f"{who} needs a head that is one linear layer; this model's is a "
                f"{type(self.head).__name__}; head-layers=1 may give one",
                "head-not-linear",
            )
        return self.head

    @classmethod
    def wrap(cls, module: nn.Module, head: str = "fc") -> Self:
        """Split any module at its named head.

        The head must be the last layer that the module applies. It is taken out and
        replaced by the identity.

        Parameters
        ----------
        module : nn.Module
            The module, which becomes the representation. Modified in place. It may be
            a model of ``transformers``, whose logits are its output, or of ``peft``.
        head : str, default "fc"
            Dotted name of the submodule that is the head; if empty, it is the last of
            the ``modules_to_save`` of ``peft``.

        Returns
        -------
        SplitModel
            The split model.

        Raises
        ------
        SettingsError
            If the module has no submodule of that name.
        """
        modules = dict(module.named_modules())
        # Modules that `peft` trains beside the adapters, each with an unused original.
        kinds = "modules_to_save", "original_module"
        saved = [n for n, m in modules.items() if all(hasattr(m, k) for k in kinds)]
        head = head or (saved[-1] if saved else "")
        if not head or head not in modules:
            linear = [n for n, m in modules.items() if isinstance(m, nn.Linear)]
            raise SettingsError(
                f"the model {type(module).__name__} has no head named {head!r}; "
                f"its linear layers: {', '.join(linear) or 'none'}"
            )
        parent, _, name = head.rpartition(".")
        setattr(module.get_submodule(parent), name, nn.Identity())
        base: Any = module
        if hasattr(base, "get_base_model"):
            base = base.get_base_model()
        # `transformers` is not imported; a task that uses it has done so.
        if any(kind.__name__ == "PreTrainedModel" for kind in type(base).__mro__):
            module.register_forward_hook(_take_logits)
        last = modules[head]
        if head in saved:
            last = next(last.get_submodule("modules_to_save").children())
        model = cls(module, last)
        model.head_name = head
        return model


def logits_of(output: Any) -> Any:
    """Return the logits in an output object, and anything else unchanged."""
    return getattr(output, "logits", output)


def _take_logits(module: nn.Module, inputs: Any, output: Any) -> Any:
    return logits_of(output)


def called_with(module: nn.Module, parameters: Mapping[str, Tensor], x: Tensor) -> Any:
    """Return a module's output with some of its parameters replaced.

    A shared parameter is replaced in all of its places, and then restored in all of
    them, which torch's ``functional_call`` does not do.

    Parameters
    ----------
    module : nn.Module
        The module; it is not modified.
    parameters : mapping of str to Tensor
        Replacements by their names in ``named_parameters``.
    x : Tensor
        The inputs.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    replacements = {}
    for prefix, owner in module.named_modules():
        for place, parameter in owner._parameters.items():
            if (name := names.get(id(parameter), "")) in parameters:
                full = f"{prefix}.{place}" if prefix else place
                replacements[full] = parameters[name]
    return functional_call(module, replacements, (x,), tie_weights=False)


def _shares_parameters(module: nn.Module) -> bool:
    named = module.named_parameters(remove_duplicate=False)
    return sum(1 for _ in named) > sum(1 for _ in module.parameters())


class Structure:
    """Modules, parameters and buffers of a model.

    Attributes
    ----------
    modules : list of nn.Module
        All modules but the model itself, which would otherwise contain itself.
    parameters : dict of str to nn.Parameter
        All parameters by name; a shared one has its first name only.
    hidden_buffers : dict of str to Tensor
        Buffers outside of the state dict.
    num_values : int
        Number of values of all tensors.
    norms : list of nn.Module
        Modules with statistics of batches or examples.
    members : dict of str to set
        Modules and parameters of each part.
    """

    def __init__(self, model: SplitModel) -> None:
        _, *self.modules = model.modules()
        self.parameters = dict(model.named_parameters())
        buffers, tensors = dict(model.named_buffers()), model.tensors
        self.hidden_buffers = {n: b for n, b in buffers.items() if n not in tensors}
        self.num_values = sum(t.numel() for t in (tensors | buffers).values())
        self.norms = [m for m in self.modules if isinstance(m, _NormBase)]
        self.members: dict[str, set[nn.Module | nn.Parameter]] = {
            part: {*model.part(part).modules(), *model.part(part).parameters()}
            for part in get_args(Part)
        }
        self.members["all"].remove(model)


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
