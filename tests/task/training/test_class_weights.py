"""Class weights in the training loss, compared with hand-computed cross-entropy."""

from types import SimpleNamespace

import pytest
import torch
from refusals import code_of
from small_models import CE, assert_close, classifier
from torch import nn
from torch.func import vmap

from flwr_frl.clients.base import TrainingSettings
from flwr_frl.common.settings import build
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import SplitModel
from flwr_frl.task.training.cohort import each_together
from flwr_frl.task.training.local_training import train
from flwr_frl.task.training.trainer import (
    TrainerSettings,
    WeightedCrossEntropy,
    weighted,
)


def task_of(count: int, loss=CE) -> SimpleNamespace:
    return SimpleNamespace(classes=[str(i) for i in range(count)], loss=loss)


def examples_of(targets: list) -> ExampleSet:
    return ExampleSet(torch.zeros(len(targets), 2), torch.tensor(targets))


BINARY = examples_of([0, 1])


def test_loss_is_the_weighted_sum_over_the_number_of_targets():
    torch.manual_seed(0)
    outputs, targets = torch.randn(4, 3, 5), torch.randint(0, 3, (4, 5))
    targets[0, :2] = -100
    weights = torch.tensor([0.5, 2.0, 1.0])
    expected = CE(outputs, targets, weight=weights, reduction="sum") / 18
    loss = WeightedCrossEntropy((0.5, 2.0, 1.0))
    torch.testing.assert_close(loss(outputs, targets), expected)
    each = vmap(loss)(outputs[None], targets[None])
    torch.testing.assert_close(each[0], expected)


def test_balanced_weights_are_inversely_proportional_to_counts():
    # Of 8 examples in 2 classes, those of class 2 have the weight 8 / (2 · 2).
    loss = weighted("balanced", task_of(3), examples_of([0] * 6 + [2] * 2))
    assert loss.weights == pytest.approx((8 / 12, 1.0, 2.0))


def test_unsuitable_weights_losses_and_targets_are_rejected():
    codes = [
        *(code_of(weighted, text, task_of(3), BINARY) for text in ("1,2", "1,2,3,4")),
        # The loss must be the cross-entropy of classes.
        code_of(weighted, "balanced", task_of(2, nn.functional.mse_loss), BINARY),
        code_of(weighted, "balanced", task_of(2), examples_of([0.0, 1.0])),
        code_of(weighted, "balanced", task_of(0), BINARY),
        *(
            code_of(build, TrainingSettings, {"class-weights": text})
            for text in ("", "balance", "1,-1", "1,x", "0,0", "1,inf")
        ),
    ]
    assert {*codes} == {"class-weights"}


@pytest.mark.parametrize("has_norm", [False, True])
def test_clients_with_equal_weights_are_batched(has_norm, batched_calls):
    sgd, loss = TrainerSettings(batch_size=5), WeightedCrossEntropy((0.5, 2.0, 1.0))

    def model(seed: int) -> SplitModel:
        # Batches are not padded if their examples affect each other.
        return classifier(seed, nn.BatchNorm1d(5) if has_norm else None)

    def work(i: int, of: SplitModel) -> float:
        torch.manual_seed(i)
        n = (12, 9)[i]
        examples = ExampleSet(torch.randn(n, 4), torch.randint(0, 3, (n,)))
        return train(of, "all", examples, loss, 2, sgd)

    alone, cohort = [model(0), model(1)], [model(0), model(1)]
    losses = [work(i, alone[i]) for i in range(2)]
    results = list(each_together([lambda i=i: work(i, cohort[i]) for i in range(2)], 2))
    assert batched_calls["TrainCall"] == [2]
    assert results == pytest.approx(losses, rel=1e-5)
    for one, other in zip(alone, cohort, strict=True):
        assert_close(one, other, rtol=1e-4, atol=1e-6)
