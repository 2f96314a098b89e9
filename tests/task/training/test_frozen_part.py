"""Local training: frozen parts, and features that are computed once."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from small_models import (
    CE,
    MSE,
    assert_close,
    images,
    normed,
    regression,
    same_bits,
    state_of,
    with_batch_norm_and_dropout,
)
from torch import nn
from torchvision.ops import StochasticDepth

from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import SplitModel, build_model
from flwr_frl.task.training.cohort import each_together
from flwr_frl.task.training.local_training import TrainCall, train
from flwr_frl.task.training.sgd import SGD, gradient_weight

NEAR = {"rtol": 1e-4, "atol": 1e-6}


@pytest.mark.parametrize("part", ["head", "representation"])
@pytest.mark.parametrize("augment", [True, False])
def test_frozen_part_is_bitwise_unchanged(part, augment):
    model, examples = with_batch_norm_and_dropout(), images(40, 3, augment)
    sgd = SGD(learning_rate=0.1, momentum=0.9, weight_decay=0.1, batch_size=8)
    # Both parts were trained before, as in every round of FedRep.
    train(model, "all", examples, CE, 1, sgd)
    other = {"head": "representation", "representation": "head"}[part]
    model.zero_grad()
    frozen, trained = state_of(model.part(other)), state_of(model.part(part))
    train(model, part, examples, CE, 2, sgd)
    assert same_bits(state_of(model.part(other)), frozen)
    assert all(parameter.grad is None for parameter in model.part(other).parameters())
    moved = state_of(model.part(part))
    # All other arrays have changed, including running statistics.
    assert not any(torch.equal(moved[name], trained[name]) for name in trained)


# Features computed once


def count_calls(module: nn.Module) -> Callable[[], int]:
    calls = []
    module.register_forward_hook(lambda _, given, __: calls.append(len(given[0])))
    # Calls with two examples only test whether the module is random.
    return lambda: sum(count > 2 for count in calls)


@pytest.mark.parametrize(
    # With three layers in the head, the features are the images.
    ("head_layers", "regularized"),
    [(1, False), (1, True), (2, False), (3, False)],
)
def test_features_computed_once_train_the_same_head(
    monkeypatch, head_layers, regularized
):
    regularizer = (lambda f, _, __: f.square().mean()) if regularized else None
    sgd = SGD(learning_rate=0.1, momentum=0.5, weight_decay=0.01, batch_size=7)
    loss, trained, calls = CE, [], []
    for cached in (True, False):
        torch.manual_seed(0)
        model = build_model("digits-cnn", (1, 8, 8), 10, head_layers)
        calls.append(count_calls(model.representation))
        if not cached:
            monkeypatch.setattr(TrainCall, "has_features", False)
        torch.manual_seed(1)
        value = train(model, "head", images(60, 10), loss, 4, sgd, regularizer)
        trained.append({**state_of(model), "loss": torch.tensor(value)})
    for name, value in trained[0].items():
        torch.testing.assert_close(value, trained[1][name], rtol=1e-4, atol=1e-6)
    # 60 examples: 2 batches of at most 50 against 4 epochs of 9 batches.
    assert [call() for call in calls] == [2, 36]


@pytest.mark.parametrize(
    ("representation", "augment", "is_random"),
    [
        (lambda: with_batch_norm_and_dropout().representation, False, True),
        (lambda: nn.Flatten(), True, True),
        (lambda: nn.Sequential(Functional(), nn.Flatten()), False, True),
        (lambda: nn.Sequential(nn.RReLU(), nn.Flatten()), False, True),
        (lambda: nn.Sequential(nn.Dropout(0.0), nn.Flatten()), False, False),
        (lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64)), False, False),
        (lambda: nn.Sequential(nn.Flatten(), spectral_norm(64)), False, False),
        (lambda: nn.Sequential(StochasticDepth(0.5, "row"), nn.Flatten()), False, True),
        (lambda: LastState(0.5), False, True),
        (lambda: LastState(0.0), False, False),
        # Such norms use the statistics of the batch even in evaluation mode.
        (lambda: nn.Sequential(nn.Flatten(), batch_norm(64)), False, True),
    ],
)
def test_features_are_recomputed_if_they_are_random(representation, augment, is_random):
    model = SplitModel(representation(), nn.LazyLinear(3))
    examples, loss = images(40, 3, augment), CE
    model(examples.first(2))
    calls = count_calls(model.representation)
    train(model, "head", examples, loss, 3, SGD(batch_size=20))
    assert calls() == (3 * 2 if is_random else 1)


batch_norm = partial(nn.BatchNorm1d, track_running_stats=False)


def spectral_norm(width: int) -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(width, width))


class Functional(nn.Module):
    """Applies dropout by a function, so no submodule indicates the randomness."""

    def forward(self, x):
        return nn.functional.dropout(x, 0.5, self.training)


class LastState(nn.Module):
    """A two-layer LSTM of which only the last state is used."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 3, 2, batch_first=True, dropout=dropout)

    def forward(self, x):
        return self.lstm(x[:, 0])[1][0][-1]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_optimizer_equals_torch_sgd(momentum):
    torch.manual_seed(0)
    ours, other = nn.Linear(3, 2), nn.Linear(3, 2)
    other.load_state_dict(ours.state_dict())
    steps = SGD(0.1, momentum, weight_decay=0.01).optimizer(ours)
    groups = [{"params": [other.weight], "weight_decay": 0.01}]
    groups += [{"params": [other.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=momentum, fused=True)
    for t in range(5):
        for model, stepper in ((ours, steps), (other, optimizer)):
            stepper.zero_grad()
            # In the second step, the bias has no gradient.
            model.bias.requires_grad_(t != 1)
            model(torch.ones(4, 3) * t).square().sum().backward()
            stepper.step()
    assert same_bits(ours.state_dict(), other.state_dict())


def test_optimizer_when_a_parameter_gets_its_first_gradient_later():
    # As in a mixture of experts: the second layer has no gradient in the first step.
    layers = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for parameter in layers.parameters():
        nn.init.ones_(parameter)
    optimizer = SGD(0.1, 0.5, weight_decay=0.0).optimizer(layers)
    for gradients in ((1.0, None), (1.0, 2.0), (1.0, 2.0)):
        for parameter, value in zip(layers.parameters(), gradients, strict=True):
            parameter.grad = None if value is None else torch.tensor([[value]])
        optimizer.step()
    # Momentum buffers are 1, 1.5 and 1.75 for the first layer, 2 and 3 for the second.
    first, second = (parameter.item() for parameter in layers.parameters())
    assert first == pytest.approx(1 - 0.1 * (1 + 1.5 + 1.75))
    assert second == pytest.approx(1 - 0.1 * (2 + 3))


def without_last(examples: ExampleSet, epochs: int, seed: int) -> list[ExampleSet]:
    """Return the shuffled batches of five of each epoch, without incomplete ones."""
    torch.manual_seed(seed)
    order = [torch.randperm(len(examples)) for _ in range(epochs)]
    chosen = [o[i : i + 5] for o in order for i in (0, 5)]
    return [ExampleSet(examples.inputs[c], examples.targets[c]) for c in chosen]


def test_a_last_batch_of_one_is_dropped_before_a_batch_norm():
    examples, loss = regression(11, 4, 1), MSE
    expected, batches = normed(), without_last(examples, 2, seed=3)
    sgd = SGD(0.01, 0.0, batch_size=5)
    losses = [train(expected, "all", batch, loss, 1, sgd) for batch in batches]
    model = normed()
    torch.manual_seed(3)
    result = train(model, "all", examples, loss, 2, sgd)
    assert result == pytest.approx(sum(losses[2:]) / 2)
    # The refusal is detected once, before even the first norm has been updated.
    assert model.representation.alone == 1
    assert_close(model, expected, **NEAR)
    # All examples are used if no batch has a single example.
    train(model, "all", examples, loss, 1, SGD(0.01, batch_size=6))
    assert int(model.representation.first.num_batches_tracked) == 6


def test_a_dropped_example_does_not_change_the_augmentation_of_others():
    examples, batches = images(11, 3, augment=True), []
    for drop in (False, True):
        torch.manual_seed(0)
        chosen = replace(examples, drop_single=drop)
        batches.append(list(chosen.batches(5, shuffle=True)))
    assert [len(y) for _, y in batches[1]] == [5, 5]
    for (x, y), (x_all, y_all) in zip(batches[1], batches[0], strict=False):
        assert torch.equal(x, x_all)
        assert torch.equal(y, y_all)
    # Evaluation uses all examples.
    assert sum(len(y) for _, y in chosen.batches(5)) == 11


@pytest.mark.parametrize(
    ("make", "count", "expected"),
    [
        (normed, 11, 2),
        (normed, 10, 2),
        (normed, 8, 2),
        # A single example is not dropped, although a batch norm needs two.
        (normed, 1, 1),
        (lambda: SplitModel(nn.Linear(4, 4), nn.Linear(4, 1)), 11, 3),
    ],
)
def test_gradient_weight_of_an_epoch_is_its_number_of_steps(make, count, expected):
    model = make().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    sgd = SGD(0.01, momentum=0.0, batch_size=5)
    assert gradient_weight(model, regression(count, 4, 1), 1, sgd) == expected
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert not any(module.training for module in model.modules())


def test_last_batches_of_one_are_dropped_in_a_cohort(caplog):
    loss, sgd, seats = MSE, SGD(0.01, 0.0, batch_size=5), range(4)
    # The last batches of two clients have one example, at different times.
    sets = [regression(n, 4, 1) for n in (11, 11, 6, 8)]

    def work(i: int, model: SplitModel) -> float:
        torch.manual_seed(i)
        return train(model, "all", sets[i], loss, 2, sgd)

    alone, models = [normed() for _ in seats], [normed() for _ in seats]
    losses = [work(i, alone[i]) for i in seats]
    result = list(each_together([partial(work, i, models[i]) for i in seats], 4))
    assert result == pytest.approx(losses, rel=1e-5)
    for result_model, expected in zip(models, alone, strict=True):
        assert_close(result_model, expected, **NEAR)
    # Here they occur at the same time.
    again = [normed() for _ in seats]
    sets = [sets[0]] * 4
    list(each_together([partial(work, i, again[i]) for i in seats], 4))
    for i in (0, 1):
        assert_close(again[i], alone[i], **NEAR)
    assert not caplog.records
