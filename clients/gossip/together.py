"""Nodes of one process train and exchange messages together, as rows of matrices.

The equations are those of the client classes, on matrices instead of vectors: a round's
mixing is a product with the sparse matrix of weights, and each message is decoded once.
Nodes that cannot join, for example after an absence, are answered one by one by their
clients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from logging import getLogger
from typing import Any, cast

import numpy as np
import torch
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from torch import Tensor

from flwr_frl.clients.base import Config
from flwr_frl.clients.device.conversions import Tensors, to_numpy
from flwr_frl.clients.device.parameter_groups import Arrays
from flwr_frl.clients.device.setup import (
    Setup,
    build_client,
    client_name,
    cohort_size,
    partition_id,
    torch_seed,
)
from flwr_frl.clients.device.state import PREFIX, StoredArrays, replace_versions
from flwr_frl.clients.gossip.base import VECTORS, Exchange, Node
from flwr_frl.clients.gossip.flat import FlatParameters
from flwr_frl.common.flower_messages import entries_of, fill, reply_with
from flwr_frl.common.memory_array import memory_record, values_of
from flwr_frl.common.messages import (
    ACKNOWLEDGED_ROUND,
    ARRAYS,
    BYTES,
    CONFIG,
    EXCHANGED_ROUND,
    METRICS,
    NUM_EXAMPLES,
    SERVER_ROUND,
)
from flwr_frl.common.run_cache import run_cache, run_object
from flwr_frl.task.base import Task
from flwr_frl.task.devices import seed
from flwr_frl.task.examples import Batch, ExampleSet
from flwr_frl.task.models.frozen import frozen_tensors
from flwr_frl.task.resident import train_examples
from flwr_frl.task.training.calls import fewest
from flwr_frl.task.training.cohort import RefusedKeys
from flwr_frl.task.training.stacked import Objective
from flwr_frl.task.training.stacked_batches import PooledExamples

# Keys of the node config of simulated nodes. With further keys, a node may have a
# different task.
SIMULATED = {"partition-id", "num-partitions"}


def fit_nodes(
    setup: Setup,
    messages: Sequence[Message],
    contexts: Sequence[Context],
    only_if_faster: bool,
) -> dict[int, Message]:
    """Answer training messages of nodes, as far as they can run as rows of matrices.

    Parameters
    ----------
    setup : Setup
        The settings, the same for all nodes.
    messages : sequence of Message
        Training messages of one round.
    contexts : sequence of Context
        The contexts of their nodes.
    only_if_faster : bool
        Whether models that are not faster together are answered one by one.

    Returns
    -------
    dict of int to Message
        Replies, by the index of the message. Messages without a reply must be answered
        one by one; their nodes' states are unchanged.
    """
    refused, key = run_object(RefusedKeys), (Nodes, setup.kind)
    if setup.states is not None or setup.device.dp_noise or key in refused:
        return {}
    pairs = enumerate(zip(messages, contexts, strict=True))
    if len(joining := [i for i, pair in pairs if _joins(*pair)]) < 2:
        return {}
    try:
        of_nodes = [messages[i] for i in joining], [contexts[i] for i in joining]
        nodes = Nodes(setup, *of_nodes)
        if not nodes.can_run(only_if_faster):
            return {}
        answers = nodes.fit()
    # torch raises exceptions of many types for what it cannot batch. Answered one by
    # one, nodes whose examples cannot be read report it.
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        refused.add(key)
        getLogger("task").warning("nodes are trained one by one: %s", reason)
        return {}
    answered = zip(joining, answers, strict=True)
    return {i: answer for i, answer in answered if answer is not None}


def _joins(message: Message, context: Context) -> bool:
    """Return whether a node can run as a row: it has not missed the last round."""
    record = message.content.get(CONFIG)
    if not isinstance(record, ConfigRecord) or context.node_config.keys() != SIMULATED:
        return False
    config = entries_of(record)
    last = config.get(ACKNOWLEDGED_ROUND)
    if last and f"{PREFIX}{last!r}" not in context.state:
        return False
    return last is not None and last == config.get(EXCHANGED_ROUND)


# The nodes' examples and states.


class NodesData:
    """The examples of several nodes.

    Parameters
    ----------
    examples : list of ExampleSet
        The examples of each node, on the device.
    """

    def __init__(self, examples: list[ExampleSet]) -> None:
        self.examples = examples
        self.sizes = [len(each) for each in examples]
        # Only plain examples are drawn together.
        self.is_plain = min(self.sizes) > 0 and not any(
            e.augment or e.unlabelled is not None for e in examples
        )

    @cached_property
    def pool(self) -> PooledExamples:
        """The examples of all nodes, from which batches are taken together."""
        return PooledExamples(self.examples)

    def groups(self, batch_size: int, most: int) -> list[tuple[int, list[int]]]:
        """Return groups of at most ``most`` nodes with batches of the same size.

        Nodes with few examples have smaller batches than ``batch_size``.
        """
        by_size: dict[tuple[int, int], list[int]] = {}
        for i, count in enumerate(self.sizes):
            by_size.setdefault((min(batch_size, count), i // most), []).append(i)
        return [(size, members) for (size, _), members in by_size.items()]


@run_cache(maxsize=1)
def nodes_data(task: Task, indices: tuple[int, ...], device: torch.device) -> NodesData:
    """Return the examples of nodes, most of which train again in the next round."""
    return NodesData([train_examples(task, i).on(device) for i in indices])


@dataclass(frozen=True)
class Matrices:
    """Models and vectors of several nodes; not changed after their round has ended.

    Parameters
    ----------
    flat : FlatParameters
        Describes the parameters in a row.
    x : Tensor, shape (nodes, d)
        The models.
    vectors : dict of str to Tensor, shape (nodes, d)
        The vectors, by their names in a client's state.
    sent : dict of bytes to Tensor
        Messages of the round, with their decoded vectors.
    """

    flat: FlatParameters
    x: Tensor
    vectors: Tensors
    sent: dict[bytes, Tensor] = field(default_factory=dict)

    def put(self, rows: int | slice, state: Mapping[str, Tensor]) -> None:
        """Write one node's state into some rows; vectors without a value stay."""
        for name, view in self.flat.views(self.x[rows]).items():
            view.copy_(state[name])
        for name, vector in self.vectors.items():
            if name in state:
                vector[rows] = state[name].to(vector.device)

    def arrays(self, row: int) -> Arrays:
        """Return the arrays of a node's state."""
        vectors = {name: matrix[row] for name, matrix in self.vectors.items()}
        tensors = self.flat.views(self.x[row]) | vectors
        return {name: to_numpy(tensor).copy() for name, tensor in tensors.items()}


_EMPTY = ArrayRecord().__dict__


class NodeRecord(StoredArrays):
    """A version of a node's state, which is a row of `Matrices`.

    Its arrays are copied when they are read. A copy of the record for another process
    is a plain ArrayRecord.
    """

    matrices: Matrices
    row: int

    def __init__(self, matrices: Matrices, row: int) -> None:
        # Flower's constructor takes as long as everything else for a small state.
        self.__dict__.update(_EMPTY, _data={}, matrices=matrices, row=row)

    def arrays(self) -> Arrays:
        """Return the arrays."""
        return self.matrices.arrays(self.row)

    def __reduce__(self) -> tuple[Any, ...]:
        """Serialise as a plain record."""
        return memory_record, (self.arrays(),)


def gather(client: Node, states: Sequence[RecordDict], round_: int) -> Matrices:
    """Return new matrices with the nodes' states of a round; 0 is the initial model."""
    flat = client.flat
    records: list[Any] = [s[f"{PREFIX}{round_}"] for s in states] if round_ else []
    rows = [record for record in records if isinstance(record, NodeRecord)]
    if len(rows) == len(states) and len({id(r.matrices) for r in rows}) == 1:
        former, chosen = rows[0].matrices, torch.tensor([r.row for r in rows])
        vectors = {name: matrix[chosen] for name, matrix in former.vectors.items()}
        return Matrices(flat, former.x[chosen], vectors, dict(former.sent))
    x = flat.vector.new_empty(len(states), len(flat.vector))
    vectors = {VECTORS + name: torch.zeros_like(x) for name in client.vectors}
    matrices = Matrices(flat, x, vectors)
    if not round_:
        matrices.put(slice(None), client.task.initial_state)
    for i, record in enumerate(records):
        is_row = isinstance(record, NodeRecord)
        arrays = (
            record.arrays() if is_row else {n: values_of(record[n]) for n in record}
        )
        matrices.put(i, {n: torch.from_numpy(a.copy()) for n, a in arrays.items()})
    return matrices


class Nodes:
    """Nodes with states of the same round, as one client whose ``x`` is a matrix.

    Parameters
    ----------
    setup : Setup
        Their settings.
    messages, contexts : sequence
        Training messages, and the contexts of their nodes.
    """

    def __init__(
        self, setup: Setup, messages: Sequence[Message], contexts: Sequence[Context]
    ) -> None:
        self.setup, self.messages, self.contexts = setup, messages, contexts
        self.configs: list[dict[str, Any]] = [
            entries_of(message.content[CONFIG]) for message in messages
        ]
        self.round = int(self.configs[0][SERVER_ROUND])
        client = build_client(contexts[0], setup, cast(Config, self.configs[0]))
        self.client = cast(Node, client)
        indices = tuple(partition_id(context.node_config) for context in contexts)
        self.data = nodes_data(client.task, indices, client._device)

    def can_run(self, only_if_faster: bool) -> bool:
        """Return whether these nodes can train together and, if asked, are faster."""
        model, examples = self.client.model, self.data.examples
        # Buffers, such as batch statistics, would need separate matrices.
        buffers = self.client.task.initial_state.keys() - {*self.client.flat.names}
        if buffers or frozen_tensors(model) or not self.data.is_plain:
            return False
        least = fewest(model, examples[0].inputs[:1].numel()) if only_if_faster else 2
        if least is None or len(examples) < least:
            return False
        return model.can_be_stacked(lambda: examples[0].first(2))

    def fit(self) -> list[Message | None]:
        """Run one round as `Node.fit`; None for nodes with NaN or infinity."""
        client, last = self.client, int(self.configs[0][ACKNOWLEDGED_ROUND])
        states = [context.state for context in self.contexts]
        matrices = gather(client, states, last)
        client.x, client.saved = matrices.x, dict(matrices.vectors)
        refused = self.exchange(matrices.sent)
        seeds, losses = self.iterate()
        finite, all_saved = losses.isfinite(), [client.x, *client.saved.values()]
        for matrix in all_saved:
            # `isfinite().all(1)` takes ten times as long.
            finite &= (matrix * 0).sum(1) == 0
        # The clients of other nodes repeat the round and report the error.
        for matrix in all_saved if not finite.all() else ():
            matrix[~finite] = 0
        messages, decoded = client.messages(self.round, seeds)
        matrices.sent.clear()
        matrices.sent.update(decoded)
        ok, means = finite.tolist(), losses.tolist()
        replies = [
            self.reply(i, message, means[i], refused[i]) if ok[i] else None
            for i, message in enumerate(messages)
        ]
        # No state is changed before all replies exist.
        for i, state in enumerate(states):
            if ok[i]:
                record = NodeRecord(matrices, i)
                replace_versions(state, self.round, record, {last, self.round})
        return replies

    def reply(self, i: int, message: bytes, loss: float, refused: int) -> Message:
        """Return a node's reply, as `Node.fit` and `pack` make it."""
        metrics = {
            NUM_EXAMPLES: self.setup.device.rounded(self.data.sizes[i]),
            "train-loss": loss,
            "refused": float(refused),
            SERVER_ROUND: float(self.round),
        }
        records = {
            ARRAYS: ArrayRecord(),
            METRICS: fill(MetricRecord(), metrics),
            BYTES: fill(ConfigRecord(), {"message": message}),
        }
        return reply_with(fill(RecordDict(), records), self.messages[i])

    def exchange(self, known: Mapping[bytes, Tensor]) -> list[int]:
        """Mix the messages of the last round; return how many each node has refused.

        ``known`` contains vectors of messages that have been decoded before.
        """
        client, n = self.client, len(self.configs)
        index, vectors = dict[bytes, int](), list[Tensor]()
        errors = dict[bytes, ValueError]()
        data_of_nodes = [config.get("relayed-data", ()) for config in self.configs]
        for data in dict.fromkeys(chain.from_iterable(data_of_nodes)):
            try:
                vector = known[data] if data in known else client.decode(data)
            except ValueError as error:
                errors[data] = error
                continue
            index[data] = len(vectors)
            vectors.append(vector.to(client._device))
        columns, weights = list[int](), list[float]()
        counts, refused = list[int](), list[int]()
        for config, messages in zip(self.configs, data_of_nodes, strict=True):
            w = config.get("relayed-weights", ())
            invalid = [k for k, data in enumerate(messages) if data in errors]
            for k in invalid:
                client.refuse(config["relayed-senders"][k], errors[messages[k]])
            if invalid:
                valid = [k for k in range(len(messages)) if k not in invalid]
                messages, w = [messages[k] for k in valid], [w[k] for k in valid]
            columns += [index[data] for data in messages]
            weights += w
            counts.append(len(messages))
            refused.append(len(invalid))
        x = client.x
        weighted_sum, weight = torch.zeros_like(x), x.new_zeros(n, 1)
        if columns:
            receivers = np.repeat(np.arange(n), counts)
            matrix = torch.sparse_coo_tensor(
                torch.from_numpy(np.stack([receivers, np.array(columns)])),
                torch.from_numpy(np.array(weights, np.float32)),
                (n, len(vectors)),
                check_invariants=False,
            ).to(x.device)
            weighted_sum = matrix @ torch.stack(vectors)
            weight = matrix @ x.new_ones(len(vectors), 1)
        neighbour = [[config["neighbour-weight"]] for config in self.configs]
        step = float(self.configs[0]["consensus-step"])
        client.mix(Exchange(weighted_sum, weight, x.new_tensor(neighbour), step))
        return refused

    def iterate(self) -> tuple[list[int], Tensor]:
        """Run H iterations on all nodes; return the nodes' seeds and mean losses."""
        client, batch_size = self.client, self.client.settings.batch_size
        iterations, run = client.iterations(self.round), int(self.setup.run["seed"])
        sizes, times = self.data.sizes, len(iterations)
        seeds, drawn = list[int](), list[Tensor]()
        for context, count in zip(self.contexts, sizes, strict=True):
            number = torch_seed(client_name(context.node_config), run, self.round)
            seed(number)
            seeds.append(number)
            drawn += [torch.randperm(count) for _ in iterations]
        cohort = self.setup.device.cohort
        most = len(sizes) if cohort == "auto" else cohort_size(cohort)
        order, lengths = torch.cat(drawn), torch.tensor(sizes).repeat_interleave(times)
        starts = (lengths.cumsum(0) - lengths).view(-1, times, 1)
        groups: list[tuple[Any, list[Batch]]] = []
        for size, members in self.data.groups(batch_size, most):
            rows = order[starts[members] + torch.arange(size)].flatten(1)
            batches = self.data.pool.batches(members, rows, size)
            everyone = len(members) == len(sizes)
            groups.append((slice(None) if everyone else torch.tensor(members), batches))
        client.model.train()
        g, total = torch.zeros_like(client.x), client.x.new_zeros(len(sizes))
        for k, t in enumerate(iterations):
            client.average(t)
            for place, batches in groups:
                g[place], losses = self.gradients(client.x[place], batches[k])
                total[place] += losses
            client.step(t, g)
        return seeds, total / times

    def gradients(
        self, x: Tensor, batch: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients at the models x, shape (nodes, d), and their losses."""
        client, flat = self.client, self.client.flat
        objective = Objective(client.model, client.task.loss)
        with client.settings.autocast():
            rows = flat.views(x), flat.names
            gradients, losses = objective.gradients(*rows, batch, [])
        g = torch.zeros_like(x)
        for view, gradient in zip(flat.views(g).values(), gradients, strict=True):
            if gradient is not None:
                view.copy_(gradient)
        return g, losses.float()
