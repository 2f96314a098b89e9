"""Conformal prediction sets and calibration errors, against numbers worked by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flwr_frl.task.conformal import Conformal
from flwr_frl.task.metrics import brier_score, ece


def pair(shares, targets):
    """Return outputs with these probabilities, and the targets."""
    return torch.tensor(shares).log(), torch.tensor(targets)


def of_targets(*shares):
    """Return examples of two classes whose targets have these probabilities."""
    return pair([[share, 1 - share] for share in shares], [0] * len(shares))


def test_the_threshold_is_an_order_statistic():
    nine = of_targets(*(k / 10 for k in range(1, 10)))
    # Scores 0.1 to 0.9; ceil(10 · 0.9) = 9, ceil(10 · 0.75) = 8, ceil(10 · 0.05) = 1
    for coverage, score in ((0.9, 0.9), (0.75, 0.8), (0.05, 0.1)):
        assert Conformal(coverage).threshold(nine) == pytest.approx(score)
    # ceil(9 · 0.9) = 9 of 8 scores
    assert Conformal(0.9).threshold(of_targets(*[0.5] * 8)) == math.inf
    # 100 · 0.55 is 55.000000000000007 in floating point.
    many = of_targets(*(k / 100 for k in range(1, 100)))
    assert Conformal(0.55).threshold(many) == pytest.approx(0.55)


def test_metrics_of_classes():
    shares = [[0.7, 0.2, 0.1], [0.4, 0.35, 0.25], [0.05, 0.05, 0.9], [0.1, 0.6, 0.3]]
    outputs, targets = test = pair(shares, [0, 2, 2, 1])
    # Scores 0.62, 0.61, 0.1; ceil(4 · 0.7) = 3: classes with p >= 0.38 are in a set:
    # {0}, {0}, {2} and {1}; the second target, 2, is not in its set.
    validation = of_targets(0.38, 0.39, 0.9)
    expected = {"coverage": 3 / 4, "set-size": 1.0}
    # Σ (p - y)²: 0.09 + 0.04 + 0.01, 0.16 + 0.1225 + 0.5625, 2 · 0.0025 + 0.01, 0.26
    expected["brier-score"] = (0.14 + 0.845 + 0.015 + 0.26) / 4
    # Each example is alone in its bin; the second prediction is wrong.
    expected["ece"] = (0.3 + 0.4 + 0.1 + 0.4) / 4
    conformal = Conformal(0.7)
    assert conformal.metrics(validation, test) == pytest.approx(expected)
    # The same as two sequences of two positions, whose classes come second
    sequences = outputs.reshape(2, 2, 3).movedim(2, 1), targets.reshape(2, 2)
    assert conformal.metrics(validation, sequences) == pytest.approx(expected)
    every = pytest.approx({**expected, "coverage": 1.0, "set-size": 3.0})
    assert conformal.metrics(of_targets(0.9), test) == every
    assert conformal.metrics(validation, (outputs, targets - 100)) == {}


def test_intervals_of_numbers():
    # Residuals 1, 2, 3, 10, of which ceil(5 · 0.6) = 3 are in the interval
    zeros = torch.zeros(4, 1)
    validation = torch.tensor([[1.0], [-2.0], [3.0], [10.0]]), zeros
    test = torch.tensor([[0.0], [-3.0], [3.5], [2.0]]), zeros
    found = Conformal(0.6).metrics(validation, test, unit=10.0)
    assert found == pytest.approx({"coverage": 3 / 4, "interval-width": 60.0})
    flat = [(outputs[:, 0], targets[:, 0]) for outputs, targets in (validation, test)]
    assert Conformal(0.6).metrics(*flat, unit=10.0) == found
    # The score of a target of several numbers is its largest residual.
    two = torch.tensor([[1.0, -5.0], [2.0, 0.0]]), torch.zeros(2, 2)
    assert Conformal(0.3).threshold(two) == 2.0
    assert Conformal(0.6).threshold(two) == 5.0


@given(
    st.lists(st.integers(0, 20).map(float), min_size=1, max_size=30),
    st.floats(0.01, 0.99),
)
def test_coverage_of_exchangeable_examples(residuals, coverage):
    # Each example is the test example once: the mean over all orders of the examples.
    values, covered = torch.tensor(residuals)[:, None], []
    for i, value in enumerate(values):
        rest = torch.cat([values[:i], values[i + 1 :]])
        threshold = Conformal(coverage).threshold((rest, torch.zeros_like(rest)))
        covered.append(value.item() <= threshold)
    assert np.mean(covered) >= coverage - 1e-9


@given(st.integers(0, 10**6))
def test_calibration_errors_equal_numpy(seed):
    rng = np.random.default_rng(seed)
    shares, targets = rng.dirichlet(np.ones(4), 50) + 1e-6, rng.integers(0, 4, 50)
    shares /= shares.sum(1, keepdims=True)
    brier = np.mean(((shares - np.eye(4)[targets]) ** 2).sum(1))
    confidence, correct = shares.max(1), shares.argmax(1) == targets
    bins = np.digitize(confidence, np.linspace(0, 1, 16), right=True)
    inside = [bins == each for each in np.unique(bins)]
    gaps = [abs(correct[i].mean() - confidence[i].mean()) * i.mean() for i in inside]
    both = pair(shares, targets)
    assert brier_score(*both) == pytest.approx(brier, abs=1e-6)
    assert ece(*both) == pytest.approx(sum(gaps), abs=1e-6)
