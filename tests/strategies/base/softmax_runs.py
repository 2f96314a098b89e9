"""Runs of softmax regression, and its gradient in NumPy.

A model is a matrix θ = [W | b]. A batch holds all of a client's examples, so that
shuffling does not matter and an epoch is one step. Clients differ in their number of
examples and in the distribution of their labels given the inputs.
"""

from collections.abc import Collection
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from torch import nn

from flwr_frl.clients.algorithms import client_setup, complete
from flwr_frl.clients.base import Client
from flwr_frl.clients.client_app import make_app
from flwr_frl.clients.device.setup import build_client
from flwr_frl.common.settings import resolve
from flwr_frl.strategies import build_strategy
from flwr_frl.strategies.base import Strategy
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.grids.speeds import SimulatedArrivals, SpeedModel
from flwr_frl.strategies.server.loop import run_rounds
from flwr_frl.task import ExampleSet, ExampleTask, SplitModel

N, DIMENSION, CLASSES = 6, 4, 3
RATE, STEPS = 0.3, 3
FULL_BATCH = {
    "task": "softmax_runs:softmax",
    "num-clients": N,
    "fraction-train": 0.5,
    "batch-size": 100,
    "representation-epochs": STEPS,
    "learning-rate": RATE,
    "momentum": 0.0,
    "weight-decay": 0.0,
    "initial-nodes": 1,
    "rounds-per-stage": "2",
}
Matrix = np.ndarray
Arrays = dict[str, np.ndarray]


# Tasks


def draw(i: int, test: bool = False) -> tuple[Matrix, np.ndarray]:
    rng = np.random.default_rng([i, test])
    x = rng.standard_normal((20 if test else 6 + 3 * i, DIMENSION))
    common, specific = (
        np.random.default_rng(s).standard_normal((4, 3)) for s in (99, i)
    )
    noise = rng.standard_normal((len(x), CLASSES))
    return x, np.argmax(x @ (common + specific) + noise, axis=1)


def example_sets(test: bool) -> list[ExampleSet]:
    drawn = (draw(i, test) for i in range(N))
    return [ExampleSet(torch.from_numpy(x).float(), torch.tensor(y)) for x, y in drawn]


def linear() -> SplitModel:
    return SplitModel(nn.Identity(), nn.Linear(DIMENSION, CLASSES))


def normed_layers() -> SplitModel:
    layers = nn.Sequential(nn.Linear(DIMENSION, 5), nn.BatchNorm1d(5), nn.ReLU())
    return SplitModel(layers, nn.Linear(5, CLASSES))


def task_of(model, **more) -> ExampleTask:
    return ExampleTask(model, example_sets(False), example_sets(True), **more)


def softmax(num_clients: int) -> ExampleTask:
    """Softmax regression, whose gradient is `gradient`."""
    return task_of(linear, classes=("a", "b", "c"))


def normed(num_clients: int) -> ExampleTask:
    """A model with a batch norm."""
    return task_of(normed_layers)


def scaled_linear() -> SplitModel:
    return SplitModel(nn.BatchNorm1d(DIMENSION), nn.Linear(DIMENSION, CLASSES))


def scaled(num_clients: int) -> ExampleTask:
    """Softmax regression on the outputs of a batch norm."""
    return task_of(scaled_linear)


def doubles(num_clients: int) -> ExampleTask:
    """Like `softmax`, but in float64."""
    sets = [
        [ExampleSet(s.inputs.double(), s.targets) for s in example_sets(test)]
        for test in (False, True)
    ]
    return ExampleTask(lambda: linear().double(), *sets)


# NumPy reference


def gradient(theta: Matrix, i: int, decay: float = 0.0) -> Matrix:
    """Return ∇f_i(θ) of the mean cross-entropy, with decay of the weights only."""
    only_weights = [1.0] * DIMENSION + [0.0]
    return slope(scores_of(theta, i), i) + decay * theta * only_weights


def scores_of(theta: Matrix, i: int) -> Matrix:
    """Return the scores of client i's training examples, of shape (n, CLASSES)."""
    x, _ = draw(i)
    return np.column_stack([x, np.ones(len(x))]) @ theta.T


def shares_of(scores: Matrix) -> Matrix:
    """Return the softmax of each row."""
    return np.exp(scores) / np.exp(scores).sum(1, keepdims=True)


def slope(scores: Matrix, i: int, extra: Matrix | float = 0.0) -> Matrix:
    """Return the gradient in θ of client i's mean cross-entropy at the given scores.

    ``extra`` is the gradient of another loss of each example in the scores.
    """
    x, y = draw(i)
    by_score = shares_of(scores) - np.eye(CLASSES)[y] + extra
    return by_score.T @ np.column_stack([x, np.ones(len(x))]) / len(y)


def loss_of(theta: Matrix, i: int, test: bool = True) -> float:
    """Return the mean cross-entropy on the test or the training examples."""
    x, y = draw(i, test)
    scores = np.column_stack([x, np.ones(len(x))]) @ theta.T
    return float(np.mean(np.log(np.exp(scores).sum(1)) - scores[np.arange(len(y)), y]))


def weights(clients: list[int], weighting: str) -> np.ndarray:
    """Return the weights of a mean over clients, which sum to 1."""
    counts = [6.0 + 3 * i if weighting == "examples" else 1.0 for i in clients]
    return np.array(counts) / sum(counts)


def mean(matrices: list[Matrix], shares: np.ndarray) -> Matrix:
    return np.tensordot(shares, np.array(matrices), axes=1)


def matrix(arrays: Arrays, prefix: str = "") -> Matrix:
    """Return θ from named arrays."""
    weight, bias = (arrays[f"{prefix}head.{name}"] for name in ("weight", "bias"))
    return np.column_stack([weight, bias]).astype(float)


def start() -> Matrix:
    state = softmax(N).initial_state
    return matrix({name: value.numpy() for name, value in state.items()})


# Runs


class WatchedGrid(InlineGrid):
    """A grid that records messages, corrupts replies and restarts clients.

    Parameters
    ----------
    spoilt : collection of (int, int)
        Pairs of a client, from 0, and a round in which its reply contains NaN.
    late : collection of int
        Clients that connect only from round 3 on.
    lost : collection of (int, int)
        Pairs of a client and a round before whose training it loses its state.
    """

    def __init__(
        self,
        app,
        spoilt: Collection[tuple[int, int]] = (),
        late: Collection[int] = (),
        lost: Collection[tuple[int, int]] = (),
    ) -> None:
        super().__init__(app, N)
        self.spoilt, self.late, self.lost = spoilt, late, lost
        self.sent: list[Message] = []
        self.replies: list[Message] = []

    def get_node_ids(self):
        early = all(round_of(message) < 2 for message in self.sent)
        return [n for n in self.contexts if not (early and n - 1 in self.late)]

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        self.sent += messages
        for message in messages:
            node = message.metadata.dst_node_id
            if (node - 1, round_of(message)) in self.lost:
                self.contexts[node].state = RecordDict()
        replies = list(super().send_and_receive(messages))
        assert not [reply.error for reply in replies if reply.has_error()]
        self.replies += replies
        for message, reply in zip(messages, replies, strict=True):
            trains = message.metadata.message_type == MessageType.TRAIN
            i = message.metadata.dst_node_id - 1
            if trains and (i, round_of(message)) in self.spoilt:
                record = reply.content["arrays"]
                name, array = next(iter(record.items()))
                record[name] = Array(np.full_like(array.numpy(), np.nan))
        return replies


def round_of(message: Message) -> int:
    """Return the round of a message; 0 for a query."""
    config = message.content.config_records.get("config", {})
    return int(config.get("server-round", 0))


@dataclass
class Run:
    """The history of a run; each list has one entry a round.

    Parameters
    ----------
    trained : list of list of int
        Clients whose replies counted.
    arrays : list of dict
        Shared arrays after the round.
    kept : list of list of dict
        Each client's personal arrays after the round.
    metrics : list of dict
        Each client's latest test metrics, by name.
    rows : list of dict
        The round's metrics.
    """

    grid: WatchedGrid
    strategy: Strategy
    settings: dict
    trained: list[list[int]] = field(default_factory=list)
    arrays: list[Arrays] = field(default_factory=list)
    kept: list[list[Arrays]] = field(default_factory=list)
    metrics: list[list[dict]] = field(default_factory=list)
    rows: list[dict] = field(default_factory=list)

    def client(self, i: int, server_round: int, trains: bool = False) -> Client:
        """Return a client as the next message would set it up."""
        about = ConfigRecord({"server-round": server_round + 1})
        config = ConfigRecord({**about, **self.strategy._config(i + 1, about)})
        context = copy(self.grid.contexts[i + 1])
        context.state = RecordDict(dict(context.state))
        setup = client_setup(context, self.settings)
        return build_client(context, setup, config, trains)

    def add(self, server_round: int, arrays: ArrayRecord, row: dict) -> None:
        self.rows.append(row)
        self.arrays.append({name: array.numpy() for name, array in arrays.items()})
        counted = self.strategy._run.clients.acknowledged
        now = [int(n) for n in sorted(counted) if counted[n] == server_round]
        self.trained.append(now)
        clients = [self.client(i, server_round) for i in range(N)]
        self.kept.append([client._state.load() or {} for client in clients])
        tested = self.strategy._run.evaluation.metrics
        self.metrics.append([tested.get(f"{i:06d}", {}) for i in range(N)])

    def __getitem__(self, setting: str) -> Any:
        """Return the value of a setting; ``_`` stands for ``-``."""
        return self.settings[setting.replace("_", "-")]

    def mean(self, matrices: list[Matrix], clients: list[int]) -> Matrix:
        """Return the mean over these clients, weighted as in the run."""
        return mean(matrices, weights(clients, self["weighting"]))

    def descend(self, theta: Matrix, i: int, steps: int = STEPS, pull=0.0, anchor=0.0):
        """Return θ after steps of client i on f_i(θ) + pull/2 ‖θ − anchor‖²."""
        velocity = 0.0
        for _ in range(steps):
            slope = gradient(theta, i, self["weight_decay"]) + pull * (theta - anchor)
            velocity = self["momentum"] * velocity + slope
            theta = theta - RATE * velocity
        return theta

    def between(self, kind: str) -> list[tuple[Message, Message]]:
        """Return the messages of a type, with their replies."""
        pairs = zip(self.grid.sent, self.grid.replies, strict=True)
        return [(m, r) for m, r in pairs if m.metadata.message_type == kind]


def run(
    algorithm: str,
    rounds: int = 4,
    *,
    spoilt: Collection[tuple[int, int]] = (),
    late: Collection[int] = (),
    lost: Collection[tuple[int, int]] = (),
    evaluate: bool | Collection[int] = False,
    srpfl: bool = False,
    watched: bool = True,
    **more,
) -> Run:
    """Run a strategy with the ClientApp of the package; ``more`` are settings.

    ``evaluate`` has the rounds to evaluate, or is True for all and False for none.
    Unless ``watched``, only the last round is recorded.
    """
    named = {name.replace("_", "-"): value for name, value in more.items()}
    algorithms = {"algorithm": "srpfl" if srpfl else algorithm, "srpfl-base": algorithm}
    settings = complete(resolve({**FULL_BATCH, **algorithms, **named}))
    strategy = build_strategy(settings)
    inner = WatchedGrid(make_app(settings), spoilt, late, lost)
    speeds = SpeedModel("fixed", N, communication_time=1.0)
    grid = SimulatedArrivals(inner, speeds, lambda n: n - 1) if srpfl else inner
    result = Run(inner, strategy, settings)
    run_rounds(
        strategy,
        strategy._adapt_grid(grid),
        strategy.initialize(grid),
        range(1, rounds + 1),
        evaluated=lambda r: evaluate if isinstance(evaluate, bool) else r in evaluate,
        after_round=lambda r, *made: (
            result.add(r, *made) if watched or r == rounds else 0
        ),
    )
    return result


def assert_near(found: Matrix, expected: Matrix, within: float = 1e-5) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=within)


def assert_same(found: Arrays, expected: Arrays) -> None:
    """Assert that named arrays are bit-identical."""
    assert list(found) == list(expected)
    for name, value in found.items():
        assert value.dtype == expected[name].dtype
        assert value.tobytes() == expected[name].tobytes(), name
