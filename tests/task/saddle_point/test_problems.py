"""Costs, constraints and sets of multi-task problems, by hand and by statistics."""

import math

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from refusals import code_of
from saddle_points import EDGES, PAIRS

from flwr_frl.task.saddle_point.problems import (
    QCQP,
    LogisticRegression,
    Proximity,
    build_problem,
)
from flwr_frl.task.saddle_point.sets import Ball

# Costs


@pytest.mark.parametrize("kind", [QCQP, LogisticRegression])
def test_gradients_match_finite_differences(kind):
    problem, rng = kind.create(range(4), 1, 6), np.random.default_rng(0)
    x, h = rng.standard_normal((4, 6)), 1e-6
    samples = np.array([problem.draw(row, rng, 1)[0] for row in range(4)])
    slopes = [
        (problem.value(x + e, samples) - problem.value(x - e, samples)) / (2 * h)
        for e in h * np.eye(6)
    ]
    assert_allclose(problem.gradient(x, samples), np.transpose(slopes), atol=1e-7)


@pytest.mark.parametrize("kind", [QCQP, LogisticRegression])
def test_expected_costs_are_the_mean_over_samples(kind):
    # 200,000 samples; a normal mean deviates by 6 standard errors twice in 1e9.
    problem, rng = kind.create([3], 1, 6), np.random.default_rng(0)
    samples = problem.draw(0, rng, 200_000)
    x = rng.standard_normal((1, 6))
    if kind is QCQP:
        values = QCQP((0,), problem.a, *np.zeros((2, 1))).value(x, samples)
    else:
        values = problem.value(x, samples)
    error = values.std() / math.sqrt(len(values))
    assert abs(values.mean() - problem.expected(x)[0]) < 6 * error


def test_distributions_of_the_qcqp():
    # Means of many entries; a normal mean deviates by 6 standard errors twice in 1e9.
    many = QCQP.create(range(4000), 0, 3, freedom=5)
    # Wishart: E A = 5 I; variances 2 * 5 on the diagonal and 5 off it.
    diagonal = np.diagonal(many.a, axis1=1, axis2=2)
    assert abs(diagonal.mean() - 5) < 6 * math.sqrt(10 / diagonal.size)
    assert abs(many.a[:, 0, 1].mean()) < 6 * math.sqrt(5 / 4000)
    for uniform in (many.mean, many.variance):
        assert abs(uniform.mean() - 0.5) < 6 * math.sqrt(1 / 12 / 4000)
    b = many.draw(7, np.random.default_rng(0), 100_000)
    mean, variance, count = many.mean[7], many.variance[7], b.size
    assert abs(b.mean() - mean) < 6 * math.sqrt(variance / count)
    assert abs(b.var() / variance - 1) < 6 * math.sqrt(2 / count)


def test_true_models_minimize_the_loss_and_are_close():
    problem = LogisticRegression.create(range(6), 0)
    here, rng = problem.expected(problem.models), np.random.default_rng(0)
    for length in (1e-3, 0.1, 3, 20):
        moves = rng.standard_normal((6, 10))
        moves *= length / np.linalg.norm(moves, axis=1, keepdims=True)
        assert (problem.expected(problem.models + moves) > here).all()
    apart = problem.models[:, None] - problem.models
    assert np.linalg.norm(apart, axis=-1).max() <= 1
    # The loss is ln 2 at the origin, where every prediction is a coin toss.
    assert_allclose(problem.expected(np.zeros((6, 10))), math.log(2), atol=1e-12)
    # E log(1 + e^z) is about E max(z, 0) = r / sqrt(2 pi) for a large r = ||x||; the
    # difference is pi^2 / 12 times 2 density(0) / r.
    x = np.zeros((6, 10))
    x[:, 0] = np.where(problem.models[:, 0] > 0, -20, 20)
    far = problem.expected(x) - problem.expected(-x)
    both = problem.expected(x) + problem.expected(-x)
    exact = 2 * (20 + math.pi**2 / 120) / math.sqrt(2 * math.pi)
    assert_allclose(both, exact, atol=1e-3)
    assert (far > 0).all()
    good, bad = problem.accuracy(problem.models), problem.accuracy(-problem.models)
    assert_allclose(good + bad, 1)
    assert good.min() > 0.55


# Sets and constraints


def test_ball():
    ball = Ball(2)
    x = np.array([[3.0, 4.0], [0.6, 0.8], [0.0, 0.0]])
    assert_allclose(ball.project(x), [[1.2, 1.6], [0.6, 0.8], [0, 0]])
    assert_array_equal(ball.project(x)[1:], x[1:])
    assert ball.shrunk(0.5) == Ball(1.5)


def test_proximity_by_hand():
    constraint = Proximity(np.array([[0, 1], [0, 2]]), np.array([-1.0, -30.0]))
    x_i, x_j = np.array([[1.0, 2], [1, 2]]), np.array([[4.0, -2], [4, -2]])
    assert_array_equal(constraint.value(x_i, x_j), [24, -5])
    assert_array_equal(constraint.gradient(x_i, x_j), [[-6, 8], [-6, 8]])


def test_offsets_are_equal_at_both_ends_of_an_edge():
    offsets = Proximity.create(PAIRS, 4, -5, -3).offsets
    assert_array_equal(Proximity.create(PAIRS[:, ::-1], 4, -5, -3).offsets, offsets)
    assert ((offsets >= -5) & (offsets <= -3)).all()
    assert len(set(offsets)) == len(EDGES)


def test_invalid_arguments_are_rejected():
    assert code_of(Ball, 0) == code_of(Ball, math.nan) == "settings"
    assert code_of(build_problem, "qcqq", [0], PAIRS, 0) == "problem"
