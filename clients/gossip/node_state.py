"""States of nodes whose models and vectors are rows of shared matrices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor

from flwr_frl.clients.device.conversions import Tensors, to_numpy
from flwr_frl.clients.device.parameter_groups import Arrays
from flwr_frl.clients.device.state import PREFIX, StoredArrays
from flwr_frl.clients.gossip.flat import FlatParameters
from flwr_frl.clients.gossip.relayed import LARGEST_ENTRY
from flwr_frl.common.memory_array import memory_record, values_of


@dataclass(frozen=True)
class NodeMatrices:
    """Models and vectors of several nodes; not changed after their round has ended.

    Parameters
    ----------
    flat : FlatParameters
        Describes the parameters in a row.
    names : tuple of str
        Names of the parameters.
    x : Tensor, shape (nodes, d)
        The models.
    vectors : dict of str to Tensor, shape (nodes, d)
        The vectors, by their names in a client's state.
    sent : dict of bytes to Tensor
        Valid messages of the round, and their decoded vectors.
    """

    flat: FlatParameters
    names: tuple[str, ...]
    x: Tensor
    vectors: Tensors
    sent: dict[bytes, Tensor] = field(default_factory=dict)

    def remember(
        self, messages: Sequence[bytes], decoded: Mapping[int, Tensor]
    ) -> None:
        """Replace ``sent``, without messages that receivers would refuse."""
        self.sent.clear()
        if decoded:
            q = torch.stack(list(decoded.values()))
            largest = q.abs().amax(1).tolist()
            for i, row, entry in zip(decoded, q.unbind(), largest, strict=True):
                if entry <= LARGEST_ENTRY:
                    self.sent[messages[i]] = row.to(self.x.device)

    def arrays(self, row: int) -> Arrays:
        """Return the arrays of a node's state."""
        parameters = zip(self.names, self.flat.views(self.x[row]), strict=True)
        tensors = {**dict(parameters), **{n: v[row] for n, v in self.vectors.items()}}
        return {name: to_numpy(tensor).copy() for name, tensor in tensors.items()}


_EMPTY = ArrayRecord().__dict__


class NodeRecord(StoredArrays):
    """A version of a node's state, which is a row of `NodeMatrices`.

    Its arrays are copied when they are read. A copy of the record for another process
    is a plain ArrayRecord.
    """

    def __init__(self, matrices: NodeMatrices, row: int) -> None:
        # Flower's constructor takes as long as everything else for a small state.
        self.__dict__.update(_EMPTY, _data={}, matrices=matrices, row=row)

    def arrays(self) -> Arrays:
        """Return the arrays."""
        matrices: NodeMatrices = self.__dict__["matrices"]
        return matrices.arrays(self.__dict__["row"])

    def __reduce__(self) -> tuple[Any, ...]:
        """Serialise as a plain record."""
        return memory_record, (self.arrays(),)


def gather(
    flat: FlatParameters,
    names: tuple[str, ...],
    initial: Tensors,
    vectors: Sequence[str],
    states: Sequence[RecordDict],
    round_: int,
) -> NodeMatrices:
    """Return new matrices that contain the nodes' states of a round.

    Parameters
    ----------
    flat : FlatParameters
        Describes the parameters in a row.
    names : tuple of str
        Names of the parameters.
    initial : dict of str to Tensor
        The initial model.
    vectors : sequence of str
        Names of the vectors in a state; initially 0.
    states : sequence of RecordDict
        The nodes' states in memory.
    round_ : int
        The round; 0 for the initial model.
    """
    x = flat.vector.new_empty(len(states), len(flat.vector))
    matrices = NodeMatrices(
        flat, names, x, {name: torch.zeros_like(x) for name in vectors}
    )
    if round_ == 0:
        _put(matrices, slice(None), initial)
        return matrices
    records: list[Any] = [state[f"{PREFIX}{round_}"] for state in states]
    rows: dict[int, list[int]] = {}
    for i, record in enumerate(records):
        if isinstance(record, NodeRecord):
            rows.setdefault(id(record.__dict__["matrices"]), []).append(i)
        else:
            arrays = {name: values_of(array) for name, array in record.items()}
            _put(
                matrices, i, {n: torch.from_numpy(a.copy()) for n, a in arrays.items()}
            )
    for members in rows.values():
        former: NodeMatrices = records[members[0]].__dict__["matrices"]
        chosen = torch.tensor([records[i].__dict__["row"] for i in members])
        matrices.sent.update(former.sent)
        place: Any = torch.tensor(members)
        if len(members) == len(states):
            place = slice(None)
        x[place] = former.x[chosen]
        for name in vectors:
            matrices.vectors[name][place] = former.vectors[name][chosen]
    return matrices


def _put(matrices: NodeMatrices, rows: int | slice, state: Tensors) -> None:
    """Write one node's state into some rows."""
    views = matrices.flat.views(matrices.x[rows])
    for name, view in zip(matrices.names, views, strict=True):
        view.copy_(state[name])
    for name, vector in matrices.vectors.items():
        if name in state:
            vector[rows] = state[name].to(vector.device)
