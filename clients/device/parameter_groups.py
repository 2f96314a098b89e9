"""Slots: the groups of arrays that a client receives, sends and keeps."""

import difflib
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from flwr_frl.task.base import Task
from flwr_frl.task.settings import SettingsError

Tensors = dict[str, Tensor]
Groups = tuple[str, ...]

# The slots that are parts of the model itself.
REPRESENTATION, HEAD = "representation.", "head."
WHOLE = (REPRESENTATION, HEAD)


class ParameterGroups:
    """What has slots: groups of arrays whose names begin alike.

    ``representation.`` and ``head.`` are the model's own; any other, ``control.`` say,
    lies beside it and begins as `initial_group` says. With a `group_of` of one's own
    the model's arrays are grouped in another way.
    """

    task: Task
    # Slots that come from the server.
    shared: Groups = WHOLE
    # Slots that go to the server; None for the shared ones.
    sent: Groups | None = None
    # Slots that never leave the client.
    personal: Groups = ()
    # The slots of the model's own arrays.
    model_groups: Groups = WHOLE

    def group_of(self, name: str) -> str:
        """Return which of ``model_groups`` one of the model's own arrays is in."""
        return name.partition(".")[0] + "."

    def initial_group(self, slot: str) -> Tensors:
        """Return what a slot beside the model begins with: the initial model.

        The names are those within the slot.
        """
        return self.task.initial_state

    def initial_arrays(self, slots: Groups) -> Tensors:
        """Return the common initial values of slots, the model's own first.

        They are not to be changed. They are on the CPU, unless an `initial_group`
        returns what was received: that is where the client trains.
        """
        state = self.task.initial_state
        arrays = {n: t for n, t in state.items() if self.group_of(n) in slots}
        for slot in slots:
            if slot not in self.model_groups:
                arrays |= {slot + n: t for n, t in self.initial_group(slot).items()}
        for name, value in arrays.items():
            if not isinstance(value, Tensor):
                raise SettingsError(
                    f"{type(self).__name__}.initial_group returns a "
                    f"{type(value).__name__} for {name!r}; it must be a tensor"
                )
        return arrays

    def names(self, slots: Groups) -> list[str]:
        """Return the names of the arrays of slots, as `initial_arrays` orders them."""
        known: dict[Groups, list[str]] = self.__dict__.setdefault("_names", {})
        if slots not in known:
            known[slots] = list(self.initial_arrays(slots))
        return known[slots]

    @property
    def sent_names(self) -> list[str]:
        """Names of the arrays that `fit` returns, in their order."""
        return self.names(self.shared if self.sent is None else self.sent)

    def check_sendable(self, arrays: Mapping[str, Tensor]) -> None:
        """Raise `SettingsError` if one of ``sent_names`` is missing."""
        if missing := [name for name in self.sent_names if name not in arrays]:
            slots = self.shared if self.sent is None else self.sent
            raise SettingsError(
                f"{type(self).__name__} has no array {missing[0]!r} to send; what it "
                f"sends, {', '.join(map(repr, slots))}, must be slots of the model, "
                f"{', '.join(map(repr, self.model_groups))}, or be given to send_arrays"
            )

    def structure(self) -> list[object]:
        """Return what must be the same for all clients of a run.

        That is the shared arrays' names, shapes and dtypes, and the classes where a
        head is shared: its outputs must mean the same to all.
        """
        for slot in (*self.shared, *(self.sent or ()), *self.personal):
            if not slot.endswith("."):
                raise SettingsError(
                    f"{type(self).__name__} has a slot {slot!r}; its name must end "
                    "with a dot, as 'representation.' and 'head.' do"
                )
        # One that has no initial values of its own, and nearly the name of a part.
        own = type(self).initial_group is not ParameterGroups.initial_group
        for slot in () if own else (*self.shared, *(self.sent or ()), *self.personal):
            near = difflib.get_close_matches(slot, self.model_groups, 1, cutoff=0.85)
            if near and slot not in self.model_groups:
                allowed = ", ".join(map(repr, self.model_groups))
                raise SettingsError(
                    f"{type(self).__name__} has a slot {slot!r}; it must be one of "
                    f"{allowed} (did you mean {near[0]!r}?), or have another name"
                )
        if both := [slot for slot in self.shared if slot in self.personal]:
            raise SettingsError(
                f"{type(self).__name__} has {both[0]!r} in shared and in personal; a "
                "slot must be in one of them: what is shared overwrites what is kept"
            )
        structure: list[object] = [
            (name, tuple(array.shape), str(array.dtype))
            for name, array in self.initial_arrays(self.shared).items()
        ]
        return [*structure, self.task.classes] if HEAD in self.shared else structure

    def check_tied(self, model: nn.Module) -> None:
        """Raise `SettingsError` if one of its parameters is both shared and not."""
        first: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            other = first.setdefault(id(parameter), name)
            slots = self.group_of(other), self.group_of(name)
            if len({(s in self.shared, s in self.personal) for s in slots}) > 1:
                raise SettingsError(
                    f"the model's {other!r} and {name!r} are one parameter; here it "
                    f"must not be in two slots, {slots[0]!r} and {slots[1]!r}, of "
                    "which only one is shared"
                )

    def check_kept(self, model: nn.Module) -> None:
        """Raise `SettingsError` if a parameter has been trained and nobody keeps it.

        What is in no slot begins each round with its initial values, and may be trained
        only by what comes after `fit`, such as the fine-tuning before a test.
        """
        known = {*self.shared, *self.personal, *(self.sent or ())}
        for name, value in model.named_parameters():
            if self.group_of(name) in known:
                continue
            initial = self.task.initial_state[name].to(value.device)
            if not torch.equal(value.detach(), initial):
                raise SettingsError(
                    f"{type(self).__name__}.fit trains {name!r}, which is in no group: "
                    f"its group {self.group_of(name)!r} must be in shared or personal "
                    "to be kept, or not be trained; else every round resets it"
                )


def under(slot: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """Return the arrays of a slot by their names within it."""
    return {n[len(slot) :]: t for n, t in tensors.items() if n.startswith(slot)}


def within(slot: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """Return arrays by their names in a slot: what `under` undoes."""
    return {slot + n: t for n, t in tensors.items()}


def to_numpy(tensor: Tensor) -> npt.NDArray[Any]:
    """Return a tensor as an array: on the same memory if it is on the CPU."""
    array: npt.NDArray[Any] = tensor.detach().cpu().numpy()
    return array


def difference(after: Tensors, before: Mapping[str, Tensor]) -> Tensors:
    """Return by how much arrays have changed; of yes and no, whether they have."""
    return {
        n: value ^ before[n] if value.dtype == torch.bool else value - before[n]
        for n, value in after.items()
    }
