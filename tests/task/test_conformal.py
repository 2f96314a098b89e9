"""Conformal prediction sets and calibration errors, against numbers worked by hand."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import code_of
from torch import nn

from flwr_frl.clients.device.evaluation import evaluate_model
from flwr_frl.task import ExampleSet, ExampleTask, SplitModel
from flwr_frl.task.conformal import Conformal, class_scores
from flwr_frl.task.held_out import EvaluationSettings, with_evaluation
from flwr_frl.task.metrics import brier_score, ece

# Probabilities of three classes for four test examples, and the targets
SHARES = [[0.7, 0.2, 0.1], [0.4, 0.35, 0.25], [0.05, 0.05, 0.9], [0.1, 0.6, 0.3]]
TARGETS = [0, 2, 2, 1]


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
    # ceil(9 · 0.9) = 9 of 8 scores, and any number of none
    assert Conformal(0.9).threshold(of_targets(*[0.5] * 8)) == math.inf
    # 100 · 0.55 is 55.000000000000007 in floating point.
    many = of_targets(*(k / 100 for k in range(1, 100)))
    assert Conformal(0.55).threshold(many) == pytest.approx(0.55)


def test_scores_of_both_kinds():
    shares = torch.tensor([[0.2, 0.5, 0.3], [0.1, 0.1, 0.8]])
    lac, aps = (class_scores(shares, kind) for kind in ("lac", "aps"))
    expected = torch.tensor([[0.8, 0.5, 0.7], [0.9, 0.9, 0.2]])
    torch.testing.assert_close(lac, expected)
    # Sums from the largest on; the first of two equal classes comes first.
    expected = torch.tensor([[1.0, 0.5, 0.8], [0.9, 1.0, 0.8]])
    torch.testing.assert_close(aps, expected)


def test_metrics_of_classes():
    # Scores 0.62, 0.61, 0.1; ceil(4 · 0.7) = 3: classes with p >= 0.38 are in a set:
    # {0}, {0}, {2} and {1}; the second target, 2, is not in its set.
    validation = of_targets(0.38, 0.39, 0.9)
    expected = {"coverage": 3 / 4, "set-size": 1.0}
    # Σ (p - y)²: 0.09 + 0.04 + 0.01, 0.16 + 0.1225 + 0.5625, 2 · 0.0025 + 0.01, 0.26
    expected["brier-score"] = (0.14 + 0.845 + 0.015 + 0.26) / 4
    # Each example is alone in its bin, so the error is the mean of |1 - p|, and of p
    # for the wrong prediction.
    expected["ece"] = (0.3 + 0.4 + 0.1 + 0.4) / 4
    test = pair(SHARES, TARGETS)
    assert Conformal(0.7).metrics(validation, test) == pytest.approx(expected)
    # `aps`: the scores of the targets are 1, 1 and 0.9, so that all classes are in.
    all_classes = {"coverage": 1.0, "set-size": 3.0}
    found = Conformal(0.7, "aps").metrics(validation, test)
    assert found == pytest.approx({**expected, **all_classes})
    # With one validation example, too
    few = Conformal(0.7).metrics(of_targets(0.9), test)
    assert few == pytest.approx({**expected, **all_classes})
    ignored = torch.full((4,), -100)
    assert Conformal(0.7).metrics(validation, (test[0], ignored)) == {}


def test_positions_of_sequences_are_examples():
    validation, (outputs, targets) = of_targets(0.38, 0.39, 0.9), pair(SHARES, TARGETS)
    # Two sequences of two positions; classes come second.
    positions = outputs.reshape(2, 2, 3).movedim(2, 1), targets.reshape(2, 2)
    conformal = Conformal(0.7)
    expected = conformal.metrics(validation, (outputs, targets))
    assert conformal.metrics(validation, positions) == pytest.approx(expected)


def test_intervals_of_numbers():
    # Residuals 1, 2, 3, 10, of which ceil(5 · 0.6) = 3 are in the interval
    zeros = torch.zeros(4, 1)
    validation = torch.tensor([[1.0], [-2.0], [3.0], [10.0]]), zeros
    test = torch.tensor([[0.0], [-3.0], [3.5], [2.0]]), zeros
    found = Conformal(0.6).metrics(validation, test, unit=10.0)
    assert found == pytest.approx({"coverage": 3 / 4, "interval-width": 60.0})
    # Of several numbers, the largest residual counts.
    two = torch.tensor([[1.0, -5.0], [2.0, 0.0]]), torch.zeros(2, 2)
    assert Conformal(0.3).threshold(two) == 2.0
    assert Conformal(0.6).threshold(two) == 5.0


@given(
    st.lists(st.integers(0, 20).map(float), min_size=1, max_size=30),
    st.floats(0.01, 0.99),
)
def test_coverage_of_exchangeable_examples(residuals, coverage):
    # Each example is the test example once: the mean over all orders of the examples.
    values = torch.tensor(residuals)[:, None]
    covered = []
    for i, value in enumerate(values):
        rest = torch.cat([values[:i], values[i + 1 :]])
        threshold = Conformal(coverage).threshold((rest, torch.zeros_like(rest)))
        covered.append(value.item() <= threshold)
    assert np.mean(covered) >= coverage - 1e-9


@given(st.integers(0, 10**6))
def test_calibration_errors_equal_numpy(seed):
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.ones(4) / 2, 50).clip(1e-6)
    shares /= shares.sum(1, keepdims=True)
    targets = rng.integers(0, 4, 50)
    brier = np.mean(((shares - np.eye(4)[targets]) ** 2).sum(1))
    confidence, correct = shares.max(1), shares.argmax(1) == targets
    error, edges = 0.0, np.linspace(0, 1, 16)
    for low, high in itertools.pairwise(edges):
        inside = (confidence > low) & (confidence <= high)
        if inside.any():
            gap = abs(correct[inside].mean() - confidence[inside].mean())
            error += inside.mean() * gap
    both = pair(shares, targets)
    assert brier_score(*both) == pytest.approx(brier, abs=1e-6)
    assert ece(*both) == pytest.approx(error, abs=1e-6)


def task_of(targets, **more) -> ExampleTask:
    """Return a task of 20 equal examples, with the test examples of the same kind."""

    def model() -> SplitModel:
        head = nn.Linear(1, more.pop("width", 2), bias=False)
        head.weight.data = torch.arange(float(head.out_features))[:, None]
        return SplitModel(nn.Identity(), head)

    sets = [ExampleSet(torch.ones(20, 1), targets)]
    return ExampleTask(model, sets, sets, **more)


def test_a_client_reports_sets_by_its_validation_examples():
    settings = EvaluationSettings(
        validation_fraction=0.5, coverage=0.5, metrics="ece,brier-score"
    )
    task = task_of(torch.ones(20, dtype=torch.long), classes=("a", "b"))
    task = with_evaluation(task, settings)
    task.check(0)
    metrics = evaluate_model(task, 0, task.initial_model())[2]
    # All targets have p = e / (1 + e), the threshold, and the other class has less.
    assert (metrics["coverage"], metrics["set-size"]) == (1.0, 1.0)
    p = math.e / (1 + math.e)
    assert metrics["ece"] == pytest.approx(1 - p)
    assert metrics["brier-score"] == pytest.approx(2 * (1 - p) ** 2)
    assert metrics["validation-accuracy"] == 1.0


def test_an_unbounded_interval_has_no_width():
    mse = nn.functional.mse_loss
    settings = EvaluationSettings(validation_fraction=0.1, coverage=0.9)
    task = with_evaluation(task_of(torch.zeros(20, 2), loss=mse), settings)
    task.check(0)
    metrics = evaluate_model(task, 0, task.initial_model())[2]
    assert metrics["coverage"] == 1.0
    assert "interval-width" not in metrics


def test_coverage_needs_validation_examples_and_comparable_targets():
    half = {"validation_fraction": 0.5, "coverage": 0.9}
    assert code_of(EvaluationSettings, coverage=0.9) == "coverage"
    wrong = {**half, "evaluate_on": "validation"}
    assert code_of(EvaluationSettings, **wrong) == "coverage"

    def loss(outputs, targets):
        return (outputs - targets[:, :1]).square().mean()

    task = with_evaluation(task_of(torch.ones(20, 3), loss=loss), EvaluationSettings())
    task.check(0)
    task = with_evaluation(task, EvaluationSettings(**half))
    assert code_of(task.check, 0) == "coverage"
