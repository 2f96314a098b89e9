"""Algorithms 2 and 3 by hand, and batched; costs and constraints."""

import math

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from benchmarks.multi_task import directed
from flwr_frl.common.compression import QSGD, Identity, RandK, Sign, TopK
from flwr_frl.task.saddle_point import (
    Noise,
    Proximity,
    SaddlePoint,
    State,
    nearest,
    theory_constant,
    theory_regularizer,
)
from flwr_frl.task.tasks.multi_task import QCQP, LogisticRegression, build_problem

EDGES = np.array([(0, 1), (0, 3), (1, 2), (1, 3), (1, 4), (3, 4)])
PAIRS = directed(EDGES)
OPERATORS = [Identity(), TopK(1), Sign(), TopK(3, Sign())]
DRAWING = [QSGD(15), RandK(3), TopK(4, QSGD(15, scaled=True))]


def two_nodes(**settings):
    """Return costs x^2 + b x and 2 x^2 + b x with (x_1 - x_2)^2 - 1 <= 0."""
    a = np.array([1.0, 2.0])[:, None, None]
    problem = QCQP((0, 1), a, np.zeros(2), np.ones(2))
    pairs = directed(np.array([(0, 1)]))
    constraint = Proximity(pairs, np.array([-1.0, -1.0]))
    return SaddlePoint(problem, constraint, step=0.1, regularizer=10, **settings)


def column(*entries):
    return np.array(entries, float)[:, None]


def test_points_nearest_to_a_simplex_and_a_box():
    points = np.array([[0.2, 0.3, 0.1], [5, 0, -1], [-3, -4, -3.5], [1, 1, 0.4]])
    # The shift theta of max(0, x - theta) by hand, for a sum of 1.
    thetas = np.array([-0.4 / 3, 4, -3.75, 0.5])
    expected = np.maximum(points - thetas[:, None], 0)
    assert_allclose(nearest(points, "simplex", 1.0), expected, atol=1e-12)
    assert_allclose(nearest(points, "box", 2.0), np.clip(points, -2, 2))


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
    saddle = two_nodes(radius=1, zeta=zeta)
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


# The network in arrays


@pytest.mark.parametrize("kind", [QCQP, LogisticRegression])
def test_bandit_feedback_estimates_the_gradient(kind):
    # For one sample, the estimate (f(x + ζu) - f(x - ζu)) u d / 2ζ is nearly d u uᵀ ∇f,
    # whose mean over an orthonormal basis of directions u is the gradient.
    problem, rng = kind.create([0], 1), np.random.default_rng(0)
    sample, x = problem.draw(0, rng, 1), rng.standard_normal((1, 10))
    pair = Proximity(np.array([(0, 1)]), np.zeros(1))
    saddle = SaddlePoint(problem, pair, zeta=1e-4)
    basis = np.linalg.qr(rng.standard_normal((10, 10))).Q
    estimates = [saddle._cost_gradient(x, sample, u[None]) for u in basis]
    exact = problem.gradient(x, sample)
    assert_allclose(np.mean(estimates, axis=0), exact, rtol=1e-6, atol=1e-6)


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
        assert_allclose(lengths, 1)
    # An entry of u uᵀ - I / d deviates by less than 2 / d.
    assert_allclose(u.T @ u / n, np.eye(d) / d, atol=5 * 2 / d / np.sqrt(n))
    if direction == "bernoulli":
        assert_allclose(np.abs(u), 1 / np.sqrt(d))


# Costs


@pytest.mark.parametrize("kind", [QCQP, LogisticRegression])
def test_expected_costs_are_the_mean_over_samples(kind):
    # 200,000 samples; a normal mean deviates by 6 standard errors twice in 1e9.
    problem, rng = kind.create([3], 1), np.random.default_rng(0)
    samples = problem.draw(0, rng, 200_000)
    x = rng.standard_normal((1, 10))
    if kind is QCQP:
        values = QCQP((0,), problem.a, *np.zeros((2, 1))).value(x, samples)
    else:
        values = problem.value(x, samples)
    error = values.std() / math.sqrt(len(values))
    assert abs(values.mean() - problem.expected(x)[0]) < 6 * error


def test_true_models_minimize_the_loss_and_are_close():
    problem = LogisticRegression.create(range(6), 0)
    here, rng = problem.expected(problem.models), np.random.default_rng(0)
    for length in (1e-3, 0.1, 3, 20):
        moves = rng.standard_normal((6, 10))
        moves *= length / np.linalg.norm(moves, axis=1, keepdims=True)
        assert (problem.expected(problem.models + moves) > here).all()
    apart = problem.models[:, None] - problem.models
    assert np.linalg.norm(apart, axis=-1).max() <= 1


def test_offsets_are_equal_at_both_ends_of_an_edge():
    _, constraint = build_problem("qcqp", range(5), PAIRS, 4)
    _, reverse = build_problem("qcqp", range(5), PAIRS[:, ::-1], 4)
    assert_array_equal(constraint.offsets, reverse.offsets)
    assert ((constraint.offsets >= -5) & (constraint.offsets <= -3)).all()
    assert len(set(constraint.offsets)) == len(EDGES)


@pytest.mark.parametrize(("bandit", "factor"), [(False, 64), (True, 256)])
def test_the_regularizer_of_the_theorems_by_hand(bandit, factor):
    # (1 + m) G^2 / omega^2 = 4 * 4 / 0.25 = 64.
    c = theory_constant(3, 2.0, 0.5, bandit)
    assert c == factor * 64
    assert theory_regularizer(c**-0.5, c) == pytest.approx(c / 4)
    # The square root is that of 1 - 3 / 4.
    eta = (0.75 / c) ** 0.5
    delta = theory_regularizer(eta, c)
    assert delta == pytest.approx(0.5 / (4 * eta**2))
    # This makes the coefficient of the dual variables' norm 0 (equation B.6).
    coefficient = factor / 16 * 64 + delta**2 * eta**2 - delta / 2
    assert coefficient == pytest.approx(0, abs=1e-8)
