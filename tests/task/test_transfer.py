"""Representation transfer: hand-computed cases, definitions and moments of the data."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flwr_frl.task.tasks.linear import TransferTask
from flwr_frl.task.transfer import (
    basis,
    phase_one,
    phase_two,
    phase_two_descent,
    unit_columns,
)

SEEDS = st.integers(0, 2**32 - 1)


def gaussian(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


# The basis


def test_the_basis_by_hand():
    # (1, 0, 0), (2, 0, 0) and (1, 1, 0) span the first two axes.
    first, second = np.array([[1.0, 2], [0, 0], [0, 0]]), np.array([[1.0], [1], [0]])
    v = basis([first, second])
    assert v.shape == (3, 2)
    np.testing.assert_allclose(v @ v.T, np.diag([1.0, 1, 0]), atol=1e-12)


@given(SEEDS, st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(0, 4))
def test_the_basis_is_orthonormal_and_spans_the_columns(seed, widths, extra):
    rng = np.random.default_rng(seed)
    d = sum(widths) + extra
    representations = [rng.standard_normal((d, k)) for k in widths]
    stacked = np.concatenate(representations, axis=1)
    assume(np.linalg.cond(stacked) < 1e6)
    v = basis(representations, 1e-8)
    assert v.shape == (d, sum(widths))
    np.testing.assert_allclose(v.T @ v, np.eye(sum(widths)), atol=1e-9)
    np.testing.assert_allclose(v @ (v.T @ stacked), stacked, atol=1e-9)


# The phases


def test_the_phases_by_hand():
    # V = e1. First half: x = (1, 5), (2, 7), features 1 and 2, y = (1, 5):
    # w = (1*1 + 2*5) / 5 = 2.2, θ1 = (2.2, 0).
    v = np.array([[1.0], [0.0]])
    first = phase_one(v, np.array([[1.0, 5.0], [2.0, 7.0]]), np.array([1.0, 5.0]))
    np.testing.assert_allclose(first, [2.2, 0.0])
    # Second half: x = (3, 4), y = 16.6; x·θ1 = 6.6, so 10 is missing:
    # θ2 = θ1 + 10 (3, 4) / 25 = (3.4, 1.6).
    x, y = np.array([[3.0, 4.0]]), np.array([16.6])
    np.testing.assert_allclose(phase_two(first, x, y), [3.4, 1.6])
    # With one row, the gradient step of size 1/σ² = 1/25 is exact.
    one_step = phase_two_descent(first, x, y, max_steps=1)
    np.testing.assert_allclose(one_step, [3.4, 1.6])


@given(SEEDS, st.integers(1, 5), st.integers(0, 6))
def test_phase_two_is_the_interpolator_nearest_to_the_start(seed, n, extra):
    d = n + extra
    theta, x, y = gaussian(seed, d), gaussian(seed + 1, n, d), gaussian(seed + 2, n)
    assume(np.linalg.cond(x) < 1e4)
    result = phase_two(theta, x, y)
    np.testing.assert_allclose(x @ result, y, atol=1e-7)
    # Normal equations of the projection: θ + Xᵀ (X Xᵀ)⁻¹ (y - X θ)
    expected = theta + x.T @ np.linalg.solve(x @ x.T, y - x @ theta)
    np.testing.assert_allclose(result, expected, atol=1e-6)
    # Every other interpolator is farther away.
    null = np.linalg.svd(x)[2][n:]
    other = result + null.T @ gaussian(seed + 3, extra)
    near, far = np.linalg.norm(result - theta), np.linalg.norm(other - theta)
    assert near <= far + 1e-9


@given(SEEDS, st.integers(1, 9), st.integers(1, 9))
def test_descent_ends_at_the_closed_form(seed, n, d):
    theta, x, y = gaussian(seed, d), gaussian(seed + 1, n, d), gaussian(seed + 2, n)
    # The error shrinks by (1 - 1/κ²)^steps; 20² ln(1e12) = 11,000 steps are enough.
    assume(np.linalg.cond(x) < 20)
    result = phase_two_descent(theta, x, y)
    np.testing.assert_allclose(result, phase_two(theta, x, y), atol=1e-8)


# The data


def test_sources_lie_in_the_span_and_targets_nearly():
    data = TransferTask(dimension=40, rank=3, num_sources=4, ratio_db=30.0)
    v = np.linalg.qr(data.span).Q
    for client in range(4):
        theta = data.model(client)
        np.testing.assert_allclose(v @ (v.T @ theta), theta, atol=1e-9)
    models = [data.model(client) for client in range(4, 304)]
    outside = [theta - v @ (v.T @ theta) for theta in models]
    # v ~ N(0, 1e-3 I) has 37 dimensions outside of the span. The standard error of the
    # mean of 11,100 squares is sqrt(2 / 11,100) = 1.3 %.
    assert np.sum(np.square(outside)) / (300 * 37) == pytest.approx(1e-3, rel=0.06)


def test_eigenvalues_and_noise():
    sizes = {"dimension": 4, "rank": 1, "num_sources": 1}
    data = TransferTask(**sizes, tau=2.0, noise_variance=0.25)
    expected = [np.exp(-j / 2) + 1e-4 for j in (1, 2, 3, 4)]
    np.testing.assert_allclose(data.eigenvalues, expected)
    for client, variances in ((0, np.ones(4)), (1, np.array(expected))):
        x, y = data.draw(client, samples=20_000)
        # Standard errors: 1 % of a variance, sqrt(1/20,000) of a correlation.
        np.testing.assert_allclose(x.var(axis=0), variances, rtol=0.06)
        assert np.abs(np.corrcoef(x.T) - np.eye(4)).max() < 0.04
        noise = y - x @ data.model(client)
        assert noise.var() == pytest.approx(0.25, rel=0.06)


def test_draws_are_distinct_and_reproducible():
    data = TransferTask(seed=3)
    draws = [data.draw(c, r, 5)[0] for c in (0, 1, 10, 11) for r in (0, 1)]
    for i, a in enumerate(draws):
        assert sum(np.array_equal(a / a[0, 0], b / b[0, 0]) for b in draws) == 1, i
    again = TransferTask(seed=3).draw(11, 1, 5)[0]
    assert np.array_equal(again, draws[-1])
    assert not np.array_equal(TransferTask(seed=4).draw(11, 1, 5)[0], draws[-1])
    assert not np.array_equal(data.model(10), data.model(11))


# The task


def test_the_task_s_examples():
    task = TransferTask(dimension=5, rank=2, num_sources=1)
    assert task.scratch_model is task.scratch_model
    assert [len(task.train_examples(c)) for c in (0, 1)] == [100, 8]
    examples, (x, y) = task.train_examples(1), task.draw(1)
    np.testing.assert_allclose(examples.inputs.numpy(), x, rtol=1e-6)
    np.testing.assert_allclose(examples.targets.numpy(), y[:, None], rtol=1e-6)
    held_out = task.test_examples(1)
    assert len(held_out) == 500
    seen = {tuple(row) for row in examples.inputs.tolist()}
    assert not seen & {tuple(row) for row in held_out.inputs.tolist()}


def test_unit_columns_ignore_the_scale_of_a_source():
    rng = np.random.default_rng(0)
    sources = [rng.standard_normal((8, 1)) for _ in range(3)]
    sources[1] *= 1.7e307
    sources.append(np.zeros((8, 2)))
    columns = [unit_columns(b) for b in sources]
    assert [c.shape[1] for c in columns] == [1, 1, 1, 0]
    for column in columns[:3]:
        np.testing.assert_allclose(np.linalg.norm(column, axis=0), 1)
    assert basis(columns, 0.01).shape == (8, 3)
