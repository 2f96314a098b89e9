"""A model in two parts: a representation and a head."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode

from flwr_frl.task.devices import random_state, set_random_state
from flwr_frl.task.layers import covers
from flwr_frl.task.settings import SettingsError

Part = Literal["representation", "head", "all"]
_KINDS: dict[Hashable, int] = {}


class SplitModel(nn.Module):
    """A model that is ``head(representation(x))``.

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
        What the head was called in the module that was split; empty without one.
    """

    head_name = ""
    _tried: "Tried | None" = None

    def __init__(self, representation: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.representation = representation
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Return ``head(representation(x))``."""
        output: Tensor = self.head(self.representation(x))
        return output

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert the tensors; buffers become other ones."""
        self.__dict__.pop("tensors", None)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The model's own parameters and buffers, as ``state_dict`` names them."""
        named = [
            *self.named_parameters(remove_duplicate=False),
            *self.named_buffers(remove_duplicate=False),
        ]
        found = dict(named)
        return {name: found[name] for name in self.state_dict() if name in found}

    @cached_property
    def kind(self) -> Hashable:
        """Equal for models that compute the same with the same tensors.

        What their modules have besides must be equal where their texts are.
        """
        shapes = tuple((n, t.shape, t.dtype) for n, t in self.tensors.items())
        # A number is hashed faster than all that.
        return _KINDS.setdefault((repr(self), shapes), len(_KINDS))

    def is_random(self, part: Part, inputs: Callable[[], Tensor]) -> bool:
        """Return whether a part draws random numbers while it trains.

        That is tried once, on some inputs: a forward of one's own may draw them by any
        function of torch.
        """
        drawing = self._on_trial(inputs).drawing
        return bool(drawing) if part == "all" else part in drawing

    def embeds_apart(self, inputs: Callable[[], Tensor]) -> bool:
        """Return whether a forward has an embedding that `is_plain` would refuse.

        That is seen as in `is_random`: it may be no module.
        """
        return self._on_trial(inputs).embeds

    @cached_property
    def is_plain(self) -> bool:
        """Whether models of this kind differ in nothing but `tensors`.

        They do not with hooks and with buffers outside of the state dict; and for
        several models at once torch computes a wrong gradient of an embedding's
        padding, and shortens rows of copies where there is a largest norm.
        """
        modules = list(self.modules())
        hooked = any(m._forward_hooks or m._forward_pre_hooks for m in modules)
        embeddings = [m for m in modules if isinstance(m, nn.Embedding)]
        bags = [m for m in modules if isinstance(m, nn.EmbeddingBag)]
        padded = any(m.padding_idx is not None for m in embeddings)
        shortened = any(m.max_norm is not None for m in [*embeddings, *bags])
        hidden = {name for name, _ in self.named_buffers()} - self.tensors.keys()
        return not (hooked or padded or shortened or hidden)

    def _on_trial(self, inputs: Callable[[], Tensor]) -> "Tried":
        if self._tried is None:
            self._tried = tried(self, inputs())
        return self._tried

    @cached_property
    def is_tied(self) -> bool:
        """Whether a parameter is in both parts."""
        own = {id(parameter) for parameter in self.head.parameters()}
        return any(id(p) in own for p in self.representation.parameters())

    @cached_property
    def is_layered(self) -> bool:
        """Whether it is made of layers in a row that `flwr_frl.task.layers` knows."""
        named = self.named_parameters(remove_duplicate=False)
        shared = sum(1 for _ in named) > sum(1 for _ in self.parameters())
        return not shared and covers(self.representation) and covers(self.head)

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Overwrite all parameters and buffers, as ``load_state_dict`` does.

        Raises
        ------
        SettingsError
            If a name is missing, or a shape is another one.
        """
        for name, own in self.tensors.items():
            value = state.get(name)
            if value is None or value.shape != own.shape:
                found = "missing" if value is None else f"of shape {list(value.shape)}"
                raise SettingsError(
                    f"{name!r} is {found}; the model's is of shape {list(own.shape)}"
                )
            own.copy_(value)

    @property
    def first_linear(self) -> nn.Linear | None:
        """The linear layer with which the head begins, where it does."""
        leaves = (m for m in self.head.modules() if not any(m.children()))
        first = next(leaves, None)
        return first if isinstance(first, nn.Linear) else None

    def part(self, name: Part) -> nn.Module:
        """Return a part by name; ``"all"`` is the whole model."""
        return self if name == "all" else self.get_submodule(name)

    def linear_head(self, who: str) -> nn.Linear:
        """Return the head; `SettingsError` if it is not one linear layer.

        ``who`` needs it to be one.
        """
        if not isinstance(self.head, nn.Linear):
            raise SettingsError(
                f"{who} needs a head that is one linear layer; this model's is a "
                f"{type(self.head).__name__}; head-layers=1 may give one"
            )
        return self.head

    @classmethod
    def wrap(cls, module: nn.Module, head: str = "fc") -> Self:
        """Split any module at its named head.

        The head must be the last thing that the module applies; it is taken out and
        replaced by the identity.

        Parameters
        ----------
        module : nn.Module
            The module. It becomes the representation and is changed in place.
        head : str, default "fc"
            Dotted name of the submodule that is the head.

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
        if not head or head not in modules:
            linear = [n for n, m in modules.items() if isinstance(m, nn.Linear)]
            raise SettingsError(
                f"the model {type(module).__name__} has no head named {head!r}; "
                f"its linear layers: {', '.join(linear) or 'none'}"
            )
        parent, _, name = head.rpartition(".")
        setattr(module.get_submodule(parent), name, nn.Identity())
        model = cls(module, modules[head])
        model.head_name = head
        return model


def called_with(module: nn.Module, parameters: Mapping[str, Tensor], x: Tensor) -> Any:
    """Return what a module does with others in the places of some parameters.

    They are named as by ``named_parameters``. With more than one place for a parameter,
    torch's own ``functional_call`` may leave the other in it.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found = {}
    for prefix, owner in module.named_modules():
        for own, parameter in owner._parameters.items():
            if (name := names.get(id(parameter), "")) in parameters:
                found[f"{prefix}.{own}" if prefix else own] = parameters[name]
    return functional_call(module, found, (x,), tie_weights=False)


class Tried(NamedTuple):
    """What a forward pass does besides computing with a model's tensors.

    Parameters
    ----------
    drawing : frozenset of str
        Parts that draw random numbers in training mode.
    embeds : bool
        Whether an embedding has padding or a largest norm.
    """

    drawing: frozenset[str]
    embeds: bool


class _Embeddings(TorchFunctionMode):
    """Notices embeddings with padding or a largest norm, wherever they are called."""

    found = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        # All but inputs and weights come by name here.
        if func is nn.functional.embedding and named["padding_idx"] is not None:
            self.found = True
        looked_up = func in (nn.functional.embedding, nn.functional.embedding_bag)
        if looked_up and named["max_norm"] is not None:
            self.found = True
            # It would shorten the model's own rows.
            args = args[0], args[1].clone(), *args[2:]
        return func(*args, **named)


@contextmanager
def on_trial(model: nn.Module) -> Iterator[None]:
    """Leave a model's modes and buffers, and torch's generators, as they were.

    Within it gradients are off.
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
                buffer.copy_(value)


def tried(model: SplitModel, inputs: Tensor) -> Tried:
    """Return what a model does with some inputs in training mode.

    The model, and torch's generators, are as before.
    """
    if len(inputs) == 1:
        # Norms without statistics of their own refuse a single example.
        inputs = torch.cat([inputs, inputs])
    state, found, embeddings = random_state(), set(), _Embeddings()
    with on_trial(model):
        for module in model.train().modules():
            # They draw nothing, refuse a single example and would learn from it.
            if isinstance(module, _NormBase):
                module.eval()
        for name in ("representation", "head"):
            with embeddings:
                inputs = model.get_submodule(name)(inputs)
            if not all(map(torch.equal, state, random_state())):
                found.add(name)
                set_random_state(state)
    return Tried(frozenset(found), embeddings.found)
