"""Metrics of a model on a client's test examples."""

from math import isnan

import pytest
import torch
from torch import nn

from flwr_frl.clients.device.evaluation import evaluate_model, measure
from flwr_frl.common.run_cache import begin_run
from flwr_frl.task import ExampleSet, ExampleTask, SplitModel
from flwr_frl.task.metrics import METRICS


def model_of(head: torch.Tensor) -> SplitModel:
    """Return x ↦ head x."""
    linear = nn.Linear(*reversed(head.shape), bias=False)
    linear.weight.data = head.clone()
    return SplitModel(nn.Identity(), linear)


def evaluated(task: ExampleTask, client: int = 0):
    task.check(client)
    return evaluate_model(task, client, task.initial_model())


def test_custom_metrics_are_computed_on_all_test_examples_at_once():
    # 120 examples make three evaluation batches. The outputs are 0 to 119 and the
    # targets 0, so torch.median (the lower of the two middle values) is 59. Batches of
    # 50, 50 and 20 would have the medians 24, 74 and 109.
    sets = [ExampleSet(torch.arange(120.0)[:, None], torch.zeros(120, 1))]
    metrics = {
        "median": lambda outputs, targets: (outputs - targets).abs().median(),
        "nothing": lambda outputs, targets: float("nan"),
        "undefined": lambda outputs, targets: 1 / int(targets.sum()),
    }
    model = lambda: model_of(torch.ones(1, 1))  # noqa: E731
    task = ExampleTask(model, sets, sets, nn.functional.mse_loss, metrics=metrics)
    # Mean of the squares of 0 to 119: 119 · 120 · 239 / 6 / 120. Metrics without a
    # value are omitted.
    loss = pytest.approx(119 * 239 / 6)
    assert evaluated(task) == (loss, 120, {"median": 59.0})


def separation(outputs, targets):
    """Return the distance of the classes' means; undefined unless both are present."""
    if len(targets.unique()) < 2:
        raise RuntimeError("only one class")
    return outputs[targets == 1].mean() - outputs[targets == 0].mean()


ONE_CLASS = ExampleSet(torch.ones(4, 2), torch.zeros(4, dtype=torch.long))
BOTH = ExampleSet(torch.eye(2), torch.tensor([0, 1]))


@pytest.mark.parametrize("order", [[ONE_CLASS, BOTH], [BOTH, ONE_CLASS]])
def test_a_metric_that_is_undefined_for_one_class_has_no_value(order, caplog):
    begin_run()
    model = lambda: model_of(torch.eye(2))  # noqa: E731
    task = ExampleTask(model, order, order, metrics={"metric": separation})
    for client, examples in enumerate(order):
        for _ in range(2):
            metrics = evaluated(task, client)[2]
            assert ("metric" in metrics) == (examples is BOTH)
    assert len([m for m in caplog.messages if "metric 'metric' has no value" in m]) == 1


def test_training_targets_may_be_probabilities():
    soft = ExampleSet(torch.eye(2), torch.tensor([[0.9, 0.1], [0.2, 0.8]]))
    task = ExampleTask(lambda: model_of(torch.eye(2)), [soft], [BOTH])
    # Neural collapse needs training targets that are classes.
    assert evaluated(task)[2] == {"accuracy": 1.0}


@pytest.mark.parametrize("scale", [0.0, 1e20])
def test_accuracy_is_reported_for_zero_and_overflowing_heads(scale):
    # A head of zeros, and one whose Gram matrix overflows float32
    sets = [ExampleSet(torch.ones(4, 2), torch.tensor([0, 1, 0, 0]))]
    head = scale * torch.tensor([[2.0, 1.0], [1.0, 1.0]])
    task = ExampleTask(lambda: model_of(head), sets, sets, classes=("a", "b"))
    # For a head of zeros, NC2 is the norm of its target, which is 1 with all classes.
    nc2 = {} if scale else {"global-nc2": 1.0, "local-nc2": 1.0}
    assert evaluated(task)[2] == pytest.approx({"accuracy": 0.75, **nc2})


def test_a_client_whose_targets_are_all_ignored_has_no_score():
    targets = torch.full((4,), -100)
    assert isnan(METRICS["macro-f1"](torch.ones(4, 3), targets))
    assert isnan(METRICS["balanced-accuracy"](torch.ones(4, 3), targets))


def test_a_single_class_has_accuracy_1():
    sets = [ExampleSet(torch.randn(5, 2), torch.zeros(5, dtype=torch.long))]
    model = lambda: model_of(torch.ones(1, 2))  # noqa: E731
    task = ExampleTask(model, sets, sets, classes=("a",))
    assert measure(task, model(), sets[0])[1]["accuracy"] == 1.0
