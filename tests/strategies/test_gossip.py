"""Gossip against plain NumPy, its relay message by message, and nodes that go away.

Nodes learn softmax regression on the bundled digits (8 x 8: d = 650) with full
batches, so that a plain NumPy version has the same gradients up to rounding.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from logging import WARNING

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from torch import nn

import simulation
from clients.client_app import build_client, complete, make_app
from clients.gossip import GossipClient, exchanges
from strategies import ChocoSGD, Gossip, build_strategy
from strategies.graphs import complete as complete_graph
from strategies.grids import InlineGrid
from strategies.mixing import spectrum, uniform_weights
from strategies.report import Report
from strategies.server_app import run_rounds
from task.compression import Identity, PerTensor, SignTopK, create
from task.models import MODELS
from task.settings import SettingsError, resolve
from task.tasks import build_task

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
GOSSIP = pytest.mark.parametrize("algorithm", ALGORITHMS)


@pytest.fixture(autouse=True)
def _softmax(monkeypatch):
    """The model ``softmax``: logistic regression that does not begin at 0.

    Entries that nothing has moved yet would be equal, and which of them are the
    largest k would be nobody's business.
    """

    def build(shape, num_classes):
        linear = nn.Linear(int(np.prod(shape)), num_classes)
        return [[("flatten", nn.Flatten())], [("fc1", linear)]]

    monkeypatch.setitem(MODELS, "softmax", (build, ""))


def name_of(i: int) -> str:
    return f"{i:06d}"


def round_of(message: Message) -> int:
    config = message.content.config_records.get("config", {})
    return int(config.get("server-round", 0))


class Lines(InlineGrid):
    """A grid that writes down all that passes, and on which lines fail.

    ``down(node, round)`` says whether a node, from 0, gets no message; ``change`` may
    replace the reply to a training message, or return None for one that got lost.
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
    """A node's vectors after all that has been exchanged so far.

    ``half`` is the model before that: x^{t+1/2}, as its own state has it.
    """

    x: np.ndarray
    half: np.ndarray
    kept: dict[str, np.ndarray]


class Network:
    """A run, round by round, whose nodes can be looked into."""

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
            self.grid.contexts = dict(contexts)
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
        """Do what an evaluation does, and show the model instead of testing it."""
        self.strategy._exchanged = self.round
        start = ConfigRecord({"server-round": self.round})
        content = self.strategy.content(i + 1, ArrayRecord(), start)
        config = content.config_records["config"]
        client = build_client(self.grid.contexts[i + 1], self.settings, config)
        client.receive([])
        half = client.x.numpy().copy()
        for server_round, messages in exchanges(dict(config), client.state.round):
            client.mix(server_round, messages, dict(config))
        kept = {n: v.numpy().copy() for n, v in client.kept.items()}
        return Node(client.x.numpy().copy(), half, kept)

    def models(self) -> np.ndarray:
        return np.stack([node.x for node in self.nodes()])

    def initial(self) -> np.ndarray:
        return vector_of(self.task.initial_state)


def vector_of(state: dict[str, torch.Tensor]) -> np.ndarray:
    return np.concatenate([state["head.weight"].ravel(), state["head.bias"]]).astype(
        float
    )


# Plain NumPy: nothing below knows of clients, compressors or graphs of the package.


def data_of(network: Network) -> list[tuple[np.ndarray, np.ndarray]]:
    data = []
    for i in range(network.n):
        ((inputs, targets),) = network.task.train_examples(i).batches(10_000)
        data.append((inputs.reshape(len(inputs), -1).double().numpy(), targets.numpy()))
    return data


def gradient(x: np.ndarray, inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Of the mean cross-entropy of softmax regression; x is (W, b), W row by row."""
    weight, bias = x[:-10].reshape(10, -1), x[-10:]
    logits = inputs @ weight.T + bias
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(targets)), targets] -= 1
    p /= len(targets)
    return np.concatenate([(p.T @ inputs).ravel(), p.sum(0)])


def sign_top_k(x: np.ndarray, k: int) -> np.ndarray:
    order = np.argsort(-np.abs(x))
    gap = np.abs(x[order[k - 1]]) - np.abs(x[order[k]])
    # Otherwise rounding may decide which entry is kept, and nothing can be compared.
    assert gap > 2e-6
    kept = order[:k]
    result = np.zeros_like(x)
    result[kept] = np.abs(x[kept]).mean() * np.sign(x[kept])
    return result


@dataclass
class PlainSQuARM:
    """Algorithm 1 as it is printed: every node keeps x^_j of each neighbour."""

    data: list
    start: np.ndarray
    weights: np.ndarray
    rate: Callable[[int], float]
    step: float
    compress: Callable[[np.ndarray], np.ndarray]
    beta: float = 0.0
    local_steps: int = 1
    trigger: Callable[[int], float] = lambda t: 0.0
    decay: float = 0.0
    t: int = 0
    sent: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        n = len(self.data)
        self.x = np.tile(self.start, (n, 1))
        self.v = np.zeros_like(self.x)
        # public[i][j]: what node i thinks of node j.
        near = [[j for j in range(n) if self.weights[i, j] > 0] for i in range(n)]
        self.public = [
            {j: np.zeros_like(self.start) for j in near[i]} for i in range(n)
        ]

    def round(self, present: Callable[[int], bool] = lambda i: True) -> None:
        n = len(self.data)
        for _ in range(self.local_steps):
            for i in filter(present, range(n)):
                g = gradient(self.x[i], *self.data[i])
                g[:-10] += self.decay * self.x[i][:-10]
                self.v[i] = self.beta * self.v[i] + g
                self.x[i] -= self.rate(self.t) * (self.beta * self.v[i] + g)
            self.t += 1
        t = self.t - 1
        q = np.zeros_like(self.x)
        sent = 0
        for i in filter(present, range(n)):
            difference = self.x[i] - self.public[i][i]
            left, right = difference @ difference, self.trigger(t) * self.rate(t) ** 2
            assert abs(left - right) > 1e-5 * right
            if left > right:
                q[i] = self.compress(difference)
                sent += 1
        for i in range(n):
            for j in self.public[i]:
                self.public[i][j] = self.public[i][j] + q[j]
            for j in self.public[i]:
                between = self.public[i][j] - self.public[i][i]
                self.x[i] += self.step * self.weights[i, j] * between
        self.sent.append(sent)


def plain_dpsgd(network: Network, weights: np.ndarray):
    """Yield the nodes' models after each round."""
    data = data_of(network)
    x = np.tile(network.initial(), (network.n, 1))
    while True:
        g = np.stack([gradient(x[i], *data[i]) for i in range(network.n)])
        x = weights @ (x - 0.1 * g)
        yield x


# Equal to plain NumPy


def test_dpsgd_equals_plain_numpy_step_by_step():
    network = Network("dpsgd")
    plain = plain_dpsgd(network, RING)
    for _ in range(10):
        found = network.go().models()
        np.testing.assert_allclose(found, next(plain), rtol=0, atol=1e-6)
    # The models have moved, and apart.
    assert np.abs(found - network.initial()).max() > 0.05
    assert np.abs(found - found.mean(0)).max() > 0.01


def test_choco_with_identity_and_gamma_1_equals_dpsgd_step_by_step():
    choco, dpsgd = Network("choco-sgd"), Network("dpsgd")
    plain = plain_dpsgd(dpsgd, RING)
    for _ in range(10):
        found = choco.go().models()
        np.testing.assert_allclose(found, dpsgd.go().models(), rtol=0, atol=1e-6)
        np.testing.assert_allclose(found, next(plain), rtol=0, atol=1e-6)
    assert choco.rows[-1]["bits"] == dpsgd.rows[-1]["bits"] == 32 * D * N


@pytest.mark.parametrize("compressor", ["sign-top-k", "qsgd-top-k", "rand-k"])
def test_squarm_without_momentum_delay_and_trigger_is_choco_to_the_last_bit(compressor):
    # Small random batches too: the same seeds.
    more = {
        "compressor": compressor,
        "compressor_k": 0.1,
        "batch_size": 8,
        "consensus_step": 0.2,
        "per_tensor": True,
    }
    squarm = Network("squarm-sgd", local_steps=1, trigger="0", **more)
    # CHOCO takes no notice of either.
    choco = Network("choco-sgd", local_steps=3, trigger="7", **more)
    squarm.go(6, evaluate=True)
    choco.go(6, evaluate=True)
    np.testing.assert_array_equal(squarm.models(), choco.models())
    for row, other in zip(squarm.rows, choco.rows, strict=True):
        assert row == other


def test_dpsgd_on_the_complete_graph_is_sgd_on_the_mean_gradient():
    network = Network("dpsgd", graph="complete", mixing="uniform")
    np.testing.assert_allclose(uniform_weights(complete_graph(N)), np.full((N, N), 0.2))
    data, x = data_of(network), network.initial()
    for _ in range(10):
        x = x - 0.1 * np.mean([gradient(x, *own) for own in data], axis=0)
        for node in network.go().nodes():
            np.testing.assert_allclose(node.x, x, rtol=0, atol=1e-6)


SQUARM = {
    "momentum": 0.9,
    "local_steps": 3,
    "compressor": "sign-top-k",
    "compressor_k": 100.0,
    "consensus_step": 0.3,
    "learning_rate": 1.0,
    "learning_rate_schedule": "inverse:40",
    "trigger": "3000:1000:6:24",
    "weight_decay": 0.01,
    # Of no two entries near the border of top-k are the magnitudes nearly the same.
    "seed": 1,
}


def plain_squarm(network: Network) -> PlainSQuARM:
    return PlainSQuARM(
        data_of(network),
        network.initial(),
        RING,
        rate=lambda t: 1 / (t + 40),
        step=0.3,
        compress=lambda x: sign_top_k(x, 100),
        beta=0.9,
        local_steps=3,
        trigger=lambda t: 3000 + 1000 * (min(t, 24) // 6),
        decay=0.01,
    )


def test_squarm_equals_algorithm_1_with_everybodys_estimates():
    network = Network("squarm-sgd", **SQUARM)
    plain = plain_squarm(network)
    for _ in range(14):
        plain.round()
        nodes = network.go().nodes()
        for i, node in enumerate(nodes):
            np.testing.assert_allclose(node.x, plain.x[i], rtol=0, atol=1e-5)
            own, others = plain.public[i][i], plain.public[i]
            np.testing.assert_allclose(node.kept["estimate"], own, rtol=0, atol=1e-5)
            summed = sum(RING[i, j] * others[j] for j in others if j != i)
            np.testing.assert_allclose(
                node.kept["neighbours"], summed, rtol=0, atol=1e-5
            )
            np.testing.assert_allclose(
                node.kept["momentum"], plain.v[i], rtol=0, atol=1e-5
            )
    assert [row["sent"] for row in network.rows] == plain.sent
    # It fires sometimes.
    assert {0, N} < set(plain.sent)


# Nodes that go away


def away(node: int, server_round: int) -> bool:
    """Node 2 is down for long, node 4 twice, and once both, who are no neighbours."""
    return (node, server_round) in {(2, 3), (2, 4), (2, 5), (4, 5), (4, 8), (2, 8)}


@GOSSIP
def test_the_mean_moves_as_equation_3_9_says(algorithm):
    """Exchanging leaves the mean where it is, whoever is away."""
    network = Network(algorithm, **SQUARM)
    network.grid.down = away
    former = np.tile(network.initial(), (N, 1))
    for server_round in range(1, 11):
        nodes = network.go().nodes()
        # x^{t+1/2}; who is away does not train.
        half = [
            former[i] if away(i, server_round) else node.half
            for i, node in enumerate(nodes)
        ]
        former = np.stack([node.x for node in nodes])
        np.testing.assert_allclose(former.mean(0), np.mean(half, 0), rtol=0, atol=1e-6)
    assert [row["unanswered"] for row in network.rows] == [0, 0, 1, 1, 2, 0, 0, 2, 0, 0]
    # The exchanges did something.
    assert np.abs(former - half).max() > 1e-3


@pytest.mark.parametrize("algorithm", ["choco-sgd", "squarm-sgd"])
def test_after_it_is_back_everybody_agrees_on_the_estimates(algorithm):
    network = Network(algorithm, **SQUARM)
    network.grid.down = away
    for _ in range(10):
        nodes = network.go().nodes()
        estimates = np.stack([node.kept["estimate"] for node in nodes])
        assert np.abs(estimates).max() > 0
        for i, node in enumerate(nodes):
            others = RING[i].copy()
            others[i] = 0
            np.testing.assert_allclose(
                node.kept["neighbours"], others @ estimates, rtol=0, atol=1e-6
            )


def test_squarm_with_absent_nodes_equals_plain_numpy():
    network = Network("squarm-sgd", **SQUARM)
    network.grid.down = away
    plain = plain_squarm(network)
    for server_round in range(1, 13):
        plain.round(lambda i, r=server_round: not away(i, r))
        found = network.go().models()
        np.testing.assert_allclose(found, plain.x, rtol=0, atol=1e-5)
    assert [row["sent"] for row in network.rows] == plain.sent


def test_dpsgd_with_absent_nodes_uses_an_edge_from_both_ends_or_not_at_all():
    network = Network("dpsgd")
    network.grid.down = away
    data, x = data_of(network), np.tile(network.initial(), (N, 1))
    for server_round in range(1, 11):
        present = [i for i in range(N) if not away(i, server_round)]
        half = x.copy()
        for i in present:
            half[i] -= 0.1 * gradient(x[i], *data[i])
        x = half.copy()
        for i in present:
            x[i] += sum(RING[i, j] * (half[j] - half[i]) for j in present)
        np.testing.assert_allclose(network.go().models(), x, rtol=0, atol=1e-6)


def relayed(message: Message) -> list[tuple[int, str]]:
    config = message.content.config_records["config"]
    rounds = config.get("relayed-rounds", [])
    senders = config.get("relayed-senders", [])
    assert len(rounds) == len(config.get("relayed-data", []))
    assert len(rounds) == len(config.get("relayed-weights", []))
    return list(zip(rounds, senders, strict=True))


def both_neighbours_of_2(*rounds: int) -> list[tuple[int, str]]:
    return [(r, name_of(j)) for r in rounds for j in (1, 3)]


@pytest.mark.parametrize("how", ["down", "gone", "lost", "error"])
def test_a_backlog_is_kept_delivered_once_and_cleared(how):
    """Down: no answer. Gone: not even among the nodes. Lost: the reply got lost."""
    network = Network("choco-sgd", compressor="sign", consensus_step=0.3)
    missed = (3, 4, 5)
    if how == "down":
        network.grid.down = lambda i, r: i == 2 and r in missed
    if how == "lost":
        network.grid.change = lambda i, r, reply: (
            None if i == 2 and r in missed else reply
        )
    if how == "error":
        network.grid.change = lambda i, r, reply: (
            Message(Error(2, "no"), reply_to=network.messages("train", r, 2)[0])
            if i == 2 and r in missed
            else reply
        )
    network.go(2, evaluate=True)
    context = network.grid.contexts[3]
    if how == "gone":
        del network.grid.contexts[3]
    network.go(3, evaluate=True)
    network.grid.contexts[3] = context
    assert [p.round for p in network.strategy.pending[name_of(2)]] == [
        2,
        2,
        3,
        3,
        4,
        4,
        5,
        5,
    ]
    network.go(3, evaluate=True)
    if how != "gone":
        for r in (4, 5):
            (message,) = network.messages("train", r, 2)
            assert relayed(message) == both_neighbours_of_2(*range(2, r))
    for kind, r, rounds in (
        ("train", 3, (2,)),
        ("train", 6, (2, 3, 4, 5)),
        ("evaluate", 6, (6,)),
        ("train", 7, (6,)),
        ("evaluate", 7, (7,)),
        ("train", 8, (7,)),
    ):
        for message in network.messages(kind, r, 2):
            assert relayed(message) == both_neighbours_of_2(*rounds)
    rejected = [row["rejected"] for row in network.rows]
    unanswered = [row["unanswered"] for row in network.rows]
    expected = [0, 0, 1, 1, 1, 0, 0, 0]
    assert rejected == (expected if how == "error" else [0] * 8)
    assert unanswered == (expected if how in ("down", "lost") else [0] * 8)


def test_dpsgd_keeps_no_backlog_of_rounds_that_a_node_missed():
    network = Network("dpsgd")
    network.grid.down = lambda i, r: i == 2 and r in (3, 4, 5)
    network.go(6)
    for r in (3, 4, 5, 6):
        (message,) = network.messages("train", r, 2)
        assert relayed(message) == both_neighbours_of_2(2)
    # Nor do its neighbours get anything of a round without it.
    (message,) = network.messages("train", 5, 1)
    assert relayed(message) == [(4, name_of(0))]


@GOSSIP
@pytest.mark.parametrize("how", ["lost", "too long"])
def test_a_reply_that_does_not_count_leaves_no_trace(algorithm, how):
    """The node trains, but goes back to where it was: as if it had been away."""

    def lost(i: int, server_round: int, reply: Message) -> Message | None:
        if i != 2 or server_round not in (3, 4):
            return reply
        if how == "lost":
            return None
        reply.content.config_records["bytes"]["message"] += b"\0"
        return reply

    absent, rejected = (Network(algorithm, **SQUARM) for _ in range(2))

    absent.grid.down = lambda i, r: i == 2 and r in (3, 4)
    rejected.grid.change = lost
    for network in (absent, rejected):
        network.go(7, evaluate=True)
    if how == "too long":
        assert [row["rejected"] for row in rejected.rows] == [0, 0, 1, 1, 0, 0, 0]
    for node, other in zip(absent.nodes(), rejected.nodes(), strict=True):
        np.testing.assert_array_equal(node.x, other.x)
        for name, vector in node.kept.items():
            np.testing.assert_array_equal(vector, other.kept[name])


@GOSSIP
def test_a_node_that_is_away_for_too_long_is_lost(algorithm, caplog):
    network = Network(
        algorithm, compressor="sign", consensus_step=0.3, max_missed_rounds=2
    )
    network.grid.down = lambda i, r: i == 2 and r >= 3
    with caplog.at_level(WARNING, "flwr"):
        network.go(9, evaluate=True)
    # Its last reply was that of round 2: after rounds 3 and 4 it may still come back.
    assert [row["lost"] for row in network.rows] == [0] * 5 + [1] * 4
    assert [row["unanswered"] for row in network.rows] == [0, 0, 1, 1, 1, 0, 0, 0, 0]
    assert [row["clients"] for row in network.rows] == [5, 5] + [4] * 7
    warnings = [r for r in caplog.records if "is lost" in r.getMessage()]
    assert len(warnings) == 1
    assert name_of(2) in warnings[0].getMessage()
    assert network.strategy.pending[name_of(2)] == []
    # It is not even asked.
    for r in range(6, 10):
        assert len(network.messages("train", r)) == 4
        assert len(network.messages("evaluate", r)) == 4
    # Back too late; the others go on.
    network.grid.down = lambda i, r: False
    network.go(2, evaluate=True)
    assert network.messages("train", 11, 2) == []
    assert network.rows[-1]["clients"] == 4
    assert np.isfinite([row["train-loss"] for row in network.rows]).all()
    assert network.strategy.pending[name_of(2)] == []


def test_a_node_that_is_back_in_time_is_not_lost():
    network = Network("choco-sgd", max_missed_rounds=2)
    network.grid.down = lambda i, r: i == 2 and r in (3, 4)
    network.go(6)
    assert network.rows[-1]["lost"] == 0
    assert network.rows[-1]["clients"] == N


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_node_that_lost_its_state_is_an_error_and_lost(algorithm):
    # Its estimate is no longer what its neighbours think it is: that cannot be made
    # up for, and the run has to say so.
    network = Network(algorithm, consensus_step=0.5)
    network.go(3)
    network.grid.contexts[3].state = RecordDict()
    network.go(6)
    assert [row["rejected"] for row in network.rows] == [0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert [row["lost"] for row in network.rows] == [0] * 4 + [1] * 5


def test_a_late_stranger_has_no_place_in_the_graph(caplog):
    network = Network("choco-sgd", clients=4, consensus_step=0.5)
    assert network.strategy.names == [name_of(i) for i in range(4)]
    network.go(2)
    late = Lines(make_app(network.settings), N).contexts[N]
    network.grid.contexts[N] = late
    with caplog.at_level(WARNING, "flwr"):
        network.go(3, evaluate=True)
    assert [row["clients"] for row in network.rows] == [4] * 5
    assert network.rows[-1]["evaluated"] == 4
    warnings = [r for r in caplog.records if "no place in the graph" in r.getMessage()]
    assert len(warnings) == 1
    asked = {
        m.metadata.message_type
        for m in network.grid.sent
        if m.metadata.dst_node_id == N
    }
    assert asked == {"query"}


@pytest.mark.parametrize("pause", [0, 2])
def test_a_node_under_another_id_keeps_its_place(pause):
    usual, moved = (Network("squarm-sgd", **SQUARM) for _ in range(2))
    usual.grid.down = lambda i, r: i == 2 and 3 < r <= 3 + pause
    usual.go(6 + pause, evaluate=True)
    moved.go(3, evaluate=True)
    context = moved.grid.contexts.pop(3)
    moved.go(pause, evaluate=True)
    context.node_id = 77
    moved.grid.contexts[77] = context
    moved.go(3, evaluate=True)
    for row, other in zip(usual.rows, moved.rows, strict=True):
        for name in ("train-loss", "accuracy", "sent", "clients", "consensus-distance"):
            assert row[name] == other[name]
    assert moved.strategy.names == [name_of(i) for i in range(N)]


# Only messages, and only to neighbours


CONFIG = {
    "server-round",
    "acknowledged-round",
    "checkpoint-round",
    "exchanged-round",
    "consensus-step",
    "neighbour-weight",
}
RELAYED = {"relayed-rounds", "relayed-senders", "relayed-weights", "relayed-data"}


@GOSSIP
@pytest.mark.parametrize("graph", ["ring", "star", "erdos-renyi"])
def test_relayed_to_neighbours_only(algorithm, graph):
    network = Network(
        algorithm, graph=graph, compressor="sign-top-k", compressor_k=0.1, seed=3
    )
    network.grid.down = away
    network.go(6, evaluate=True)
    weights = network.strategy.weights
    sender_of = {}
    for reply in network.grid.replies:
        if reply.metadata.message_type == "train":
            data = reply.content.config_records["bytes"]["message"]
            assert sender_of.setdefault(data, reply.metadata.src_node_id - 1) == (
                reply.metadata.src_node_id - 1
            )
    assert len(sender_of) == sum(row["sent"] for row in network.rows)
    seen = set()
    for message in network.grid.sent:
        if message.metadata.message_type not in ("train", "evaluate"):
            continue
        i = message.metadata.dst_node_id - 1
        assert list(message.content) == ["arrays", "config"]
        assert len(message.content["arrays"]) == 0
        config = message.content["config"]
        own = set(config) - CONFIG
        assert own in (set(), RELAYED)
        assert config["neighbour-weight"] == pytest.approx(1 - weights[i, i])
        for name, weight, data in zip(
            config.get("relayed-senders", []),
            config.get("relayed-weights", []),
            config.get("relayed-data", []),
            strict=True,
        ):
            j = sender_of[data]
            assert name == name_of(j)
            assert j != i
            assert weight == weights[i, j] > 0
            seen.add((i, j))
    # Everybody heard from all neighbours.
    edges = {(i, j) for i in range(N) for j in range(N) if weights[i, j] > 0 and i != j}
    assert seen == edges


@GOSSIP
def test_nothing_but_messages_numbers_and_names_leaves_a_node(algorithm):
    network = Network(algorithm, compressor="sign-top-k", compressor_k=0.1)
    network.go(3, evaluate=True)
    length = 4 * D if algorithm == "dpsgd" else SignTopK(0.1).num_bytes(D)
    kinds = {"train": 0, "evaluate": 0}
    for reply in network.grid.replies:
        kind, content = reply.metadata.message_type, reply.content
        assert sum(len(record) for record in content.array_records.values()) == 0
        if kind == "query":
            texts = {
                k: v for k, v in content["properties"].items() if isinstance(v, str)
            }
            assert set(texts) == {"client", "structure"}
            assert sum(map(len, texts.values())) < 30
            continue
        if kind not in kinds:
            continue
        kinds[kind] += 1
        expected = {"train": {"message": length}, "evaluate": {"sketch": 4 * 256}}
        data = content.config_records["bytes"]
        assert {k: len(v) for k, v in data.items()} == expected[kind]
        (metrics,) = content.metric_records.values()
        assert all(isinstance(v, (int, float)) for v in metrics.values())
        allowed = {"arrays", "metrics", "bytes"}
        assert set(content) <= allowed
    assert kinds == {"train": 15, "evaluate": 15}


def sizes(value: object, depth: int = 0) -> list[int]:
    """Lengths of all arrays and bytes that an object holds."""
    if isinstance(value, np.ndarray):
        return [value.size]
    if isinstance(value, (bytes, Array)):
        return [len(value if isinstance(value, bytes) else value.data)]
    if isinstance(value, dict):
        return [s for v in value.values() for s in sizes(v, depth)]
    if isinstance(value, (list, tuple, set)):
        return [s for v in value for s in sizes(v, depth)]
    if hasattr(value, "__dict__") and depth < 4:
        return sizes(vars(value), depth + 1)
    return []


@pytest.mark.parametrize("algorithm", ["choco-sgd", "squarm-sgd"])
def test_the_server_never_holds_a_model(algorithm):
    network = Network(algorithm, compressor="sign", consensus_step=0.3)
    length = create("sign").num_bytes(D)
    for _ in range(3):
        network.go(evaluate=True)
        # 1024: the sketches of the last evaluation.
        assert set(sizes(network.strategy)) <= {length, N * N, 1024}
        arrays, _ = network.strategy.state_dict()
        assert {value.size for value in arrays.values()} == {length}
        assert len(network.arrays) == 0


# What a neighbour may send


def replaced(data: object) -> Callable:
    def change(i: int, server_round: int, reply: Message) -> Message:
        if i == 1 and server_round in (3, 4):
            record = reply.content.config_records["bytes"]
            new = data(record["message"]) if callable(data) else data
            record["message"] = new
        return reply

    return change


def without(*names: str) -> Callable:
    def change(i: int, server_round: int, reply: Message) -> Message:
        if i == 1 and server_round in (3, 4):
            for name in names:
                if name == "message":
                    del reply.content.config_records["bytes"]["message"]
                else:
                    del reply.content[name]
        return reply

    return change


def refused_metric(value: object) -> Callable:
    def change(i: int, server_round: int, reply: Message) -> Message:
        if i == 1 and server_round in (3, 4):
            if value is None:
                del reply.content["metrics"]["refused"]
            else:
                reply.content["metrics"]["refused"] = value
        return reply

    return change


COMPRESSORS = ("identity", "top-k", "rand-k", "qsgd-top-k", "sign", "sign-top-k")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (replaced(lambda d: d + b"\0"), r"has a message of \d+ bytes, not"),
        (replaced(lambda d: d[:-1]), r"has a message of \d+ bytes, not"),
        (replaced(lambda d: d[:1]), r"has a message of 1 bytes, not"),
        (replaced(lambda d: d * 1000), r"has a message of [\d,]+ bytes, not"),
        (replaced("text"), "has no message to the neighbours"),
        (replaced(""), "has no message to the neighbours"),
        (replaced(3), "has no message to the neighbours"),
        (replaced(lambda d: [d]), "has no message to the neighbours"),
        (replaced([]), "has no message to the neighbours"),
        (without("message"), "has no message to the neighbours"),
        (without("bytes"), "has no message to the neighbours"),
        (without("metrics"), "has 0 metric records, not 1"),
        (without("arrays"), "has no arrays under 'arrays'"),
        (refused_metric(None), "lacks the metric 'refused'"),
        (refused_metric(float("nan")), "metric 'refused' is nan"),
        (refused_metric(float("inf")), "metric 'refused' is inf"),
    ],
)
def test_replies_that_do_not_count(change, reason):
    network = Network("choco-sgd", compressor="sign", consensus_step=0.3)
    network.grid.change = change
    for server_round in range(1, 7):
        network.go(evaluate=True)
        rejections = network.strategy.rejections
        if server_round in (3, 4):
            ((name, why),) = rejections
            assert name == name_of(1)
            assert re.match(reason, why)
        else:
            assert rejections == []
    assert [row["rejected"] for row in network.rows] == [0, 0, 1, 1, 0, 0]
    assert [row["sent"] for row in network.rows] == [5, 5, 4, 4, 5, 5]
    assert [row["refused"] for row in network.rows] == [0] * 6
    assert np.isfinite(network.models()).all()
    # Nothing of it was handed on: the sum of estimates is what the others' own are.
    nodes = network.nodes()
    for i, node in enumerate(nodes):
        known = sum(RING[i, j] * nodes[j].kept["estimate"] for j in range(N) if j != i)
        np.testing.assert_allclose(node.kept["neighbours"], known, rtol=0, atol=1e-6)


def test_arrays_that_nobody_asked_for_do_not_count():
    def change(i: int, server_round: int, reply: Message) -> Message:
        if i == 1:
            reply.content["arrays"]["head.weight"] = Array(
                np.zeros((10, 64), np.float32)
            )
        return reply

    network = Network("choco-sgd")
    network.grid.change = change
    network.go(2)
    assert [row["rejected"] for row in network.rows] == [1, 1]


NAN, MINUS, INF = (np.float32(v).tobytes() for v in (np.nan, -1.0, np.inf))
BAD = {
    "identity": [NAN + bytes(4 * D - 4), bytes(4 * D - 4) + INF],
    "sign": [lambda d: NAN + d[4:], lambda d: INF + d[4:], lambda d: MINUS + d[4:]],
    "sign-top-k": [
        # Indices that are not increasing, and a norm that is no number.
        lambda d: bytes(len(d)),
        lambda d: b"\xff" * len(d),
    ],
    "top-k": [lambda d: bytes(len(d)), lambda d: d[:-4] + NAN],
    "rand-k": [lambda d: d[:-4] + INF],
    "qsgd-top-k": [lambda d: bytes(len(d)), lambda d: b"\xff" * len(d)],
}


@pytest.mark.parametrize(
    ("algorithm", "compressor", "data"),
    [
        (algorithm, compressor, data)
        for compressor, all_data in BAD.items()
        for data in all_data
        for algorithm in ALGORITHMS
        # D-PSGD sends models as they are.
        if algorithm != "dpsgd" or compressor == "identity"
    ],
)
def test_messages_of_the_right_length_are_refused_by_the_neighbours(
    algorithm, compressor, data, caplog
):
    network = Network(
        algorithm, compressor=compressor, compressor_k=0.1, consensus_step=0.2
    )
    network.grid.change = replaced(data)
    with caplog.at_level(WARNING, "flwr"):
        network.go(7, evaluate=True)
    # Nodes 0 and 2 find two such messages, and say so a round later.
    assert [row["refused"] for row in network.rows] == [0, 0, 0, 2, 2, 0, 0]
    assert [row["rejected"] for row in network.rows] == [0] * 7
    assert f"message of neighbour {name_of(1)} refused" in caplog.text
    assert np.isfinite(network.models()).all()
    assert network.rows[-1]["evaluated"] == N
    losses = [row["train-loss"] for row in network.rows]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("compressor", COMPRESSORS)
@pytest.mark.parametrize("seed", range(3))
def test_random_bytes_do_not_stop_the_neighbours(compressor, seed):
    rng = np.random.default_rng(seed)
    network = Network(
        "squarm-sgd",
        compressor=compressor,
        compressor_k=0.1,
        consensus_step=0.2,
        local_steps=2,
    )
    network.grid.change = replaced(lambda d: rng.bytes(len(d)))
    network.go(7, evaluate=True)
    assert [row["clients"] for row in network.rows] == [N] * 7
    assert np.isfinite(network.models()).all()


@pytest.mark.parametrize("magnitude", [9e5, 1.1e6, 1e30, 3e38])
def test_finite_but_huge_numbers_do_not_stop_the_neighbours(magnitude):
    """Beyond any that training could need they are refused, and none can overflow."""
    network = Network("choco-sgd", compressor="sign", consensus_step=0.2)
    signs = b"\xff" * (D // 8) + bytes([0xFF << (-D % 8) & 0xFF])
    data = np.float32(magnitude).tobytes() + signs

    def change(i: int, server_round: int, reply: Message) -> Message:
        if i == 1 and server_round >= 3:
            reply.content["bytes"]["message"] = data
        return reply

    network.grid.change = change
    network.go(9, evaluate=True)
    assert [row["clients"] for row in network.rows] == [N] * 9
    assert [row["evaluated"] for row in network.rows] == [N] * 9
    refused = 2 if magnitude > 1e6 else 0
    assert [row["refused"] for row in network.rows] == [0] * 3 + [refused] * 6
    models = network.models()
    assert np.isfinite(models).all()
    if refused:
        assert np.abs(models).max() < 10


@pytest.mark.parametrize(
    "sketch",
    [b"", b"123", "text", np.full(256, np.nan, np.float32).tobytes(), bytes(8), None],
)
def test_a_bad_sketch_is_left_out(sketch):
    class Sketchy(Lines):
        def send_and_receive(self, messages, *, timeout=None):
            replies = super().send_and_receive(messages, timeout=timeout)
            for reply in replies:
                node = reply.metadata.src_node_id
                if reply.metadata.message_type == "evaluate" and node == 2:
                    if sketch is None:
                        del reply.content["bytes"]
                    else:
                        reply.content["bytes"]["sketch"] = sketch
            return replies

    network = Network("dpsgd")
    network.go(3)
    network.grid.__class__ = Sketchy
    network.go(1, evaluate=True)
    models = network.models()[[0, 2, 3, 4]]
    exact = np.square(models - models.mean(0)).sum(1).mean()
    assert network.rows[-1]["consensus-distance"] == pytest.approx(exact, rel=0.45)
    assert network.rows[-1]["evaluated"] == N


def test_clients_that_exchange_nothing_are_refused():
    settings = resolve({**FULL_BATCH, "algorithm": "fedavg"})
    with pytest.raises(SettingsError, match="no client tells the length of its mess"):
        ChocoSGD().initialize(InlineGrid(make_app(settings), N))


@pytest.mark.parametrize(
    "lie", [{"message-bytes": 7}, {"message-bytes": "abc"}, {"omega": 0.0}]
)
def test_one_lying_client_stops_nobody_else(lie, monkeypatch):
    told = GossipClient.get_properties

    def lies(self, config):
        return {**told(self, config), **(lie if self.index == 0 else {})}

    monkeypatch.setattr(GossipClient, "get_properties", lies)
    network = Network("choco-sgd", consensus_step=0.0)
    assert network.strategy._message_bytes != frozenset({7})
    assert 0 < network.strategy.consensus_step < 1


# What is counted


@pytest.mark.parametrize("per_tensor", [False, True])
@pytest.mark.parametrize("compressor", [*COMPRESSORS, "qsgd"])
def test_bits_are_those_of_the_messages(compressor, per_tensor):
    network = Network(
        "choco-sgd",
        compressor=compressor,
        compressor_k=0.05,
        compressor_levels=40,
        per_tensor=per_tensor,
        consensus_step=0.1,
    )
    own = {"k": 0.05} if compressor.endswith("-k") else {}
    if compressor.startswith("qsgd"):
        own["levels"] = 40
    operator = create(compressor, **own)
    if per_tensor:
        operator = PerTensor(operator, (640, 10))
    network.grid.down = lambda i, r: i == 3 and r == 2
    network.go(3)
    assert [row["sent"] for row in network.rows] == [5, 4, 5]
    for row in network.rows:
        assert row["bits"] == 8 * operator.num_bytes(D) * row["sent"]
    for row, r in zip(network.rows, (1, 2, 3), strict=True):
        carried = sum(
            len(data)
            for m in network.messages("train", r)
            for data in m.content["config"].get("relayed-data", [])
        )
        assert row["bytes-down"] >= carried
        assert 8 * row["bytes-up"] >= row["bits"]


def test_dpsgd_sends_32_bits_an_entry():
    network = Network("dpsgd", compressor="sign")
    network.go(2)
    assert [row["bits"] for row in network.rows] == [32 * D * N] * 2
    assert 8 * Identity().num_bytes(D) == 32 * D


@pytest.mark.parametrize("trigger", ["1e30", "inf"])
def test_a_silent_round_costs_nothing(trigger):
    network = Network("squarm-sgd", local_steps=2, trigger=trigger)
    network.go(3, evaluate=True)
    for row in network.rows:
        assert (row["sent"], row["bits"]) == (0, 0)
        assert row["clients"] == N
        assert row["rejected"] == 0
    # Nothing is relayed; everybody has trained alone.
    assert not any(
        "relayed-data" in m.content["config"] for m in network.messages("train", 3)
    )
    plain = PlainSQuARM(
        data_of(network),
        network.initial(),
        RING,
        rate=lambda t: 0.1,
        step=1.0,
        compress=lambda x: x,
        local_steps=2,
        trigger=lambda t: 1e30,
    )
    for _ in range(3):
        plain.round()
    np.testing.assert_allclose(network.models(), plain.x, rtol=0, atol=1e-6)


def test_the_train_loss_is_that_of_the_batches():
    # Full batches, one step: the loss at the models before the step.
    network = Network("dpsgd")
    network.go(2)
    models, data = network.models(), data_of(network)
    network.go(1)
    total = 0.0
    for x, (inputs, targets) in zip(models, data, strict=True):
        logits = inputs @ x[:-10].reshape(10, -1).T + x[-10:]
        log_sum = np.log(np.exp(logits).sum(1))
        total += (log_sum - logits[np.arange(len(targets)), targets]).sum()
    expected = total / sum(len(targets) for _, targets in data)
    assert network.rows[-1]["train-loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("seed", range(6))
@GOSSIP
def test_the_estimated_consensus_distance(algorithm, seed):
    """The standard error is at most 9 %: five of them are 45 %.

    The sketch's signs and places are fixed, so this is one draw a seed; a correct
    estimate fails less than once in 10^4 times (Gaussian: once in 10^6).
    """
    network = Network(
        algorithm, seed=seed, compressor="top-k", compressor_k=0.3, consensus_step=0.2
    )
    network.go(4)
    network.go(1, evaluate=True)
    models = network.models().astype(float)
    exact = np.square(models - models.mean(0)).sum(1).mean()
    assert exact > 1e-3
    assert network.rows[-1]["consensus-distance"] == pytest.approx(exact, rel=0.45)


def test_no_distance_between_equal_models():
    network = Network("dpsgd", graph="complete", mixing="uniform")
    network.go(3, evaluate=True)
    # Sums in another order: rounding.
    assert all(row["consensus-distance"] < 1e-10 for row in network.rows)


def test_consensus_alone_contracts_at_the_rate_of_the_spectral_gap():
    # From iteration 3 on the learning rate is nothing. A sketch is linear, so the
    # estimate shrinks as the distance does: by (1 - delta)^2 a round, or more.
    schedule = "steps:0:3:1e15"
    dpsgd = Network("dpsgd", learning_rate_schedule=schedule)
    choco = Network(
        "choco-sgd",
        learning_rate_schedule=schedule,
        compressor="top-k",
        compressor_k=0.3,
        consensus_step=0.2,
    )
    dpsgd.go(12, evaluate=True)
    choco.go(40, evaluate=True)
    rate = (1 - spectrum(RING).delta) ** 2
    distances = [row["consensus-distance"] for row in dpsgd.rows]
    assert distances[2] > 1e-3
    for now, then in zip(distances[3:], distances[2:], strict=False):
        assert now <= rate * then * 1.001
    assert rate == pytest.approx(((1 + 2 * np.cos(2 * np.pi / 5)) / 3) ** 2)
    assert (
        choco.rows[-1]["consensus-distance"] < choco.rows[3]["consensus-distance"] / 20
    )


def test_256_nodes():
    for algorithm in ("dpsgd", "squarm-sgd"):
        network = Network(
            algorithm,
            num_clients=256,
            partition="iid",
            compressor="sign-top-k",
            compressor_k=10.0,
            consensus_step=0.1,
            local_steps=2,
        )
        network.go(1)
        network.go(1, evaluate=True)
        assert [row["sent"] for row in network.rows] == [256, 256]
        # With 359 test examples some nodes have none.
        assert network.rows[-1]["evaluated"] > 180
        (message,) = network.messages("train", 2, 100)
        assert relayed(message) == [(1, name_of(99)), (1, name_of(101))]


# The graph


def test_the_graph_is_laid_over_the_names_in_their_order(tmp_path):
    file = tmp_path / "edges.txt"
    file.write_text("0 1\n1 2\n1 3\n3 4\n")
    network = Network("choco-sgd", graph=str(file), consensus_step=0.5)
    # Whatever the nodes' ids.
    contexts = list(network.grid.contexts.values())
    network.grid.contexts = {i: contexts[i - 1] for i in (3, 5, 1, 4, 2)}
    network.go(2)
    (message,) = network.messages("train", 2, 1)
    assert relayed(message) == [(1, name_of(j)) for j in (0, 2, 3)]
    assert network.messages("train", 2)[0].content["config"]["neighbour-weight"] == 0.25


def test_the_consensus_step_of_the_theory():
    network = Network(
        "choco-sgd", consensus_step=0.0, compressor="top-k", compressor_k=0.1
    )
    network.go(1)
    # Theorem 2 on a ring of five: eigenvalues (1 + 2 cos(2 pi k / 5)) / 3.
    eigenvalues = [(1 + 2 * np.cos(2 * np.pi * k / 5)) / 3 for k in range(5)]
    delta = 1 - max(abs(e) for e in eigenvalues[1:])
    beta, omega = 1 - min(eigenvalues), 0.1
    gamma = (2 * delta * omega) / (
        64 * delta + delta**2 + 16 * beta**2 + 8 * delta * beta**2 - 16 * delta * omega
    )
    for message in network.messages("train", 1):
        assert message.content["config"]["consensus-step"] == pytest.approx(gamma)


@pytest.mark.parametrize(
    ("mixing", "weight"), [("metropolis", 1 / 3), ("uniform", 1 / 4)]
)
def test_mixing_weights_are_those_of_the_setting(mixing, weight, tmp_path):
    file = tmp_path / "tree.txt"
    file.write_text("0 1\n1 2\n1 3\n3 4\n")
    network = Network("choco-sgd", graph=str(file), mixing=mixing, consensus_step=0.5)
    network.go(2)
    # Node 4 is a leaf, and node 3 has degree 2; the largest degree is 3.
    config = network.messages("train", 2, 4)[0].content["config"]
    assert config["neighbour-weight"] == pytest.approx(weight)
    assert config["relayed-weights"] == [pytest.approx(weight)]


# Checkpoint and resume


class Leaky(InlineGrid):
    """Node 2 is away in rounds 4 to 6."""

    def send_and_receive(self, messages, *, timeout=None):
        there = [
            m
            for m in messages
            if m.metadata.dst_node_id != 3 or round_of(m) not in (4, 5, 6)
        ]
        return super().send_and_receive(there, timeout=timeout)


def rows_after(output, algorithm: str, rounds: int, resume: bool = False) -> list[dict]:
    config = (
        "model='logistic' consensus-step=0.3 compressor-k=0.2 trigger='300' "
        "batch-size=20 momentum=0.9 learning-rate=0.05 evaluate-every=1 "
        "local-steps=2 checkpoint-every=5"
    )
    if resume:
        config += f" resume='{output}'"
    arguments = [algorithm, "--backend", "inline", "--clients", str(N)]
    arguments += ["--rounds", str(rounds), "--output", str(output)]
    assert simulation.main([*arguments, "--run-config", config]) == 0
    lines = (output / algorithm / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@GOSSIP
def test_stop_with_a_backlog_and_resume(algorithm, tmp_path, monkeypatch):
    monkeypatch.setattr(simulation, "InlineGrid", Leaky)
    whole = rows_after(tmp_path / "a", algorithm, 9)
    assert [row["unanswered"] for row in whole] == [0, 0, 0, 1, 1, 1, 0, 0, 0]
    rows_after(tmp_path / "b", algorithm, 5)
    stopped = rows_after(tmp_path / "b", algorithm, 9, resume=True)
    # Rounds 6 to 8 are trained a second time, after a crash.
    add = Report.add

    def crash(report: Report, row: dict) -> None:
        if row["round"] == 8:
            raise KeyboardInterrupt
        add(report, row)

    with monkeypatch.context() as patched:
        patched.setattr(Report, "add", crash)
        with pytest.raises(KeyboardInterrupt):
            rows_after(tmp_path / "c", algorithm, 9)
    crashed = rows_after(tmp_path / "c", algorithm, 9, resume=True)
    for rows in (stopped, crashed):
        assert [row["round"] for row in rows] == list(range(1, 10))
        for row, other in zip(rows, whole, strict=True):
            assert row.keys() == other.keys()
            for name in row.keys() - {"seconds", "bytes-down", "bytes-evaluate"}:
                assert row[name] == pytest.approx(other[name], rel=0, abs=1e-12), name


def test_the_backlog_is_part_of_the_state():
    network = Network(
        "choco-sgd", compressor="sign", consensus_step=0.3, max_missed_rounds=4
    )
    network.grid.down = lambda i, r: (i == 2 and r >= 2) or (i == 0 and r >= 5)
    network.go(7)
    arrays, values = network.strategy.state_dict()
    other = build_strategy(network.settings)
    other.load_state_dict(arrays, json.loads(json.dumps(values)))
    assert other.pending == network.strategy.pending
    # Rounds 4 to 7 of two neighbours: for that of round 4 it has not answered.
    assert len(other.pending[name_of(0)]) == 8
    assert other.lost == network.strategy.lost == {name_of(2)}
    assert other.names == network.strategy.names
    np.testing.assert_array_equal(other.weights, network.strategy.weights)


# Batch statistics


def test_batch_statistics_stay_local_and_are_kept():
    network = Network(
        "squarm-sgd",
        model="resnet20",
        num_clients=5,
        batch_size=8,
        local_steps=2,
        compressor="sign-top-k",
        compressor_k=0.01,
        per_tensor=True,
        consensus_step=0.3,
        learning_rate=0.01,
        graph="complete",
        mixing="uniform",
    )
    network.go(1)
    network.go(1)

    def statistics(i: int) -> dict[str, np.ndarray]:
        records = network.grid.contexts[i + 1].state
        record = records[f"personal-{network.round}"]
        return {
            n: a.numpy() for n, a in record.items() if "running_" in n or "num_b" in n
        }

    first, second = statistics(0), statistics(1)
    assert len(first) == 19 * 3
    assert all(v == 4 for n, v in first.items() if n.endswith("num_batches_tracked"))
    means = [n for n in first if n.endswith("running_mean")]
    assert all(not np.array_equal(first[n], second[n]) for n in means)
    # Messages are as long as the parameters make them; exchanging moves no statistics.
    model = network.task.scratch_model
    shapes = tuple(p.numel() for p in model.parameters())
    length = PerTensor(SignTopK(0.01), shapes).num_bytes(sum(shapes))
    assert network.rows[-1]["bits"] == 8 * 5 * length
    network.node(0)
    for name, value in model.state_dict().items():
        if name in first:
            np.testing.assert_array_equal(value.numpy(), first[name])


# Bad settings


def run_config(text: str) -> tuple[str, str]:
    return ("--run-config", f"model='logistic' {text}")


BAD_SETTINGS = [
    ("graph='rign'", "unknown graph 'rign'; did you mean 'ring'?"),
    (
        "graph='nowhere.txt'",
        "unknown graph 'nowhere.txt'; known: complete, erdos-renyi",
    ),
    (
        "graph='erdos-renyi' edge-probability=0.0",
        "edge probability is 0.0; it must be in (0, 1]",
    ),
    (
        "graph='torus'",
        "the number of nodes of a torus is 5; it must be a product of two",
    ),
    ("mixing='max-degree'", "unknown mixing 'max-degree'; known: metropolis, uniform"),
    ("consensus-step=1.5", "consensus-step is 1.5; it must be in [0, 1]"),
    ("consensus-step=-0.1", "consensus-step is -0.1; it must be in [0, 1]"),
    ("consensus-step=nan", "consensus-step is nan; it must be in [0, 1]"),
    ("local-steps=0", "local-steps is 0; it must be at least 1"),
    ("local-steps=-3", "local-steps is -3; it must be at least 1"),
    ("local-steps=1.5", "local-steps is 1.5; it must be of type int"),
    (
        "compressor='topk'",
        "unknown compressor 'topk'; did you mean 'top-k'? known: identity",
    ),
    ("compressor-k=0.0", "compressor-k is 0.0; it must be in (0, 1) or a count"),
    ("compressor-k=1.5", "compressor-k is 1.5; it must be in (0, 1) or a count"),
    ("compressor-k=-2", "compressor-k is -2.0; it must be in (0, 1) or a count"),
    ("compressor-k=inf", "compressor-k is inf; it must be in (0, 1) or a count"),
    ("compressor-k=nan", "compressor-k is nan; it must be in (0, 1) or a count"),
    (
        "compressor='qsgd' compressor-levels=0",
        "levels is 0; it must be an int from 1 to 32767",
    ),
    (
        "compressor='qsgd' compressor-levels=2",
        "qsgd with levels=2 is no contraction on 650",
    ),
    (
        "trigger='often'",
        "trigger is 'often'; it must be START, START:INCREMENT:EVERY or",
    ),
    ("trigger='-1'", "trigger is '-1'; it must be START"),
    ("trigger='1:2'", "trigger is '1:2'; it must be START"),
    ("trigger='1:2:0'", "trigger is '1:2:0'; it must be START"),
    (
        "learning-rate-schedule='cosine'",
        "learning-rate-schedule is 'cosine'; it must be constant",
    ),
    ("learning-rate-schedule='inverse:0'", "learning-rate-schedule is 'inverse:0'"),
    ("max-missed-rounds=0", "max-missed-rounds is 0; it must be at least 1"),
]


def assert_refused(arguments: list[str], line: str, tmp_path, capfd) -> None:
    capfd.readouterr()
    arguments = [*arguments, "--backend", "inline", "--rounds", "1", "--clients", "5"]
    assert simulation.main([*arguments, "--output", "out"]) == 2
    out, err = capfd.readouterr()
    assert out.strip() == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert line in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "line"), BAD_SETTINGS, ids=[t for t, _ in BAD_SETTINGS]
)
def test_bad_settings(text, line, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert_refused(["squarm-sgd", *run_config(text)], line, tmp_path, capfd)


@pytest.mark.parametrize("text", ["graph='rign'", "graph='torus'", "local-steps=0"])
def test_nothing_is_run_before_a_bad_setting_of_the_second_algorithm(
    text, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    line = text.split("=")[1].strip("'").replace("torus", "a torus is 5")
    assert_refused(["fedavg", "squarm-sgd", *run_config(text)], line, tmp_path, capfd)


def test_one_node_is_no_graph(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    arguments = ["dpsgd", *run_config("partition='iid'"), "--backend", "inline"]
    assert simulation.main([*arguments, "--clients", "1", "--output", "out"]) == 2
    assert "the number of nodes is 1; it must be at least 2" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []
