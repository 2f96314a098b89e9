"""Algorithms 2 and 3: by hand, in NumPy, and batched compared with single nodes."""

import math

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from saddle_points import PAIRS, algorithm

from benchmarks.multi_task_network import Network, compress_rows
from flwr_frl.task.compression.per_tensor import (
    QSGD,
    Identity,
    QSGDTopK,
    RandK,
    Sign,
    SignTopK,
    TopK,
)
from flwr_frl.task.saddle_point.algorithm import (
    SaddlePoint,
    State,
    decode,
    exchange_stream,
)
from flwr_frl.task.saddle_point.noise import Noise, two_point_gradient
from flwr_frl.task.saddle_point.problems import (
    PROBLEMS,
    QCQP,
    LogisticRegression,
    Proximity,
    directed,
)
from flwr_frl.task.saddle_point.sets import Ball

FALSE_ALARM = 1e-9
OPERATORS = [None, Identity(), TopK(1), Sign(), SignTopK(3)]
DRAWING = [QSGD(15), RandK(3), QSGDTopK(4)]


def two_nodes(**settings):
    """Return costs x^2 + b x and 2 x^2 + b x with (x_1 - x_2)^2 - 1 <= 0."""
    a = np.array([1.0, 2.0])[:, None, None]
    problem = QCQP((0, 1), a, np.zeros(2), np.ones(2))
    pairs = directed([(0, 1)])
    constraint = Proximity(pairs, np.array([-1.0, -1.0]))
    return SaddlePoint(problem, constraint, pairs, step=0.1, regularizer=10, **settings)


def column(*entries):
    return np.array(entries, float)[:, None]


# Hand-computed iterations


def test_two_iterations_by_hand():
    saddle = two_nodes()
    start = column(1, -2)
    state = State(start, start, column(-2, 1), np.zeros(2), column(0, 0))
    # Gradients are 2 + 0.5 and -8 - 1, and duals are still 0. g = 3^2 - 1 = 8.
    saddle.iterate(state, column(0.5, -1), column(1, 1))
    assert_allclose(state.raw, column(0.75, -1.1))
    assert_allclose(state.duals, 0.1 * 8)
    assert_allclose(state.average, column(1, -2))
    # The exchange is exact. Gradients of costs are 1.5 and -4.4 + 1, those of g are
    # 2 * 1.85 and its negative: 0.75 - 0.15 - 2 * 0.1 * 0.8 * 3.7 and
    # -1.1 + 0.34 + 0.592. g = 1.85^2 - 1; the dual variable decays by
    # delta eta lambda = 10 * 0.1 * 0.8.
    state.copy, state.known = state.raw.copy(), state.raw[::-1].copy()
    saddle.iterate(state, column(0, 1), column(1, 1))
    assert_allclose(state.raw, column(0.008, -0.168))
    assert_allclose(state.duals, 0.8 + 0.1 * (2.4225 - 0.8))
    assert_allclose(state.average, column(0.875, -1.55))
    assert state.iteration == 2
    # Dual variables are never negative.
    zero = column(0, 0)
    near = State(zero, zero, zero, np.full(2, 0.05), zero.copy())
    saddle.iterate(near, zero, column(1, 1))
    assert_array_equal(near.duals, 0)


@pytest.mark.parametrize(
    # The ball has radius 1, reduced by 0.1 for bandit feedback. The copies 1.5 and -0.4
    # are projected to 1 (or 0.9) and -0.4.
    ("zeta", "point"),
    [(0.0, 1.0), (0.1, 0.9)],
)
def test_gradients_at_points_update_raw_parameters(zeta, point):
    saddle = two_nodes(feasible=Ball(1), zeta=zeta)
    raw, copy, known = column(0.9, -0.5), column(1.5, -0.4), column(-0.4, 1.5)
    state = State(raw, copy, known, np.full(2, 0.5), column(0.3, 0.3), 3)
    # In one dimension, with u = 1 or -1, two values of a quadratic give its derivative.
    saddle.iterate(state, column(0, 0), column(1, -1))
    apart = point + 0.4
    first = 0.9 - 0.1 * 2 * point - 2 * 0.1 * 0.5 * 2 * apart
    second = -0.5 - 0.1 * 4 * -0.4 + 2 * 0.1 * 0.5 * 2 * apart
    assert_allclose(state.raw, column(first, second))
    assert_allclose(state.duals, 0.5 + 0.1 * (apart**2 - 1 - 10 * 0.1 * 0.5))
    assert_allclose(state.average, column((point + 0.9) / 4, (-0.4 + 0.9) / 4))
    assert_array_equal(state.copy, copy)


# Comparison with NumPy


def plain(saddle, raw, seed, iterations, rounded):
    """Run algorithm 2 without compression, node by node."""
    problem, eta, delta = saddle.problem, saddle.step, saddle.regularizer
    noise = Noise(problem, seed)
    c = dict(zip(map(tuple, saddle.pairs), saddle.constraint.offsets, strict=True))
    lam = dict.fromkeys(c, 0.0)
    copy, average = np.zeros_like(raw), np.zeros_like(raw)

    def onto_ball(x):
        return x * min(1, saddle.feasible.radius / np.sqrt(x @ x))

    for t in range(1, iterations + 1):
        q = raw - copy
        copy = copy + (q.astype(np.float32) if rounded else q)
        x = [onto_ball(row) for row in copy]
        average += (np.array(x) - average) / t
        b, _ = noise.at(t)
        new = []
        for i, x_i in enumerate(x):
            slope = 2 * problem.a[i] @ x_i + b[i]
            slope += sum(4 * lam[e] * (x_i - x[e[1]]) for e in lam if e[0] == i)
            new.append(onto_ball(raw[i] - eta * slope))
        for i, j in lam:
            g = np.sum((x[i] - x[j]) ** 2) + c[i, j]
            lam[i, j] = max(0, lam[i, j] + eta * (g - delta * eta * lam[i, j]))
        raw = np.array(new)
    return raw, copy, average, lam


@pytest.mark.parametrize("operator", [Identity(), None])
def test_algorithm_2_without_compression_equals_numpy(operator):
    # A small ball and tight constraints make projections and dual variables matter.
    near = Proximity.create(PAIRS, 0, -0.1, -0.05)
    problem = QCQP.create(range(5), 0)
    saddle = SaddlePoint(problem, near, PAIRS, Ball(2.5), step=0.005)
    network = Network(saddle, operator, seed=3)
    start = network.state.raw.copy()
    for _ in range(100):
        network.iterate()
    raw, copy, average, lam = plain(saddle, start, 3, 100, rounded=operator is not None)
    assert_allclose(network.state.raw, raw, rtol=0, atol=1e-10)
    assert_allclose(network.state.copy, copy, rtol=0, atol=1e-10)
    assert_allclose(network.state.average, average, rtol=0, atol=1e-10)
    assert_allclose(network.state.duals, list(lam.values()), rtol=0, atol=1e-10)
    assert max(lam.values()) > 0.1
    assert np.abs(raw - start).max() > 0.5


# Single nodes


class Device:
    """A single node that exchanges only bytes."""

    def __init__(self, node, operator, seed, name, zeta):
        self.node, self.operator, self.seed = node, operator, seed
        self.algorithm = algorithm(name, [node], seed, zeta=zeta)
        self.neighbours = [int(j) for i, j in PAIRS if i == node]
        self.arrays = self.algorithm.start(seed).arrays()

    def send(self):
        state = State.from_arrays(self.arrays)
        stream = exchange_stream(self.seed, self.node, state.iteration + 1)
        message = self.algorithm.send(state, self.operator, stream)
        self.arrays = state.arrays()
        return message

    def iterate(self, messages):
        state = State.from_arrays(self.arrays)
        received = [messages[j] for j in self.neighbours]
        self.algorithm.receive(state, received, self.operator)
        noise = Noise(self.algorithm.problem, self.seed)
        self.algorithm.iterate(state, *noise.at(state.iteration + 1))
        self.arrays = state.arrays()


@pytest.mark.parametrize("operator", OPERATORS + DRAWING, ids=repr)
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("zeta", [0.0, 1e-4])
def test_network_equals_nodes_that_exchange_bytes(operator, name, zeta):
    network = Network(algorithm(name, seed=2, zeta=zeta), operator, seed=2)
    devices = [Device(i, operator, 2, name, zeta) for i in range(5)]
    sent = 0
    # More than one block of noise, which does not depend on the operator
    iterations = 70 if operator in DRAWING[:1] else 20
    for _ in range(iterations):
        network.iterate()
        messages = [device.send() for device in devices]
        sent += 8 * sum(map(len, messages))
        for device in devices:
            device.iterate(messages)
    for key, together in network.state.arrays().items():
        parts = [device.arrays[key] for device in devices]
        if key == "iteration":
            assert {int(part) for part in parts} == {iterations}
        else:
            assert_array_equal(np.concatenate(parts), together, strict=True)
    assert network.bits == sent
    # Senders and receivers hold the same copies.
    assert_array_equal(network.state.known, network.state.copy[PAIRS[:, 1]])


@pytest.mark.parametrize("operator", OPERATORS + DRAWING, ids=repr)
@pytest.mark.parametrize("d", [1, 2, 7, 10, 33, 200])
def test_compress_rows_equals_decoded_messages(operator, d):
    x = np.random.default_rng(d).standard_normal((100, d))
    x *= 10.0 ** np.arange(0, 200, 2)[:, None] ** 0.3
    x[0], x[1], x[2, ::2], x[3] = 0, 1, 0, -1
    x[4:8] = np.round(x[4:8] / 4)  # Ties
    x = x.astype(np.float32).astype(np.float64)
    streams = lambda row: np.random.default_rng([7, row])  # noqa: E731
    rows = compress_rows(operator, x, streams)
    saddle = two_nodes()
    for row, entries in enumerate(x):
        state = State(entries[None], np.zeros((1, d)), *[np.zeros((1, d))] * 3, 1)
        message = saddle.send(state, operator, streams(row))
        assert_array_equal(decode(operator, message, d), rows[row])
        assert_array_equal(state.copy[0], rows[row])


def test_the_first_exchange_is_not_compressed():
    network = Network(algorithm(), SignTopK(1))
    start = network.state.raw.copy()
    network.iterate()
    assert_array_equal(network.state.copy, start)
    assert network.bits == 5 * 8 * 40
    network.iterate()
    assert network.bits == 5 * 8 * (40 + 6)
    assert Network(algorithm(), None).bits == 0


@pytest.mark.parametrize("operator", [Sign(), None])
def test_malformed_messages_leave_the_state_unchanged(operator):
    saddle = algorithm(nodes=[2])
    state = saddle.start(0)
    state.iteration = 1
    bad = np.full(10, np.nan).tobytes()
    for messages in ([], [b"12"], [bad], [bytes(6)] * 2):
        with pytest.raises(ValueError, match=r"message|norm|entry"):
            saddle.receive(state, messages, operator)
    assert_array_equal(state.known, 0)


# Gradient estimates


@pytest.mark.parametrize("kind", [QCQP, LogisticRegression])
def test_the_two_point_gradient_is_unbiased(kind):
    """A correct estimate fails with a probability of at most FALSE_ALARM.

    An entry of d (g^T u) u lies in [-d ||g||, d ||g||] for a quadratic, so Hoeffding's
    inequality bounds the mean. The same holds for log-loss with ||y p||, the largest
    slope along u; its bias is of third order and below zeta^2 ||y p||^3.
    """
    d, nodes, draws, zeta = 3, 500, 800, 1e-3
    one, rng = kind.create([0], 1, d), np.random.default_rng(0)
    sample, x = one.draw(0, rng, 1), rng.standard_normal((1, d))
    exact = one.gradient(x, sample)[0]
    if kind is QCQP:
        repeats = (np.repeat(one.a, nodes, 0), np.zeros(nodes), np.ones(nodes))
        many, length = QCQP(tuple(range(nodes)), *repeats), np.linalg.norm(exact)
        bias = 0.0
    else:
        many = LogisticRegression(tuple(range(nodes)), np.zeros((nodes, d)), 0)
        length = np.linalg.norm(sample)
        bias = zeta**2 * length**3
    noise, total = Noise(many, 5), np.zeros(d)
    repeated = np.repeat(x, nodes, 0), np.repeat(sample, nodes, 0)
    for t in range(1, draws + 1):
        _, directions = noise.at(t)
        total += two_point_gradient(many, *repeated, directions, zeta).sum(axis=0)
    count = nodes * draws
    radius = 2 * d * length * math.sqrt(math.log(2 * d / FALSE_ALARM) / (2 * count))
    assert radius < 0.04 * length
    assert np.abs(total / count - exact).max() < radius + bias
