"""Gossip runs whose messages can be lost or changed and whose nodes can be inspected.

Nodes train softmax regression on the bundled digits (8 x 8: d = 650) with full
batches, so that a plain NumPy version has the same gradients up to rounding.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message
from softmax_runs import round_of

from flwr_frl.clients.algorithms import client_setup, complete
from flwr_frl.clients.client_app import make_app
from flwr_frl.clients.device.setup import build_client
from flwr_frl.clients.gossip import base
from flwr_frl.common.settings import resolve
from flwr_frl.strategies import Gossip, build_strategy
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.loop import run_rounds
from flwr_frl.task.tasks import build_task

N = 5
D = 650
RING = np.array(
    [[1 / 3 if abs(i - j) in (0, 1, 4) else 0 for j in range(5)] for i in range(5)]
)
FULL_BATCH = {
    "model": "softmax",
    "num-clients": N,
    "batch-size": 10_000,
    "learning-rate": 0.1,
    "momentum": 0.0,
    "weight-decay": 0.0,
    "consensus-step": 1.0,
    "compressor": "identity",
}
ALGORITHMS = ("dpsgd", "choco-sgd", "squarm-sgd")
COMPRESSORS = ("identity", "top-k", "rand-k", "qsgd-top-k", "sign", "sign-top-k")
GOSSIP = pytest.mark.parametrize("algorithm", ALGORITHMS)


def name_of(i: int) -> str:
    return f"{i:06d}"


def away(node: int, server_round: int) -> bool:
    """Return whether a node is offline in a round; nodes 2 and 4 are not neighbours."""
    return (node, server_round) in {(2, 3), (2, 4), (2, 5), (4, 5), (4, 8), (2, 8)}


def relayed(message: Message) -> list[tuple[int, str]]:
    config = message.content.config_records["config"]
    rounds = config.get("relayed-rounds", [])
    senders = config.get("relayed-senders", [])
    assert len(rounds) == len(config.get("relayed-data", []))
    assert len(rounds) == len(config.get("relayed-weights", []))
    return list(zip(rounds, senders, strict=True))


class Lines(InlineGrid):
    """A grid that records all messages, and on which messages can be lost or changed.

    ``down(node, round)`` returns whether a node, from 0, gets no message. ``change``
    may replace the reply to a training message, or return None if the reply is lost.
    """

    down = staticmethod(lambda node, server_round: False)
    change = staticmethod(lambda node, server_round, reply: reply)

    def __init__(self, *args, **more) -> None:
        super().__init__(*args, **more)
        self.sent: list[Message] = []
        self.replies: list[Message] = []

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        self.sent += messages
        reached = [
            m
            for m in messages
            if not self.down(m.metadata.dst_node_id - 1, round_of(m))
        ]
        rounds = {m.metadata.dst_node_id: round_of(m) for m in reached}
        arrived = []
        for reply in super().send_and_receive(reached, timeout=timeout):
            node = reply.metadata.src_node_id
            if reply.metadata.message_type == "train":
                reply = self.change(node - 1, rounds[node], reply)
            if reply is not None:
                arrived.append(reply)
        self.replies += arrived
        return arrived


@dataclass
class Node:
    """A node's vectors after the exchanges of all rounds so far.

    ``half`` is the model in its saved state, x^{t+1/2}, before the last exchange.
    """

    x: np.ndarray
    half: np.ndarray
    saved: dict[str, np.ndarray]


class Network:
    """A run that continues on request, and whose nodes can be inspected."""

    def __init__(self, algorithm: str, clients: int | None = None, **more) -> None:
        overrides = {n.replace("_", "-"): v for n, v in more.items()}
        settings = {**FULL_BATCH, **overrides, "algorithm": algorithm}
        self.settings = complete(resolve(settings))
        self.n = int(self.settings["num-clients"])
        self.grid = Lines(make_app(self.settings), self.n)
        self.strategy = build_strategy(self.settings)
        assert isinstance(self.strategy, Gossip)
        self.task = build_task(self.settings, self.n)
        self.rows: list[dict] = []
        if clients is not None:
            contexts = list(self.grid.contexts.items())[:clients]
            self.grid.contexts.data = dict(contexts)
        self.arrays = self.strategy.initialize(self.grid)

    @property
    def round(self) -> int:
        return len(self.rows)

    def go(self, rounds: int = 1, evaluate: bool = False) -> "Network":
        run_rounds(
            self.strategy,
            self.grid,
            self.arrays,
            range(self.round + 1, self.round + 1 + rounds),
            evaluated=lambda _: evaluate,
            after_round=lambda r, a, metrics: self.rows.append(metrics),
        )
        return self

    def messages(self, kind: str, server_round: int, node: int | None = None):
        return [
            m
            for m in self.grid.sent
            if m.metadata.message_type == kind
            and round_of(m) == server_round
            and node in (None, m.metadata.dst_node_id - 1)
        ]

    def nodes(self) -> list[Node]:
        return [self.node(i) for i in range(self.n)]

    def node(self, i: int) -> Node:
        """Return a node's vectors after the exchanges that precede an evaluation."""
        start = ConfigRecord({"server-round": self.round})
        config = ConfigRecord({**start, **self.strategy._config(i + 1, start)})
        context = self.grid.contexts[i + 1]
        client = build_client(context, client_setup(context, self.settings), config)
        assert isinstance(client, base.Node)
        client._receive([], {})
        half = client.x[0].numpy().copy()
        client.catch_up([], dict(config))
        kept = {n: client.vector(n)[0].numpy().copy() for n in client.vectors}
        return Node(client.x[0].numpy().copy(), half, kept)

    def models(self) -> np.ndarray:
        return np.stack([node.x for node in self.nodes()])

    def initial(self) -> np.ndarray:
        return vector_of(self.task.initial_state)


def vector_of(state: dict[str, torch.Tensor]) -> np.ndarray:
    return np.concatenate([state["head.weight"].ravel(), state["head.bias"]]).astype(
        float
    )
