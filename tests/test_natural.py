"""Measures of the benchmark on natural clients."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from sklearn.metrics import roc_auc_score

from benchmarks.natural_page import compare, sign_test, worst_decile
from benchmarks.natural_tasks import auroc


def test_auroc_equals_that_of_scikit_learn():
    rng = np.random.default_rng(3)
    # Rounded scores have ties.
    outputs = torch.from_numpy(rng.standard_normal((60, 2)).round(1))
    targets = torch.from_numpy(rng.integers(0, 2, 60))
    score = (outputs[:, 1] - outputs[:, 0]).numpy()
    assert len(np.unique(score)) < len(score)
    expected = roc_auc_score(targets.numpy(), score)
    assert float(auroc(outputs, targets)) == pytest.approx(expected, abs=1e-6)


def test_auroc_of_a_single_class_is_undefined():
    assert math.isnan(auroc(torch.rand(3, 2), torch.ones(3)))


@pytest.mark.parametrize(("better", "worse"), [(0, 1), (4, 26), (15, 15), (29, 1)])
def test_sign_test_equals_that_of_scipy(better: int, worse: int):
    expected = binomtest(better, better + worse).pvalue
    assert sign_test(better, worse) == pytest.approx(expected)


def test_clients_are_compared_by_their_means_over_seeds():
    # Means of a, b and c: 0.5, 0.7 and 0.2, and in the other runs 0.4, 0.7 and 0.3.
    one = [{"a": 0.4, "b": 0.8, "c": 0.1}, {"a": 0.6, "b": 0.6, "c": 0.3}]
    other = [{"a": 0.5, "b": 0.7, "c": 0.2}, {"a": 0.3, "b": 0.7, "c": 0.4}]
    assert compare(one, other, sign=1) == (1, 1)
    # A client that has no measure in some run is left out.
    assert compare([one[0], {"a": 0.6}], other, sign=1) == (1, 0)
    assert compare(one, other, sign=-1) == (1, 1)


def test_worst_decile_is_the_mean_of_the_worst_tenth():
    clients = {f"{i}": float(i) for i in range(20)}
    assert worst_decile(clients, sign=1) == 0.5
    assert worst_decile(clients, sign=-1) == 18.5
    assert worst_decile({"a": 3.0, "b": 1.0}, sign=1) == 1.0
