"""Saddle points with custom sets, other directions, and invalid arguments."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from refusals import code_of
from saddle_points import PAIRS, algorithm

from benchmarks.multi_task_network import DualMismatchError, Network, check_duals
from flwr_frl.task.compression.per_tensor import Identity, Sign, SignTopK, TopK
from flwr_frl.task.saddle_point.algorithm import SaddlePoint
from flwr_frl.task.saddle_point.noise import Noise
from flwr_frl.task.saddle_point.problems import QCQP, build_problem, directed

# Custom sets and constraints


def test_custom_set_and_pair_function():
    # The entries of neighbours should sum to about 1.
    def value(x_i, x_j):
        return ((x_i + x_j - 1) ** 2).sum(axis=1) - 0.01

    def gradient(x_i, x_j):
        return 2 * (x_i + x_j - 1)

    pair = SimpleNamespace(value=value, gradient=gradient)
    box = SimpleNamespace(project=lambda x: np.clip(x, 0, 2))
    # The box is shrunk around 1, the centre of a ball of radius 1.
    smaller = SimpleNamespace(project=lambda x: np.clip(x, 1e-3, 2 - 1e-3))
    box.shrunk = lambda zeta: smaller
    problem = QCQP.create(range(5), 0)
    problem = replace(problem, a=problem.a / 100)
    # On a path, x_i + x_j = 1 is feasible. The violation is up to 10 * 1e-2 lambda.
    pairs = directed([(0, 1), (1, 2), (2, 3), (3, 4)])
    saddle = SaddlePoint(problem, pair, pairs, box, 1e-2, 10, zeta=1e-3)
    network = Network(saddle, TopK(5))
    for _ in range(3000):
        network.iterate()
    x = network.state.average
    assert ((x > 0) & (x < 2)).all()
    bound = 0.1 * network.state.duals.max() + 0.02
    assert bound < 0.5
    assert value(x[pairs[:, 0]], x[pairs[:, 1]]).max() < bound
    # Without constraints, costs are smallest below 0, so every x would stay near 0.
    assert value(np.zeros((1, 10)), np.zeros((1, 10)))[0] == 9.99


# SignTopK(1) equals TopK(1), so it is not tested.
@pytest.mark.parametrize("operator", [Identity(), Sign(), TopK(1), SignTopK(3)])
def test_constraints_are_met_and_costs_decrease(operator):
    saddle = algorithm()
    network = Network(saddle, operator)
    x, problem, i, j = network.state.raw, saddle.problem, *PAIRS.T
    assert saddle.constraint.value(x[i], x[j]).max() > 5
    before = problem.expected(x).sum()
    for _ in range(2000):
        network.iterate()
    x = network.state.average
    assert saddle.constraint.value(x[i], x[j]).max() < 0.01
    assert problem.expected(x).sum() < 0 < before


# Dual variables of both ends


def test_check_duals_detects_a_difference():
    check_duals(PAIRS[:2], [0.5, 0], [0.5, 0])
    message = r"dual variable of edge \(0, 3\) is 0.5 at node 0 and 0.6 at node 3"
    with pytest.raises(DualMismatchError, match=message):
        check_duals(PAIRS[:2], [1, 0.5], [1, 0.6])
    with pytest.raises(DualMismatchError):
        check_duals(PAIRS[:1], [math.nan], [math.nan])


def test_asymmetric_constraints_and_lost_messages_are_detected():
    def value(x_i, x_j):
        return (x_i**2 - x_j).sum(axis=1)

    pair = SimpleNamespace(value=value, gradient=lambda x_i, x_j: 2 * x_i)
    network = Network(SaddlePoint(QCQP.create(range(5), 0), pair, PAIRS), Sign())
    with pytest.raises(DualMismatchError, match="is g symmetric"):
        network.iterate()
    network = Network(algorithm(), Sign())
    network.iterate()
    network.state.known[3] += 1e-3
    with pytest.raises(DualMismatchError):
        network.iterate()


# Invalid arguments


@pytest.mark.parametrize(
    ("change", "code"),
    [
        # The squared step times delta is above 1.
        ({"step": 0.11}, "settings"),
        ({"step": 0.0}, "settings"),
        ({"step": math.inf}, "settings"),
        ({"regularizer": 0}, "delta"),
        # Not smaller than the radius of the ball
        ({"zeta": 20.0}, "zeta"),
        ({"zeta": -1e-4}, "zeta"),
        ({"nodes": [0, 5]}, "nodes"),
        ({"nodes": [1, 0]}, "nodes"),
    ],
)
def test_invalid_arguments_are_rejected(change, code):
    assert code_of(algorithm, **change) == code


def test_edges_out_of_order_are_rejected():
    problem, constraint = build_problem("qcqp", range(5), PAIRS, 0)
    repeated = np.concatenate([PAIRS[:1], PAIRS])
    for wrong in (PAIRS[::-1], repeated, np.array([[0, 0], *PAIRS.tolist()])):
        assert code_of(SaddlePoint, problem, constraint, wrong) == "pairs"


@pytest.mark.parametrize("direction", ["sphere", "bernoulli", "gaussian"])
def test_perturbations_have_the_covariance_of_an_unbiased_gradient(direction):
    problem, _ = build_problem("qcqp", [0, 1], np.zeros((0, 2), np.int64), 3)
    noise = Noise(problem, 3, direction)
    u = np.concatenate([noise.at(i)[1] for i in range(1, 8001)])
    n, d = u.shape
    lengths = np.linalg.norm(u, axis=1)
    if direction == "gaussian":
        assert 0.1 < lengths.std() < 0.4
    else:
        np.testing.assert_allclose(lengths, 1)
    # An entry of u uᵀ - I / d deviates by less than 2 / d.
    np.testing.assert_allclose(u.T @ u / n, np.eye(d) / d, atol=5 * 2 / d / np.sqrt(n))
    if direction == "bernoulli":
        np.testing.assert_allclose(np.abs(u), 1 / np.sqrt(d))
