"""Optimisers and gradient clipping in local training, compared with torch."""

import pytest
import torch
from refusals import code_of
from small_models import CE, assert_close, classes, torch_groups, trainer, without_noise
from small_models import classifier as model
from torch import nn

from flwr_frl.clients.base import TrainingSettings
from flwr_frl.common.settings import build
from flwr_frl.task.models import SplitModel
from flwr_frl.task.training.cohort import each_together
from flwr_frl.task.training.local_training import TrainCall, train
from flwr_frl.task.training.privacy import train_privately

TORCH = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


@pytest.mark.parametrize("clip", [0.0, 0.3])
@pytest.mark.parametrize("name", TORCH)
def test_training_equals_a_loop_with_torch_s_optimizer(name, clip):
    ours, other, examples = model(), model(), classes()
    # A batch has all examples, so their order does not matter.
    train(ours, "all", examples, CE, 4, trainer(name, max_gradient_norm=clip))
    optimizer = TORCH[name](torch_groups(other), lr=0.05)
    for _ in range(4):
        optimizer.zero_grad()
        CE(other(examples.inputs), examples.targets).backward()
        if clip:
            nn.utils.clip_grad_norm_(other.parameters(), clip)
        optimizer.step()
    assert_close(ours, other)


def test_a_gradient_of_norm_5_is_clipped_to_norm_2():
    layer = nn.Linear(1, 1)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    plain = {"learning_rate": 1.0, "momentum": 0.0, "weight_decay": 0.0}
    optimizer = trainer(max_gradient_norm=2.0, **plain).optimizer(layer)
    layer.weight.grad = torch.full((1, 1), 3.0)
    layer.bias.grad = torch.full((1,), 4.0)
    optimizer.step()
    # The step is −2/5 of (3, 4).
    assert layer.weight.item() == pytest.approx(-1.2, rel=1e-5)
    assert layer.bias.item() == pytest.approx(-1.6, rel=1e-5)
    layer.weight.grad, layer.bias.grad = torch.full((1, 1), 0.3), torch.zeros(1)
    optimizer.step()
    assert layer.weight.item() == pytest.approx(-1.5, rel=1e-5)


@pytest.mark.parametrize("clip", [0.0, 0.3])
@pytest.mark.parametrize("name", ["sgd", *TORCH])
@pytest.mark.parametrize("part", ["all", "head"])
def test_cohort_matches_clients_that_train_one_by_one(name, clip, part, batched_calls):
    sgd = trainer(name, max_gradient_norm=clip, batch_size=5)
    # The clients take 3, 2 and 1 steps per epoch.
    counts, alone, cohort = (12, 9, 4), [], [model(i) for i in range(3)]

    def work(i: int, of: SplitModel) -> float:
        torch.manual_seed(i)
        return train(of, part, classes(counts[i], i), CE, 3, sgd)

    losses = []
    for i in range(3):
        alone.append(model(i))
        losses.append(work(i, alone[i]))
    assert not batched_calls["TrainCall"]
    pairs = [(i, cohort[i]) for i in range(3)]
    results = list(each_together([lambda pair=pair: work(*pair) for pair in pairs], 3))
    assert batched_calls["TrainCall"] == [3]
    assert results == pytest.approx(losses, rel=1e-5)
    for one, other in zip(alone, cohort, strict=True):
        assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["sgd", *TORCH])
def test_private_training_passes_the_clipped_gradient_to_the_optimizer(name):
    ours, other, examples = model(), model(), classes()
    sgd = trainer(name, max_gradient_norm=0.3)
    call = TrainCall(ours, "all", examples, CE, 4, sgd, None, None)
    train_privately(call, without_noise())
    train(other, "all", examples, CE, 4, sgd)
    assert_close(ours, other, rtol=1e-4, atol=1e-5)


def test_an_imported_class_of_torch_is_used():
    ours, other, examples = model(), model(), classes()
    train(ours, "all", examples, CE, 2, trainer("torch.optim:NAdam"))
    optimizer = torch.optim.NAdam(torch_groups(other), lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        CE(other(examples.inputs), examples.targets).backward()
        optimizer.step()
    assert_close(ours, other)


@pytest.mark.parametrize("name", ["adamm", "torch.optim:Adamm", "torch.nn:Linear"])
def test_unusable_optimizers_and_norms_are_rejected(name):
    assert code_of(build, TrainingSettings, {"optimizer": name}) == "optimizer"
    norm = {"max-gradient-norm": -1.0}
    assert code_of(build, TrainingSettings, norm) == "max-gradient-norm"
