"""Parameter groups: which arrays a client receives, sends and keeps; and conversions.

A group is a prefix of array names, declared without its final dot. ``representation``
and ``head`` are parts of the model; any other group, for example ``control``, names
arrays beside the model.
"""

import difflib
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from flwr.common import NDArrays, Scalar
from torch import Tensor, nn

from flwr_frl.common.errors import SettingsError
from flwr_frl.common.messages import IS_CHANGE
from flwr_frl.common.run_cache import TASKS_AT_A_TIME, run_cache
from flwr_frl.task.base import Task
from flwr_frl.task.devices import CPU

if TYPE_CHECKING:
    from flwr_frl.clients.base import Client

T = TypeVar("T")
Arrays = dict[str, npt.NDArray[np.generic]]
Tensors = dict[str, Tensor]
Groups = tuple[str, ...]
Shape = tuple[int, ...]
Config = dict[str, Scalar]
FitResult = tuple[NDArrays, int, Config]
EvaluateResult = tuple[float, int, Config]

REPRESENTATION, HEAD = "representation.", "head."
WHOLE = (REPRESENTATION, HEAD)
# Most values that leave a GPU in one transfer: 100 small models
MOST_AT_ONCE = 5_000_000
# Tensors of received arrays share read-only memory, of which torch warns once.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"0", np.uint8))


def under(group: str, arrays: Mapping[str, T]) -> dict[str, T]:
    """Return the arrays of a group by their names within it."""
    return {n[len(group) :]: t for n, t in arrays.items() if n.startswith(group)}


def within(group: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """Prefix names with a group; the inverse of `under`."""
    return {group + n: t for n, t in tensors.items()}


def to_arrays(tensors: Mapping[str, Tensor]) -> Arrays:
    """Return tensors as arrays, by one transfer if they are small and on one GPU."""
    values = [*tensors.values()]
    kinds = {(value.device, value.dtype) for value in values}
    ends = np.cumsum([value.numel() for value in values])
    # The copy of larger tensors takes the GPU's memory, and saves little time.
    if len(kinds) != 1 or values[0].device == CPU or ends[-1] > MOST_AT_ONCE:
        return {name: value.numpy(force=True) for name, value in tensors.items()}
    flat = torch.cat([value.reshape(-1) for value in values]).numpy(force=True)
    parts = zip(tensors.items(), np.split(flat, ends[:-1]), strict=True)
    return {name: part.reshape(value.shape) for (name, value), part in parts}


def to_tensors(
    arrays: Mapping[str, npt.NDArray[np.generic]], device: torch.device
) -> Tensors:
    """Return copies of arrays on a device."""
    return {n: torch.from_numpy(np.array(a)).to(device) for n, a in arrays.items()}


def difference(after: Tensors, before: Mapping[str, Tensor]) -> Tensors:
    """Return the changes of arrays; for booleans, whether they have changed."""
    return {
        n: value ^ before[n] if value.dtype == torch.bool else value - before[n]
        for n, value in after.items()
    }


def changes_of(client: "Client") -> Tensors:
    """Return the changes of a client's model since it was received, as its reply.

    The reply's metrics declare that its arrays are changes.
    """
    client.metrics[IS_CHANGE] = 1
    return difference(client.model.state_dict(), client.received)


def zeros_like(tensors: Mapping[str, Tensor]) -> Tensors:
    """Return zeros of the same shapes."""
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def parameter_zeros(model: nn.Module) -> Tensors:
    """Return zeros on the CPU with the names and shapes of a model's parameters."""
    named = model.named_parameters(remove_duplicate=False)
    return {n: torch.zeros(p.shape, dtype=p.dtype) for n, p in named}


@run_cache(maxsize=TASKS_AT_A_TIME)
def groups_of(kind: "type[Client]", task: Task) -> dict[str, str]:
    """Return the group of each of the model's arrays, by name."""
    return {name: kind._group_of(task, name) for name in task.initial_state}


@run_cache(maxsize=4 * TASKS_AT_A_TIME)
def model_arrays(kind: "type[Client]", task: Task, groups: Groups) -> Tensors:
    """Return the initial values of those of the model's arrays that are in groups."""
    group_of = groups_of(kind, task)
    return {n: v for n, v in task.initial_state.items() if group_of[n] in groups}


class Received:
    """The arrays of the last message, which all clients of a process share.

    Attributes
    ----------
    about : tuple
        The class, task, shared groups, names and ids of arrays that were checked; empty
        if no other client can receive the same objects.
    arrays : list of Array
        The message's arrays, so that their ids are of no other object.
    values : list of ndarray
        Their values, in the order of the client's shared arrays.
    made : dict of torch.device to dict of str to Tensor
        The values as tensors.
    """

    def __init__(self) -> None:
        self.about: tuple[Any, ...] = ()
        self.arrays: list[Any] = []
        self.values: NDArrays = []
        self.made: dict[torch.device, Tensors] = {}

    def tensors(
        self, names: list[str], arrays: NDArrays, device: torch.device
    ) -> Tensors:
        """Return arrays as tensors, which are made once if clients share them."""
        is_shared = bool(arrays) and [*map(id, arrays)] == [*map(id, self.values)]
        if is_shared and device in self.made:
            return dict(self.made[device])
        made = (torch.from_numpy(array).to(device) for array in arrays)
        tensors = dict(zip(names, made, strict=True))
        if is_shared:
            self.made[device] = dict(tensors)
        return tensors


def check_groups(client: "Client", model: nn.Module) -> None:
    """Raise `SettingsError` if the groups of a class contradict each other.

    Parameters
    ----------
    client : Client
        The client.
    model : nn.Module
        Its model.
    """
    kind = type(client).__name__
    group_of = groups_of(type(client), client.task)
    allowed = {*WHOLE, *group_of.values()}
    groups = {*client.shared, *client.sent, *client.personal}
    # A misspelled part would silently become a copy of the model beside the model.
    for group in groups - allowed:
        if near := difflib.get_close_matches(group, allowed, 1, cutoff=0.85):
            raise SettingsError(
                f"{kind} has a group {group!r}; expected one of {sorted(allowed)} (did "
                f"you mean {near[0]!r}?), or have another name"
            )
    if both := {*client.shared} & {*client.personal}:
        raise SettingsError(
            f"{kind} has {min(both)!r} in shared and in personal; a group must be in "
            "one of them: received arrays overwrite saved ones"
        )
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        pair = tuple(client._group_of(client.task, n) for n in (other, name))
        if len({(g in client.shared, g in client.personal) for g in pair}) > 1:
            raise SettingsError(
                f"the model's {other!r} and {name!r} are one parameter; here it must "
                f"not be in two groups, {pair[0]!r} and {pair[1]!r}, of which only one "
                "is shared"
            )
