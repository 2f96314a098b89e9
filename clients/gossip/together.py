"""Nodes of one process train and exchange messages together, as rows of matrices.

The equations are those of `Node`. Only what surrounds them is special: the states of
all nodes are rows of the same matrices, and their gradients are computed at once.
Nodes that cannot join, for example after an absence, are answered one by one.
"""

from collections.abc import Iterator, Sequence
from logging import WARNING
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from flwr.app import Message, RecordDict
from torch import Tensor

from flwr_frl.clients.device import state as versions
from flwr_frl.clients.device.groups import Arrays, Tensors, to_tensors
from flwr_frl.clients.device.rows import Asked
from flwr_frl.clients.device.setup import SIMULATED, build_client
from flwr_frl.clients.gossip.base import (
    LARGEST_ENTRY,
    VECTORS,
    Gradients,
    Node,
    Sent,
    relayed,
)
from flwr_frl.clients.gossip.flat import FlatParameters
from flwr_frl.common import messages as keys
from flwr_frl.common.arrays import Matrix, ReplyRows, RowArrays, RowReply, layout_of
from flwr_frl.common.errors import TrainingDivergedError
from flwr_frl.common.run_cache import run_cache, run_object
from flwr_frl.task.base import Task
from flwr_frl.task.devices import client_seed, seed
from flwr_frl.task.examples import Batch
from flwr_frl.task.models.frozen import frozen_tensors
from flwr_frl.task.training.captured import called
from flwr_frl.task.training.cohort import CohortLimit
from flwr_frl.task.training.local_training import fewest
from flwr_frl.task.training.stacked import Objective, PooledExamples

# Rows of the matrices, and their batches.
Group = tuple[Any, list[Batch]]


@run_cache(maxsize=1)
def pooled(
    task: Task, indices: tuple[int, ...], device: torch.device
) -> PooledExamples | None:
    """Return the examples of nodes; None if they cannot be drawn together."""
    sets = [task.resident("train", i).on(device) for i in indices]
    plain = all(len(e) and not e.augment for e in sets)
    return PooledExamples(sets) if plain else None


class Matrices(NamedTuple):
    """Models and vectors of several nodes; not changed after their round has ended.

    Parameters
    ----------
    flat : FlatParameters
        Describes the parameters in a row.
    x : Tensor, shape (nodes, d)
        The models.
    vectors : dict of str to Tensor, shape (nodes, d)
        The vectors, by their names in a client's state.
    sent : Sent or None
        The messages of the round; None if receivers refuse one of them.
    """

    flat: FlatParameters
    x: Tensor
    vectors: Tensors
    sent: Sent | None


class NodeRecord(versions.StoredArrays):
    """A version of a node's state, which is a row of `Matrices`.

    Its arrays are copied when they are read.
    """

    matrices: Matrices
    row: int

    def __init__(self, matrices: Matrices, row: int) -> None:
        super().__init__({})
        self.__dict__.update(matrices=matrices, row=row)

    def arrays(self) -> Arrays:
        """Return the arrays."""
        flat, x, vectors, _ = self.matrices
        rows = {name: matrix[self.row] for name, matrix in vectors.items()}
        tensors = flat.views(x[self.row]) | rows
        return {n: t.numpy(force=True).copy() for n, t in tensors.items()}


def gather(client: Node, states: Sequence[RecordDict], round_: int) -> Matrices:
    """Return new matrices with the nodes' states of a round; 0 is the initial model."""
    name = f"{versions.PREFIX}{round_}"
    records: list[Any] = [state[name] for state in states] if round_ else []
    matrices = {id(getattr(record, "matrices", None)) for record in records}
    if len(matrices) == 1 and isinstance(records[0], NodeRecord):
        flat, x, vectors, sent = records[0].matrices
        chosen = torch.tensor([record.row for record in records])
        vectors = {name: matrix[chosen] for name, matrix in vectors.items()}
        return Matrices(flat, x[chosen], vectors, sent)
    x = client.flat.vector.new_empty(len(states), client.dimension)
    vectors = {VECTORS + name: torch.zeros_like(x) for name in client.vectors}
    saved = [to_tensors(versions.arrays_of(record), x.device) for record in records]
    for i, state in enumerate(saved or [client.task.initial_state] * len(states)):
        rows = client.flat.views(x[i]) | {n: m[i] for n, m in vectors.items()}
        # Initial vectors, which are not part of the initial state, are 0.
        for name in rows if saved else rows.keys() & state.keys():
            rows[name].copy_(state[name])
    return Matrices(client.flat, x, vectors, None)


class Nodes:
    """Nodes with states of the same round, as one client whose ``x`` is a matrix.

    Parameters
    ----------
    asked : sequence of Asked
        Their training messages.
    only_if_faster : bool
        Whether models that are not faster together are answered one by one.
    """

    in_chunks, level, least = False, WARNING, 2

    @staticmethod
    def joining(asked: Sequence[Asked]) -> dict[int, Asked]:
        """Return the messages to nodes that have not missed the last round."""
        setup, joining = asked[0].setup, dict[int, Asked]()
        if setup.states is not None or setup.device.dp_noise:
            return joining
        for i, each in enumerate(asked):
            config = each.request.config
            last = config.get(keys.ACKNOWLEDGED_ROUND)
            is_current = last is not None and last == config[keys.EXCHANGED_ROUND]
            is_saved = not last or f"{versions.PREFIX}{last!r}" in each.context.state
            if is_current and is_saved and each.context.node_config.keys() == SIMULATED:
                joining[i] = each
        return joining

    def __init__(self, asked: Sequence[Asked], only_if_faster: bool) -> None:
        self.asked, self.only_if_faster = asked, only_if_faster
        self.setup, request, context = asked[0]
        config = request.config
        self.round = int(config[keys.SERVER_ROUND])
        self.client = cast(Node, build_client(context, self.setup, config))
        indices = tuple(each.setup.partition for each in asked)
        # The examples; None if they cannot be drawn together.
        self.pool: Any = pooled(self.client.task, indices, self.client._device)

    @property
    def most(self) -> int:
        """Most nodes whose gradients are computed at once."""
        cohort, count = self.setup.device.cohort, len(self.asked)
        chosen = count if cohort == "auto" else min(count, int(cohort))
        return min(chosen, run_object(CohortLimit).most)

    def can_run(self) -> bool:
        """Return whether these nodes can train together and, if asked, are faster."""
        client, model = self.client, self.client.model
        # Buffers, such as batch statistics, would need separate matrices.
        if client.task.initial_state.keys() - {*client.flat.names}:
            return False
        if self.pool is None or frozen_tensors(model):
            return False
        first = self.pool.sets[0]
        size = first.inputs[:1].numel()
        least = fewest(model, size) if self.only_if_faster else 2
        if least is None or len(self.asked) < least:
            return False
        return model.can_be_stacked(lambda: first.first(2))

    def fit(self) -> Sequence[Message | None]:
        """Run one round as `Node.fit`; None for nodes that cannot run together."""
        if not self.can_run():
            return [None] * len(self.asked)
        client, configs = self.client, [each.request.config for each in self.asked]
        states = [each.context.state for each in self.asked]
        last = int(configs[0][keys.ACKNOWLEDGED_ROUND])
        flat, client.x, client.saved, sent = gather(client, states, last)
        refused = client.exchange([*map(relayed, configs)], configs, sent)
        seeds, orders = self.draw()
        total, steps = client.iterate(self.round, self.gradients(orders))
        losses = (total / steps).tolist()
        for matrix in (client.x, *client.saved.values()):
            # `isfinite().all()` takes ten times as long.
            if (matrix * 0).sum() != 0:
                raise TrainingDivergedError("a node's state is not finite")
        messages, q = client.messages(self.round, seeds)
        sent = Sent({message: i for i, message in enumerate(messages)}, q)
        is_valid = bool(q.abs().max() <= LARGEST_ENTRY)
        metrics: dict[str, list[int | float]] = {
            keys.NUM_EXAMPLES: self.pool.sizes,
            "train-loss": losses,
            "refused": [*map(float, refused)],
            keys.SERVER_ROUND: [float(self.round)] * len(states),
        }
        nothing = Matrix(np.empty((len(messages), 0), np.float32), layout_of((), ()))
        rows = ReplyRows(nothing, metrics, messages)
        replies = [
            RowReply(each.context.node_id, RowArrays(rows, i), each.request)
            for i, each in enumerate(self.asked)
        ]
        # No state is changed before all replies exist.
        matrices = Matrices(flat, client.x, client.saved, sent if is_valid else None)
        for i, state in enumerate(states):
            record = NodeRecord(matrices, i)
            versions.replace_versions(state, self.round, record, {last, self.round})
        return replies

    def draw(self) -> tuple[list[int], list[Group]]:
        """Return a seed for each node, and the batches of groups of nodes.

        The batches of a group have the same size: those of nodes with few examples are
        smaller.
        """
        client, sizes = self.client, self.pool.sizes
        run, times = int(self.setup.run["seed"]), client.settings.local_steps
        seeds, drawn = list[int](), list[Tensor]()
        for each, count in zip(self.asked, sizes, strict=True):
            seeds.append(client_seed(run, each.setup.name, self.round))
            seed(seeds[-1])
            drawn += [torch.randperm(count) for _ in range(times)]
        order, lengths = torch.cat(drawn), torch.tensor(sizes).repeat_interleave(times)
        starts = (lengths.cumsum(0) - lengths).view(-1, times, 1)
        by_size: dict[tuple[int, int], list[int]] = {}
        for i, count in enumerate(sizes):
            size = min(client.settings.batch_size, count)
            by_size.setdefault((size, i // self.most), []).append(i)
        groups = list[Group]()
        for (size, _), members in by_size.items():
            rows = order[starts[members] + torch.arange(size)].transpose(0, 1)
            place = torch.tensor(members)
            taken = self.pool.take(place, rows.to(self.pool.device))
            everyone = len(members) == len(sizes)
            batches = list(zip(*taken, strict=True))
            groups.append((slice(None) if everyone else place, batches))
        return seeds, groups

    def gradients(self, groups: list[Group]) -> Iterator[Gradients]:
        """Yield the gradients at ``x`` and the losses, for each batch of the groups."""
        client, flat = self.client, self.client.flat
        objective = Objective(client.model, client.task.loss)
        g, losses = torch.zeros_like(client.x), client.x.new_zeros(len(client.x))
        key = Nodes, client.model.kind, client.task.loss, client.settings.bfloat16

        def of_group(x: Tensor, *batch: Tensor) -> list[Tensor]:
            with client.settings.autocast():
                rows = flat.views(x), flat.names
                gradients, losses = objective.gradients(*rows, batch, [])
            # Parameters without a gradient have 0.
            of_nodes = torch.zeros_like(x)
            views = flat.views(of_nodes).values()
            for view, gradient in zip(views, gradients, strict=True):
                if gradient is not None:
                    view.copy_(gradient)
            return [of_nodes, losses.float()]

        for k in range(client.settings.local_steps):
            for place, batches in groups:
                arguments = client.x[place], *batches[k]
                g[place], losses[place] = called(objective, of_group, arguments, key)
            yield g, losses
