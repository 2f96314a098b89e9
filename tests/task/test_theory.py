"""Quantities of the theorems compared with hand-computed numbers and with NumPy."""

import math

import numpy as np
import pytest

from benchmarks.theory import (
    FedRepTheory,
    FLUTETheory,
    benign_index,
    effective_ranks,
    srpfl_target_error,
    subset_singular_values,
)

# Rows of norm √2. Each pair of rows of W_I / √2 is orthogonal or parallel.
HEADS = math.sqrt(2) * np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])


def test_extreme_singular_values_over_all_pairs():
    # Two parallel rows have σ = √2 and 0; two orthogonal rows have σ = 1 twice.
    smallest, largest = subset_singular_values(HEADS, 2)
    assert (smallest, largest) == pytest.approx((0.0, math.sqrt(2)), abs=1e-7)
    # All three rows: WᵀW / 3 is diag(4, 2) / 3.
    smallest, largest = subset_singular_values(HEADS, 3)
    assert (smallest**2, largest**2) == pytest.approx((2 / 3, 4 / 3))
    # One row has rank 1 and cannot span two dimensions.
    assert subset_singular_values(HEADS, 1)[0] == 0


def test_fedrep_theorem_1_by_hand():
    # σ̄² are 2/3 and 4/3, E_0 = 1 - 0.36.
    theory = FedRepTheory(HEADS, 3, 0.6)
    assert theory.e0 == pytest.approx(0.64)
    assert theory.step_size == pytest.approx(3 / 16)
    assert theory.srpfl_step_size == pytest.approx(3 / 32)
    # κ⁴ = 4, k = 2, d = 30: 2 · 4 · (8 log 3 + 4 · 30 / 3) / 0.64².
    expected = 2 * 4 * (8 * math.log(3) + 40) / 0.64**2
    assert theory.samples(30, constant=2.0) == pytest.approx(expected)
    # 1 - 3/16 · 0.64 · (2/3) / 2 = 0.96; four rounds give its square.
    assert theory.distance(4) == pytest.approx(0.96**2 * 0.6)
    assert theory.distance(2, step_size=0.0) == pytest.approx(0.6)
    # η = 3/32 gives a = η E_0 · (2/3) / 2.
    assert theory.contraction() == pytest.approx(0.02)
    # 3 · 1.5 · 8 · 4 / 0.64² · max(log 3, 30 / 3).
    expected = 3 * 1.5 * 8 * 4 / 0.64**2 * 10
    assert theory.srpfl_samples(30, 0.5, 3.0) == pytest.approx(expected)


def test_the_target_error_is_a_multiple_of_the_limit_of_the_last_stage():
    # Iterate the contraction (11) of the last stage, with N / n0 = 16, to its limit.
    a, distance = 0.19, 1.0
    for _ in range(500):
        distance = distance * math.sqrt(1 - a) + a / math.sqrt(16 * (1 - a))
    assert srpfl_target_error(64, 4, a, 1.5) == pytest.approx(1.5 * distance)


MODELS = np.array([[4.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 1.0]])


def test_flute_theorems_by_hand():
    theory = FLUTETheory(MODELS, 2)
    # Δ = 2 (2 - 1); η = 4 / (228 · 64); α = 1 / 30.
    assert theory.gap == pytest.approx(2.0)
    assert theory.step_size == pytest.approx(4 / (228 * 64))
    assert theory.initial_scale == pytest.approx(1 / 30)
    # 16 √2 / (√3 · 0.1 · 4) · (1 - 0.2 / 16)^10.
    expected = 16 * math.sqrt(2) / (math.sqrt(3) * 0.4) * 0.9875**10
    assert theory.error(10, 0.1) == pytest.approx(expected)
    assert theory.error(10, 0.1, constant=3.0) == pytest.approx(3 * expected)
    # The smallest number of rounds with an error of at most ε
    rounds = theory.rounds(0.01, 0.1)
    assert theory.error(rounds, 0.1) <= 0.01 < theory.error(rounds - 1, 0.1)
    assert theory.rounds(1e9) == 0
    # With k equal to the rank of Φ, λ_4 counts as 0.
    assert FLUTETheory(MODELS, 3).gap == pytest.approx(2.0)


def test_flute_first_rounds_by_hand():
    # U and V are identities up to signs, so Θ_k is the upper block of (B + Wᵀ) / √2:
    # 0.02 / √2 times the identity, σ² = 2e-4.
    b = np.array([[0.01, 0.0], [0.0, 0.01], [5.0, 5.0]])
    theory = FLUTETheory(MODELS, 2)
    # log(2 / 8e-4) / (2 log(1 + 0.05 (4 - 1))) = 27.99.
    expected = math.ceil(math.log(2 / 8e-4) / (2 * math.log(1.15)))
    assert expected == 28
    assert theory.first_rounds(b, b.T, 0.1) == expected


def test_effective_ranks_by_hand():
    values = np.array([1.0, 8.0, 2.0, 1.0])
    # r_0 = 12 / 8 and R_0 = 144 / 70; r_1 = 4 / 2 and R_1 = 16 / 6; r_2 = R_2 = 2.
    assert effective_ranks(values, 0) == pytest.approx((1.5, 144 / 70))
    assert effective_ranks(values, 1) == pytest.approx((2.0, 16 / 6))
    assert effective_ranks(values, 2) == pytest.approx((2.0, 2.0))
    assert [benign_index(values, n) for n in (1, 2, 3)] == [0, 1, None]
