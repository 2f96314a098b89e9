"""Calibration errors, against numbers worked by hand and against NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flwr_frl.task.metrics import brier_score, ece


def pair(shares, targets):
    """Return outputs with these probabilities, and the targets."""
    return torch.tensor(shares).log(), torch.tensor(targets)


def test_calibration_errors_of_four_examples():
    shares = [[0.7, 0.2, 0.1], [0.4, 0.35, 0.25], [0.05, 0.05, 0.9], [0.1, 0.6, 0.3]]
    outputs, targets = both = pair(shares, [0, 2, 2, 1])
    # Σ (p - y)²: 0.09 + 0.04 + 0.01, 0.16 + 0.1225 + 0.5625, 2 · 0.0025 + 0.01, 0.26
    brier = pytest.approx((0.14 + 0.845 + 0.015 + 0.26) / 4)
    # Each example is alone in its bin; the second prediction is wrong.
    error = pytest.approx((0.3 + 0.4 + 0.1 + 0.4) / 4)
    assert (brier_score(*both), ece(*both)) == (brier, error)
    # The same as two sequences of two positions, whose classes come second
    sequences = outputs.reshape(2, 2, 3).movedim(2, 1), targets.reshape(2, 2)
    assert (brier_score(*sequences), ece(*sequences)) == (brier, error)
    # Without targets that count, both are undefined.
    ignored = outputs, targets - 100
    assert np.isnan([brier_score(*ignored), ece(*ignored)]).all()


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
