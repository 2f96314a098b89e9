"""Several models as one: their tensors stacked, their examples side by side."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from flwr_frl.task.layers import applied, mean_losses
from flwr_frl.task.models import SplitModel
from flwr_frl.task.sgd import Proximal

Tensors = dict[str, Tensor]


def structure(value: Any) -> Hashable:
    """Return what must be equal for objects whose tensors are to be stacked.

    Objects are tensors, mappings of names to tensors, frozen dataclasses of these, and
    what can be compared by itself.

    Raises
    ------
    TypeError
        If something in it can be neither stacked nor compared.
    """
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, Mapping):
        return tuple((name, structure(inner)) for name, inner in value.items())
    if is_dataclass(value):
        own = [structure(getattr(value, field.name)) for field in fields(value)]
        return type(value), tuple(own)
    hash(value)
    same: Hashable = value
    return same


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in an object, as `structure` finds them."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for inner in value.values() for tensor in tensors_of(inner)]
    if is_dataclass(value):
        own = [getattr(value, field.name) for field in fields(value)]
        return [tensor for inner in own for tensor in tensors_of(inner)]
    return []


def with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return an object with others in the places of its tensors."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, Mapping):
        return {name: with_tensors(inner, tensors) for name, inner in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        own = {field.name: getattr(value, field.name) for field in fields(value)}
        return replace(value, **with_tensors(own, tensors))
    return value


class Term(nn.Module):
    """A regularizer of a model, as a module.

    Parameters
    ----------
    model : SplitModel
        The model.
    regularizer : object
        Of features, targets and the model.
    """

    def __init__(self, model: SplitModel, regularizer: Any) -> None:
        super().__init__()
        self.model = model
        self.regularizer = regularizer

    def forward(
        self, constants: list[Tensor], features: Tensor, targets: Tensor
    ) -> Tensor:
        """Return its value, with ``constants`` in the places of its tensors."""
        own = with_tensors(self.regularizer, iter(constants))
        value: Tensor = own(features, targets, self.model)
        return value

    def together(
        self,
        state: Tensors,
        constants: list[Tensor],
        features: Tensor,
        targets: Tensor,
    ) -> Tensor:
        """Return its values for several models, whose tensors are stacked."""
        if type(self.regularizer) is Proximal:
            near = with_tensors(self.regularizer, iter(constants))
            total = features.new_zeros(len(features))
            for name, _ in self.model.named_parameters():
                if name in near.anchor:
                    distance = state[name] - near.anchor[name]
                    total = total + distance.square().flatten(1).sum(1)
            scaled: Tensor = near.weight / 2 * total
            return scaled
        own = vmap(partial(called, self))
        values: Tensor = own(state, constants, features, targets)
        return values


def called(module: nn.Module, state: Tensors, *arguments: Any) -> Any:
    """Return what a module with a ``model`` does with others of the model's tensors."""
    named = {f"model.{name}": tensor for name, tensor in state.items()}
    return functional_call(module, named, arguments)


class Objective(nn.Module):
    """What is lowered: a loss of a model's outputs, and a regularizer.

    Parameters
    ----------
    model : SplitModel
        The model.
    loss : callable
        Of outputs and targets.
    regularizer : object, optional
        Of features, targets and the model; its tensors come with each call.
    features : bool, default False
        Whether the inputs are already the representation's features.
    """

    def __init__(
        self,
        model: SplitModel,
        loss: Callable[[Tensor, Tensor], Tensor],
        regularizer: Any = None,
        features: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.regularizer = regularizer
        self.features = features

    @cached_property
    def can_be_recorded(self) -> bool:
        """Whether calls of the same key are known to make the same tensor operations.

        So it is where loss, regularizer and modules are torch's own code or this
        package's. Others may read what changes from call to call, a counter say, and a
        record would keep it as it was: they are run in each call.
        """
        parts = self.loss, self.regularizer, *self.model.modules()
        return all(map(_is_known, parts))

    def forward(
        self,
        constants: list[Tensor],
        inputs: Tensor,
        targets: Tensor,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what is lowered, the loss alone, and the outputs.

        ``weights``, of shape (batch,), are 0 where an example only fills the batch up.
        The loss is then taken to be a mean over the examples.
        """
        features = inputs if self.features else self.model.representation(inputs)
        outputs = self.model.head(features)
        if weights is None:
            value = self.loss(outputs, targets)
        else:
            each = vmap(lambda o, t: self.loss(o[None], t[None]))(outputs, targets)
            counted = torch.where(weights > 0, each, 0.0)
            value = counted.sum() / weights.sum().clamp(min=1)
        if self.regularizer is None:
            return value, value, outputs
        own = with_tensors(self.regularizer, iter(constants))
        return value + own(features, targets, self.model), value, outputs

    def together(
        self, state: Tensors, batch: Sequence[Tensor], constants: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same for several models, whose tensors are stacked, at once.

        ``batch`` is inputs, targets and, where there are any, weights.
        """
        if self.model.is_layered:
            return self.layer_by_layer(state, constants, *batch)
        found: tuple[Tensor, Tensor, Tensor]
        found = vmap(partial(called, self))(state, constants, *batch)
        return found

    def layer_by_layer(
        self,
        state: Tensors,
        constants: list[Tensor],
        inputs: Tensor,
        targets: Tensor,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `forward` does, of several models whose tensors are stacked."""
        features, model = inputs, self.model
        if not self.features:
            features = applied(model.representation, state, "representation.", inputs)
        outputs = applied(model.head, state, "head.", features)
        value = mean_losses(self.loss, outputs, targets, weights)
        if self.regularizer is None:
            return value, value, outputs
        term = Term(model, self.regularizer)
        added = term.together(state, constants, features, targets)
        return value + added, value, outputs

    def gradients(
        self,
        state: Tensors,
        names: Sequence[str],
        batch: Sequence[Tensor],
        constants: list[Tensor],
        key: Hashable,
    ) -> tuple[list[Tensor | None], Tensor]:
        """Return the gradients of the stacked models, and their losses.

        Parameters
        ----------
        state : dict of str to Tensor
            All of the models' tensors; statistics of batch norms are moved in place.
        names : sequence of str
            Whose gradients; None for what the objective does not depend on.
        batch : sequence of Tensor
            As for `together`.
        constants : list of Tensor
            The regularizers' tensors.
        key : hashable
            Equal only for objectives that compute the same.
        """

        def compute(
            tensors: list[Tensor],
            constants: list[Tensor],
            *batch: Tensor,
        ) -> tuple[list[Tensor | None], Tensor]:
            own = dict(zip(state, (tensor.detach() for tensor in tensors), strict=True))
            learning = [own[name].requires_grad_() for name in names]
            objective, losses, _ = self.together(own, batch, constants)
            if not objective.requires_grad:  # A representation may have no parameters.
                return [None for _ in names], losses
            found = torch.autograd.grad(objective.sum(), learning, allow_unused=True)
            return list(found), losses.detach()

        tensors = [*state.values()]
        if self.model.is_layered or not self.can_be_recorded:
            return compute(tensors, constants, *batch)
        found: tuple[list[Tensor | None], Tensor]
        found = _recorded(key, compute, tensors, constants, *batch)
        return found


# Packages whose code computes with what it is given and with nothing that changes.
KNOWN = ("torch", "torchvision", "task", "clients")


def _is_known(value: Any) -> bool:
    """Return whether all code in a loss, a regularizer or a module is of `KNOWN`."""
    if isinstance(value, Mapping):
        return all(map(_is_known, value.values()))
    if not callable(value):
        return True
    code = value if hasattr(value, "__qualname__") else type(value)
    inner: list[Any] = []
    if is_dataclass(value):
        inner = [getattr(value, field.name) for field in fields(value)]
    elif isinstance(value, nn.Module):
        # A forward may be put on a module by hand.
        inner = [*value.children(), value.forward]
    known = str(code.__module__).partition(".")[0] in KNOWN
    return known and all(map(_is_known, inner))


# A call is recorded when it has been made so often: that takes some tenths of a second,
# two more for torch's compiler in each process, and saves half a millisecond a call.
RECORD_AFTER = 400
_CALLS: OrderedDict[Hashable, Any] = OrderedDict()
MOST_CALLS = 64


def _recorded(key: Hashable, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of tensors, or make the tensor operations of an earlier call."""
    shapes = tuple((tensor.shape, tensor.dtype) for tensor in _flat(arguments))
    place = key, shapes
    known = _CALLS.pop(place, 0)
    if isinstance(known, int):
        known += 1
        if known > RECORD_AFTER:
            # What moves statistics in place must not move them twice.
            copies = [_copied(argument) for argument in arguments]
            known = make_fx(function)(*copies)
    _CALLS[place] = known
    if len(_CALLS) > MOST_CALLS:
        _CALLS.popitem(last=False)
    return function(*arguments) if isinstance(known, int) else known(*arguments)


def forget_calls() -> None:
    """Drop what is recorded."""
    _CALLS.clear()


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else [v.clone() for v in value]


def _flat(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        else:
            yield from value


def stacked(each: Sequence[Mapping[str, Tensor]]) -> Tensors:
    """Return tensors by name, with a first dimension for the models."""
    return {
        name: torch.stack([tensors[name].detach() for tensors in each])
        for name in each[0]
    }
