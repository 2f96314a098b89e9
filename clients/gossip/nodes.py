"""Nodes of one process train and exchange messages together, as rows of matrices.

The equations are those of the client classes, on matrices instead of vectors: a round's
mixing is a product with the sparse matrix of weights, and each message is decoded once.
Nodes that cannot join, for example after an absence, are answered one by one by their
clients.
"""

from collections.abc import Hashable, Mapping, Sequence
from logging import WARNING, getLogger
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
from flwr.common import log
from torch import Tensor

from flwr_frl.clients.base import Config
from flwr_frl.clients.device.setup import (
    Setup,
    build_client,
    cohort_size,
    torch_seed,
)
from flwr_frl.clients.device.state import PREFIX, replace_versions
from flwr_frl.clients.gossip.base import VECTORS, Node
from flwr_frl.clients.gossip.node_data import DataCache, DecodedMessages
from flwr_frl.clients.gossip.node_state import NodeRecord, gather
from flwr_frl.clients.gossip.relayed import Exchange, sender_label
from flwr_frl.common.flower_messages import entries_of, fill, reply_with
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
from flwr_frl.common.run_cache import run_object
from flwr_frl.task.devices import seed
from flwr_frl.task.examples import Batch
from flwr_frl.task.models.frozen import frozen_tensors
from flwr_frl.task.training.calls import fewest
from flwr_frl.task.training.cohort import RefusedKeys
from flwr_frl.task.training.stacked import Objective

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
        Training messages.
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
    if setup.states is not None or setup.privacy.dp_noise:
        return {}
    groups: dict[Hashable, list[int]] = {}
    for i, pair in enumerate(zip(messages, contexts, strict=True)):
        if (key := _key(*pair)) is not None:
            groups.setdefault(key, []).append(i)
    replies: dict[int, Message] = {}
    for members in groups.values():
        try:
            nodes = Nodes(
                setup, [messages[i] for i in members], [contexts[i] for i in members]
            )
            if not nodes.can_run(only_if_faster):
                continue
        # Answered one by one, the nodes whose examples cannot be read report it.
        except Exception:
            continue
        kind = nodes.client.model.kind
        try:
            answers = nodes.fit()
        # torch raises exceptions of many types for what it cannot batch.
        except Exception as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            run_object(RefusedKeys).add((Nodes, kind))
            getLogger("task").warning("nodes are trained one by one: %s", reason)
            continue
        answered = zip(members, answers, strict=True)
        replies |= {i: answer for i, answer in answered if answer is not None}
    return replies


def _key(message: Message, context: Context) -> Hashable:
    """Return the values that nodes must have in common; None if a node runs alone."""
    record = message.content.get(CONFIG)
    if not isinstance(record, ConfigRecord) or context.node_config.keys() != SIMULATED:
        return None
    config = entries_of(record)
    acknowledged = config.get(ACKNOWLEDGED_ROUND)
    if acknowledged and f"{PREFIX}{acknowledged!r}" not in context.state:
        return None
    names = SERVER_ROUND, EXCHANGED_ROUND, "consensus-step", "neighbour-weight"
    if acknowledged is None or any(name not in config for name in names):
        return None
    # A node that is back after an absence replays the rounds that it missed.
    is_back = acknowledged != config[EXCHANGED_ROUND]
    common = [cast(Hashable, config[name]) for name in names[:-1]]
    return None if is_back else tuple(common)


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
        self.data = run_object(DataCache).get(client.task, contexts, client.device)
        self.names = tuple(name for name, _ in client.model.named_parameters())

    def can_run(self, only_if_faster: bool) -> bool:
        """Return whether these nodes can train together and, if asked, are faster."""
        model, examples = self.client.model, self.data.examples
        if (Nodes, model.kind) in run_object(RefusedKeys):
            return False
        # Buffers, such as batch statistics, would need separate matrices.
        buffers = self.client.task.initial_state.keys() - set(self.names)
        if buffers or frozen_tensors(model) or not self.data.is_plain:
            return False
        least = fewest(model, examples[0].inputs[:1].numel()) if only_if_faster else 2
        if least is None or len(examples) < least:
            return False
        return model.can_be_stacked(lambda: examples[0].first(2))

    def fit(self) -> list[Message | None]:
        """Run one round as `Node.fit`; None for nodes with NaN or infinity."""
        client, last = self.client, int(self.configs[0][ACKNOWLEDGED_ROUND])
        vectors = [VECTORS + name for name in client.vectors]
        states = [context.state for context in self.contexts]
        initial = client.task.initial_state
        matrices = gather(client.flat, self.names, initial, vectors, states, last)
        client.x, client.saved = matrices.x, dict(matrices.vectors)
        refused = self.exchange(last, matrices.sent)
        seeds, losses = self.iterate()
        finite = losses.isfinite()
        for matrix in (client.x, *client.saved.values()):
            # `isfinite().all(1)` takes ten times as long.
            finite &= (matrix * 0).sum(1) == 0
        if not finite.all():
            # The clients of these nodes repeat the round and report the error.
            for matrix in (client.x, *client.saved.values()):
                matrix[~finite] = 0
        messages, decoded = client.messages(self.round, seeds)
        matrices.remember(messages, decoded)
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

    def exchange(self, round_: int, known: Mapping[bytes, Tensor]) -> list[int]:
        """Mix the messages of a round; return how many each node has refused.

        ``known`` contains vectors of messages that have been decoded before.
        """
        client, decoded = self.client, DecodedMessages(self.client, known)
        columns, weights, counts = list[int](), list[float](), list[int]()
        refused = [0] * len(self.configs)
        for i, config in enumerate(self.configs):
            senders, data, w = (
                config.get(f"relayed-{name}", ())
                for name in ("senders", "data", "weights")
            )
            indices = [decoded[message] for message in data]
            rounds = config.get("relayed-rounds", ())
            if None in indices or rounds.count(round_) < len(rounds):
                due = [j for j, r in enumerate(rounds) if r == round_]
                valid = [j for j in due if indices[j] is not None]
                for j in set(due) - set(valid):
                    text = "message of neighbour %s refused: %s"
                    label = sender_label(client, senders[j])
                    log(WARNING, text, label, decoded.errors[data[j]])
                refused[i] = len(due) - len(valid)
                indices, w = [indices[j] for j in valid], [w[j] for j in valid]
            columns += cast(list[int], indices)
            weights += w
            counts.append(len(indices))
        n, x = len(self.configs), client.x
        weighted_sum, weight = torch.zeros_like(x), x.new_zeros(n, 1)
        if columns:
            receivers = np.repeat(np.arange(n), counts)
            places = torch.from_numpy(np.stack([receivers, np.array(columns)]))
            w = torch.sparse_coo_tensor(
                places,
                torch.from_numpy(np.array(weights, np.float32)),
                (n, len(decoded.vectors)),
                check_invariants=False,
            ).to(x.device)
            weighted_sum = w @ torch.stack(decoded.vectors)
            weight = w @ x.new_ones(len(decoded.vectors), 1)
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
            number = torch_seed(context, run, self.round)
            seed(number)
            seeds.append(number)
            drawn += [torch.randperm(count) for _ in iterations]
        cohort = self.setup.device.cohort
        most = len(sizes) if cohort == "auto" else cohort_size(cohort)
        order, lengths = torch.cat(drawn), self.data.lengths.repeat_interleave(times)
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
        client = self.client
        state = dict(zip(self.names, client.flat.views(x), strict=True))
        objective = Objective(client.model, client.task.loss)
        with client.settings.autocast():
            gradients, losses = objective.gradients(state, self.names, batch, [])
        g = torch.zeros_like(x)
        for view, gradient in zip(client.flat.views(g), gradients, strict=True):
            if gradient is not None:
                view.copy_(gradient)
        return g, losses.float()
