"""Parameter groups: which arrays a client receives, sends and keeps.

A group is a prefix of array names, declared without its final dot. ``representation``
and ``head`` are parts of the model; any other group, for example ``control``, names
arrays beside the model.
"""

import difflib
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from flwr.common import NDArrays, Scalar
from torch import Tensor, nn

from flwr_frl.clients.device.conversions import (
    LARGE,
    Tensors,
    received_tensors,
    to_numpy,
    to_tensors,
    within,
)
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.clients.device.traits import Traits
from flwr_frl.common.messages import PROXIMAL_WEIGHT, SERVER_ROUND
from flwr_frl.common.run_cache import run_object
from flwr_frl.common.settings import SettingsError
from flwr_frl.task.base import Task
from flwr_frl.task.devices import CPU
from flwr_frl.task.models import SplitModel

Arrays = dict[str, npt.NDArray[np.generic]]
Groups = tuple[str, ...]
Config = dict[str, Scalar]
Reply = tuple[NDArrays, int, Config]

REPRESENTATION, HEAD = "representation.", "head."
WHOLE = (REPRESENTATION, HEAD)


class ParameterGroups:
    """The part of a client that receives, saves and sends parameter groups.

    Attributes
    ----------
    shared : str or tuple of str
        Groups received from the server.
    personal : str or tuple of str
        Groups that never leave the client.
    _copied : tuple of ndarray
        Arrays that `send` has returned; nothing else refers to their memory.
    """

    _traits: ClassVar[Traits] = Traits()
    # Subclasses declare a name, ``"head"``, or several, which become prefixes.
    shared: Any = WHOLE
    personal: Any = ()
    _copied: tuple[npt.NDArray[Any], ...] = ()

    task: Task
    index: int
    state: PersonalState
    settings: Any
    device: torch.device
    model: SplitModel
    received: Tensors
    saved: Tensors
    upload: Mapping[str, Tensor] | None = None
    metrics: Config
    config: Config
    _shapes: dict[str, tuple[int, ...]]
    _proximal_weight: float

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        for name in {"shared", "sent", "personal"} & vars(cls).keys():
            groups = vars(cls)[name]
            # A property depends on the client.
            if isinstance(groups, str | tuple | list):
                names = (groups,) if isinstance(groups, str) else groups
                setattr(cls, name, tuple(f"{n.removesuffix('.')}." for n in names))

    @property
    def sent(self) -> Any:
        """Groups sent to the server; by default the shared ones."""
        return self.shared

    @property
    def _exchanged_groups(self) -> Groups:
        """Groups that leave the client; their frozen part is the same for all."""
        return (*self.shared, *self.sent)

    def initial_group(self, group: str) -> Tensors:
        """Return the initial arrays of a group beside the model.

        Parameters
        ----------
        group : str
            The group.

        Returns
        -------
        dict of str to Tensor
            By name within the group; by default the initial model. Tensors of
            ``model`` stand for their initial values.
        """
        return self.task.initial_state

    def _group_of(self, name: str) -> str:
        """Return the group of one of the model's arrays, by default its part.

        Override it to group the model's arrays differently.
        """
        return name.partition(".")[0] + "."

    def _takes(self, shape: tuple[int, ...], initial: tuple[int, ...]) -> bool:
        """Return whether an array may have another shape than its initial value.

        If that has no entry along the first axis, any number may be received.
        """
        return initial[:1] == (0,) and shape[1:] == initial[1:]

    def _structure(self) -> list[object]:
        """Return everything that all clients of a run must have in common.

        By default these are the names, shapes and dtypes of the shared arrays and,
        if a head is shared, the classes, so that its outputs have one meaning.
        """
        structure: list[object] = [
            (name, tuple(array.shape), str(array.dtype))
            for name, array in initial_arrays(self, self.shared).items()
        ]
        return [*structure, self.task.classes] if HEAD in self.shared else structure

    def receive(self, parameters: NDArrays, config: Config) -> None:
        """Load the received and the saved arrays into the model.

        Personal arrays that have never been saved take their initial values.

        Parameters
        ----------
        parameters : list of ndarray
            The shared arrays, in the order of `initial_arrays`.
        config : dict
            Config of the message; ``proximal-mu`` is the μ of Flower's FedProx.
        """
        self.config, self.upload, self.metrics = config, None, {}
        names = array_names(self, self.shared)
        arrays = dict(zip(names, parameters, strict=True))
        # `transport="float16"` concerns only the messages.
        self.received = {
            name: value.float() if value.dtype == torch.float16 else value
            for name, value in received_tensors(arrays, self.device).items()
        }
        personal = initial_arrays(self, self.personal)
        shapes = {name: tuple(array.shape) for name, array in personal.items()}
        self._shapes = shapes
        loaded = self.state.load(shapes) or {} if personal else {}
        loaded = {name: a for name, a in loaded.items() if name in personal}
        # All clients of a process share the initial values: copy them.
        self.saved = {
            name: value.to(self.device, copy=True)
            for name, value in personal.items()
            if name not in loaded
        } | to_tensors(loaded, self.device)
        self.model.load({**self.task.initial_state, **self.saved, **self.received})
        self._proximal_weight = 0.0
        # Without received parameters, such as FedProto's, there is no proximal term.
        if self.received.keys() & self.model.tensors.keys():
            self._proximal_weight = float(config.get(PROXIMAL_WEIGHT, 0.0))

    def save(self) -> None:
        """Save the personal arrays as the version of ``server-round``.

        Raises
        ------
        SettingsError
            If one has another shape than its initial value: it could not be loaded.
        """
        arrays = personal_arrays(self, self.personal)
        for name, shape in self._shapes.items():
            if arrays[name].shape != shape:
                raise SettingsError(
                    f"{type(self).__name__} saves {name!r} of shape "
                    f"{arrays[name].shape}; expected {shape}, that of its initial value"
                )
        if arrays:
            self._save(arrays, self.config)

    def _save(self, arrays: Arrays, config: Mapping[str, Scalar]) -> None:
        self.state.save(arrays, self._version(config))

    def _version(self, config: Mapping[str, Scalar]) -> int:
        return int(config.get(SERVER_ROUND, self.state.round + 1))

    def send(self, loss: float) -> Reply:
        """Return the reply of `fit`.

        Parameters
        ----------
        loss : float
            Training loss.

        Returns
        -------
        parameters : list of ndarray
            Copies of the arrays of the sent groups, from ``upload`` or ``model``.
        num_examples : int
            Number of training examples.
        metrics : dict
            ``train-loss`` and ``metrics``.
        """
        arrays = self.model.tensors if self.upload is None else self.upload
        names = array_names(self, self.sent)
        if missing := [name for name in names if name not in arrays]:
            raise SettingsError(
                f"{type(self).__name__} has no array {missing[0]!r} to send; its sent "
                f"groups, {', '.join(map(repr, self.sent))}, must be parts of "
                "the model or in self.upload"
            )
        copies = [to_numpy(arrays[name]).copy(order="C") for name in names]
        self._copied = tuple(copies)
        n = len(self.task.train_examples(self.index))
        return copies, n, {"train-loss": loss, **self.metrics}


def model_groups(client: ParameterGroups) -> Groups:
    """Return the groups of the model's own arrays."""
    names = client.task.initial_state
    return tuple(dict.fromkeys((*WHOLE, *map(client._group_of, names))))


def initial_arrays(client: ParameterGroups, groups: Groups) -> Tensors:
    """Return the common initial values of groups, the model's own arrays first.

    They must not be modified. They are on the CPU unless `initial_group` returns
    received arrays, which are on the training device.
    """
    if type(client)._group_of is ParameterGroups._group_of and {*groups} <= {*WHOLE}:
        return dict(run_object(_PartArrays).of(client.task, groups))
    state = client.task.initial_state
    arrays = {n: t for n, t in state.items() if client._group_of(n) in groups}
    within_model = model_groups(client)
    # Clients of a process share the model, which has the values of the latest one.
    names = {tensor.data_ptr(): n for n, tensor in client.model.tensors.items()}
    for group in groups:
        if group in within_model:
            continue
        for name, value in within(group, client.initial_group(group)).items():
            if not isinstance(value, Tensor):
                raise SettingsError(
                    f"{type(client).__name__}.initial_group returns a "
                    f"{type(value).__name__} for {name!r}; expected a tensor"
                )
            same = state.get(names.get(value.data_ptr(), ""), value)
            arrays[name] = (same if same.shape == value.shape else value).detach()
    return arrays


class _CheckedGroups:
    """Classes and groups that `check_groups` has accepted, for the latest model."""

    model: nn.Module | None = None
    groups: frozenset[tuple[type, Groups, Groups, Groups]] = frozenset()


class _PartArrays(dict[tuple[int, Groups], tuple[Task, Tensors]]):
    """Initial arrays of the parts of models, which all clients of a task share."""

    def of(self, task: Task, groups: Groups) -> Tensors:
        """Return the arrays of some parts."""
        if (key := (id(task), groups)) not in self:
            if len(self) >= 64:  # Each newcomer has its own task.
                self.clear()
            named = task.initial_state.items()
            # The reference to the task prevents another object from getting its id.
            self[key] = (
                task,
                {n: t for n, t in named if n.split(".")[0] + "." in groups},
            )
        return self[key][1]


def array_names(client: ParameterGroups, groups: Groups) -> list[str]:
    """Return the names of the arrays of groups in the order of `initial_arrays`."""
    cache: dict[Groups, list[str]] = client.__dict__.setdefault("_names", {})
    if groups not in cache:
        cache[groups] = list(initial_arrays(client, groups))
    return cache[groups]


def personal_arrays(client: ParameterGroups, groups: Groups) -> Arrays:
    """Return the current arrays of personal groups."""
    arrays = {**client.saved, **client.model.tensors}
    return {name: to_numpy(arrays[name]) for name in array_names(client, groups)}


def check_groups(client: ParameterGroups, model: nn.Module) -> None:
    """Raise `SettingsError` if the groups of a class contradict each other.

    Parameters
    ----------
    client : ParameterGroups
        The client.
    model : nn.Module
        Its model.
    """
    checked = run_object(_CheckedGroups)
    if checked.model is not model:
        checked.model, checked.groups = model, frozenset()
    key = type(client), client.shared, client.sent, client.personal
    if key not in checked.groups:
        _check_groups(client, model)
        checked.groups |= {key}


def _check_groups(client: ParameterGroups, model: nn.Module) -> None:
    name = type(client).__name__
    groups = *client.shared, *client.sent, *client.personal
    allowed = model_groups(client)
    # A misspelled part would silently become a group beside the model.
    default = type(client).initial_group is ParameterGroups.initial_group
    for group in groups if default else ():
        if group in allowed:
            continue
        if near := difflib.get_close_matches(group, allowed, 1, cutoff=0.85):
            raise SettingsError(
                f"{name} has a group {group!r}; expected one of "
                f"{', '.join(map(repr, allowed))} (did you mean {near[0]!r}?), or have "
                "another name"
            )
    if both := [group for group in client.shared if group in client.personal]:
        raise SettingsError(
            f"{name} has {both[0]!r} in shared and in personal; a group must be in one "
            "of them: received arrays overwrite saved ones"
        )
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        pair = client._group_of(other), client._group_of(name)
        if len({(g in client.shared, g in client.personal) for g in pair}) > 1:
            raise SettingsError(
                f"the model's {other!r} and {name!r} are one parameter; here it must "
                f"not be in two groups, {pair[0]!r} and {pair[1]!r}, of which only one "
                "is shared"
            )


def check_untrained(client: ParameterGroups, model: SplitModel) -> None:
    """Raise `SettingsError` if a parameter outside all groups has been trained.

    Such a parameter is reset to its initial value in every round. It may be trained
    only outside of `Client.update`, for example by fine-tuning before a test.
    """
    groups = {*client.shared, *client.personal, *client.sent}
    for name, value in model.structure.parameters.items():
        if client._group_of(name) in groups:
            continue
        initial = client.task.initial_state[name].to(value.device)
        if not torch.equal(value.detach(), initial):
            raise SettingsError(
                f"{type(client).__name__}.update trains {name!r}, which is in no "
                f"group: its group {client._group_of(name)!r} must be in shared or "
                "personal to be kept, or not be trained; else every round resets it"
            )


def check_received(client: ParameterGroups) -> None:
    """Raise `SettingsError` if a client has changed a large received array in place."""
    for name, tensor in client.received.items():
        if tensor._version and tensor.device == CPU and tensor.nbytes >= LARGE:
            raise SettingsError(
                f"{type(client).__name__} changes self.received[{name!r}] in place, "
                "which all clients of a process share; it must clone it first"
            )
