"""Tests of a model on a client's own examples: a task's own metrics."""

import pytest
import torch
from torch import nn

from clients.device.testing import evaluate_model
from task import ExampleSet, ExampleTask, SplitModel


def test_own_metrics_are_of_all_test_examples_at_once():
    # 120 examples are three batches of evaluation. Outputs are 0, 1, ... 119 and the
    # targets 0: torch's median, the lower of the two in the middle, is 59. Over batches
    # of 50, 50 and 20 the mean would be weighted 24, 74 and 109.
    inputs = torch.arange(120.0)[:, None]
    sets = [ExampleSet(inputs, torch.zeros(120, 1))]

    def median(outputs, targets):
        return (outputs - targets).abs().median()

    def identity() -> SplitModel:
        model = SplitModel(nn.Identity(), nn.Linear(1, 1))
        nn.init.ones_(model.head.weight)
        nn.init.zeros_(model.head.bias)
        return model

    own = {"median": median, "nothing": lambda outputs, targets: float("nan")}
    task = ExampleTask(identity, sets, sets, nn.functional.mse_loss, metrics=own)
    loss, n, metrics = evaluate_model(task, 0, task.initial_model())
    # Of 0² to 119²: 119 · 120 · 239 / 6 / 120.
    assert loss == pytest.approx(119 * 239 / 6)
    assert n == 120
    # What has no value here is left out.
    assert metrics == {"median": 59.0}


def test_integers_that_are_no_classes_have_no_accuracy():
    examples = [ExampleSet(torch.ones(4, 2), torch.tensor([0, 3, 1, 2]))]

    def poisson(outputs, targets):
        return nn.functional.poisson_nll_loss(outputs[:, 0], targets)

    task = ExampleTask(
        lambda: SplitModel(nn.Identity(), nn.Linear(2, 1)), examples, examples, poisson
    )
    task.check(0)
    assert evaluate_model(task, 0, task.initial_model())[2] == {}
