"""Targets that a custom loss ignores, and losses with the classes elsewhere."""

from functools import partial
from typing import Annotated

import pytest
import torch
from refusals import assert_says
from torch import nn
from torch.nn.functional import cross_entropy

from flwr_frl.clients.device.evaluation import class_mask, evaluate_model
from flwr_frl.common.settings import resolve, setting
from flwr_frl.task import ExampleSet, ExampleTask, SplitModel
from flwr_frl.task.tasks import build_task

LOSSES = {
    255: nn.CrossEntropyLoss(ignore_index=255),
    0: partial(cross_entropy, ignore_index=0),
    -1: nn.CrossEntropyLoss(ignore_index=-1),
    -100: cross_entropy,
}
CLASSES = 3


class Transposed(nn.Linear):
    """A linear layer from (n, T, features) to (n, classes, T)."""

    def forward(self, x):
        return super().forward(x).movedim(-1, 1)


def targets_of(ignored: int, *shape: int) -> torch.Tensor:
    """Return classes 1 and 2, and one ignored target in three."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(1, CLASSES, shape, generator=generator)
    targets[torch.rand(shape, generator=generator) < 1 / 3] = ignored
    return targets


def own_value(ignored, outputs, targets):
    """Return how many targets are the ignored one, as a metric."""
    return (targets == ignored).sum()


def partly(
    num_clients,
    *,
    ignored: Annotated[int, setting()] = -100,
    positions: Annotated[int, setting()] = 5,
):
    shape = (60, positions) if positions else (60,)
    inputs = torch.randn(*shape, 4, generator=torch.Generator().manual_seed(1))
    sets = [ExampleSet(inputs, targets_of(ignored, *shape))]
    head = Transposed if positions else nn.Linear
    return ExampleTask(
        lambda: SplitModel(nn.Linear(4, 4), head(4, CLASSES)),
        sets,
        sets,
        LOSSES[ignored],
        classes=tuple("abc"),
        metrics={"own": partial(own_value, ignored)},
    )


def built(**more):
    settings = {"task": f"{__name__}:partly", **more}
    return build_task(resolve(settings, lambda _: [partly]), 1)


@pytest.mark.parametrize("ignored", LOSSES)
@pytest.mark.parametrize("positions", [0, 5])
def test_the_ignored_targets_are_those_of_the_loss(ignored, positions):
    task = built(ignored=ignored, positions=positions, metrics="macro-f1")
    task.check(0)
    model = task.initial_model()
    loss, _, metrics = evaluate_model(task, 0, model)
    inputs = task.test_examples(0).inputs
    targets = targets_of(ignored, *inputs.shape[:-1])
    outputs, counted = model(inputs).detach(), targets != ignored
    right = (outputs.argmax(1) == targets)[counted].float().mean()
    assert metrics["accuracy"] == pytest.approx(float(right))
    assert loss == pytest.approx(float(LOSSES[ignored](outputs, targets)))
    # The metric receives the value of the loss.
    assert metrics["own"] == int((~counted).sum()) > 0
    if not positions:
        # Algorithms and named metrics use the other targets.
        assert class_mask(task, 0, model.head).tolist() == [[False, True, True]]
        assert metrics["macro-f1"] == pytest.approx(
            float(task.metrics["macro-f1"](outputs[counted], targets[counted]))
        )


@pytest.mark.parametrize("ignored", [255, 0])
def test_a_loss_that_hides_what_it_ignores_is_an_error(ignored):
    def loss(outputs, targets):
        return cross_entropy(outputs, targets, ignore_index=ignored)

    sets = [ExampleSet(torch.randn(60, 4), targets_of(ignored, 60))]
    task = ExampleTask(
        lambda: SplitModel(nn.Linear(4, 4), nn.Linear(4, CLASSES)), sets, sets, loss
    )
    assert_says(f" attribute ignore_index = {ignored},", task.check, 0)
    loss.ignore_index = ignored
    task.check(0)


def last(outputs, targets):
    return cross_entropy(outputs.movedim(-1, 1), targets)


@pytest.mark.parametrize("head", [Transposed, nn.Linear])
def test_classes_in_the_last_dimension_are_an_error(head):
    # As many positions as classes: the shapes alone do not show the classes.
    sets = [ExampleSet(torch.randn(20, 3, 4), torch.randint(0, 3, (20, 3)))]

    def task_of(loss):
        model = lambda: SplitModel(nn.Linear(4, 4), head(4, CLASSES))  # noqa: E731
        return ExampleTask(model, sets, sets, loss)

    assert_says("expects the classes in the last dimension", task_of(last).check, 0)
    for loss in (cross_entropy, nn.CrossEntropyLoss(label_smoothing=0.1)):
        task_of(loss).check(0)
