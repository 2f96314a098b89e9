"""Local training and evaluation against NumPy and steps worked by hand."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.ops import StochasticDepth

from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import SplitModel, build_model
from flwr_frl.task.settings import build
from flwr_frl.task.training import (
    SGD,
    OneExampleError,
    Proximal,
    TrainCall,
    TrainingDivergedError,
    evaluate,
    freeze,
    loop,
    steps_an_epoch,
    together,
    train,
)
from flwr_frl.task.training.sgd import warn_if_emulated

CE, MSE = nn.functional.cross_entropy, nn.functional.mse_loss


def linear_model(inputs: int, features: int, outputs: int, seed: int = 0) -> SplitModel:
    torch.manual_seed(seed)
    return SplitModel(nn.Linear(inputs, features), nn.Linear(features, outputs))


def regression(n: int, inputs: int, outputs: int, seed: int = 0) -> ExampleSet:
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.standard_normal((n, inputs))).float()
    y = torch.from_numpy(rng.standard_normal((n, outputs))).float()
    return ExampleSet(x, y)


def images(n: int, classes: int, augment: bool = False) -> ExampleSet:
    rng = np.random.default_rng(1)
    pixels = rng.integers(0, 256, (n, 8, 8, 1), dtype=np.uint8)
    targets = torch.from_numpy(rng.integers(0, classes, n))
    mean, std = torch.tensor([128.0]), torch.tensor([64.0])
    return ExampleSet(torch.from_numpy(pixels), targets, mean, std, augment)


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


# Steps worked by hand


def test_a_copy_of_a_frozen_model_is_frozen_alike():
    normed = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model = SplitModel(normed, nn.Linear(3, 2))
    freeze(model, "head")
    other = copy.deepcopy(model)
    freeze(other, "representation")
    trained = {name for name, p in other.named_parameters() if p.requires_grad}
    assert trained == {n for n in trained if n.startswith("representation.")}
    assert len(trained) == 4
    assert other.representation[1].training
    freeze(other, "head")
    assert not other.representation[1].training


def test_two_steps_by_hand():
    # f(x) = w (b x), one example x = 2, y = 10, b = 1, w = 3; loss (w b x - y)².
    # Only w trains, with rate 0.1, momentum 0.5, weight decay 0.1.
    # Step 1: output 6, slope 2 (6 - 10) 2 = -16, with decay -16 + 0.1 * 3 = -15.7;
    #         w = 3 + 1.57 = 4.57.
    # Step 2: output 9.14, slope 2 (9.14 - 10) 2 = -3.44, with decay -2.983;
    #         velocity 0.5 * -15.7 - 2.983 = -10.833; w = 4.57 + 1.0833 = 5.6533.
    model = SplitModel(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        model.representation.weight.fill_(1.0)
        model.head.weight.fill_(3.0)
    example = ExampleSet(torch.tensor([[2.0]]), torch.tensor([[10.0]]))
    sgd = SGD(learning_rate=0.1, momentum=0.5, weight_decay=0.1)
    loss = train(model, "head", example, MSE, 2, sgd)
    assert model.head.weight.item() == pytest.approx(5.6533, abs=1e-5)
    assert model.representation.weight.item() == 1.0
    # The loss of the last epoch is measured before its step: (9.14 - 10)².
    assert loss == pytest.approx(0.86**2, abs=1e-5)


def numpy_training(
    state: dict[str, np.ndarray],
    trained: tuple[str, ...],
    x: np.ndarray,
    y: np.ndarray,
    epochs: int,
    sgd: SGD,
    terms: dict,
) -> dict[str, np.ndarray]:
    """Full-batch SGD on the mean squared error of a two-layer linear model.

    ``terms``: ``extra`` of the gradients, and an ``anchor`` with its ``weight``.
    """
    v = {name: np.zeros_like(value) for name, value in state.items()}
    for _ in range(epochs):
        z = x @ state["representation.weight"].T + state["representation.bias"]
        residual = z @ state["head.weight"].T + state["head.bias"] - y
        slope = 2 * residual / residual.size
        back = slope @ state["head.weight"]
        gradients = {
            "representation.weight": back.T @ x,
            "representation.bias": back.sum(0),
            "head.weight": slope.T @ z,
            "head.bias": slope.sum(0),
        }
        for name in state:
            if name.startswith(trained):
                decay = sgd.weight_decay if name.endswith("weight") else 0.0
                gradient = gradients[name] + terms["extra"].get(name, 0.0)
                anchor = terms["anchor"].get(name, state[name])
                gradient += terms["weight"] * (state[name] - anchor)
                v[name] = sgd.momentum * v[name] + gradient + decay * state[name]
                state = state | {name: state[name] - sgd.learning_rate * v[name]}
    return state


@pytest.mark.parametrize("part", ["head", "representation", "all"])
@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_training_against_numpy(part, weight):
    # Corrections and the anchor are part of the gradient: momentum and decay come on
    # top. A parameter may have neither.
    model, examples = linear_model(4, 3, 2), regression(12, 4, 2)
    sgd = SGD(learning_rate=0.05, momentum=0.7, weight_decay=0.02, batch_size=12)
    start = {n: v.double().numpy() for n, v in state_of(model).items()}
    rng = np.random.default_rng(3)
    extra = {n: weight * rng.standard_normal(v.shape) for n, v in start.items()}
    anchor = {n: rng.standard_normal(v.shape) for n, v in start.items()}
    del extra["head.bias"], anchor["representation.bias"]
    terms = {"extra": extra, "anchor": anchor, "weight": weight}
    x, y = examples.inputs.double().numpy(), examples.targets.double().numpy()
    trained = ("",) if part == "all" else (f"{part}.",)
    expected = numpy_training(start, trained, x, y, 6, sgd, terms)
    proximal = Proximal(weight, {n: torch.from_numpy(a) for n, a in anchor.items()})
    correction = {n: torch.from_numpy(a).float() for n, a in extra.items()}
    more = (proximal, correction) if weight else ()
    train(model, part, examples, MSE, 6, sgd, *more)
    for name, value in model.state_dict().items():
        np.testing.assert_allclose(value.numpy(), expected[name], rtol=1e-4, atol=1e-5)


def test_the_regularizer_is_trained_and_not_reported():
    # The loss is 0 (targets equal the outputs 0); the regulariser 5 h has slope 5:
    # h = 0 - 0.1 * 5 = -0.5, then -1. Its -2.5 in the last epoch is no loss.
    model = SplitModel(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        model.representation.weight.fill_(0.0)
        model.head.weight.fill_(0.0)
    seen = []

    def regularizer(features, targets, split: SplitModel) -> torch.Tensor:
        seen.append((features.tolist(), targets.tolist()))
        return 5 * split.head.weight.sum()

    example = ExampleSet(torch.tensor([[2.0]]), torch.tensor([[0.0]]))
    sgd = SGD(learning_rate=0.1, momentum=0.0, weight_decay=0.0)
    loss = train(model, "head", example, MSE, 2, sgd, regularizer)
    assert model.head.weight.item() == pytest.approx(-1.0)
    assert loss == 0.0
    assert seen == [([[0.0]], [[0.0]])] * 2


# FedProx's and SCAFFOLD's terms


def scalar_model(b: float, w: float) -> SplitModel:
    """Return x ↦ w (b x)."""
    model = SplitModel(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        model.representation.weight.fill_(b)
        model.head.weight.fill_(w)
    return model


NOTHING = torch.zeros(1, 1), None


def test_the_proximal_term_by_hand():
    # 0.5/2 ((2 - 5)² + (3 - 1)²) = 13/4; slopes 0.5 (2 - 5) and 0.5 (3 - 1).
    model = scalar_model(2.0, 3.0)
    anchor = {"representation.weight": torch.tensor([[5.0]])}
    anchor |= {"head.weight": torch.tensor([[1.0]]), "other": torch.tensor(7.0)}
    value = Proximal(0.5, anchor)(*NOTHING, model)
    assert value.item() == pytest.approx(3.25)
    value.backward()
    assert model.representation.weight.grad.item() == pytest.approx(-1.5)
    assert model.head.weight.grad.item() == pytest.approx(1.0)
    # Parameters without an anchor add nothing, and frozen ones have no gradient.
    del anchor["representation.weight"]
    freeze(model, "representation")
    value = Proximal(0.5, anchor)(*NOTHING, model)
    assert value.item() == pytest.approx(1.0)
    assert not value.requires_grad


def test_a_correction_is_added_to_the_gradient_in_every_step():
    # x = 2, y = 10, b = 1 is frozen: loss (2 w - 10)², slope 4 (2 w - 10). With -3
    # added, from w = 3 at rate 0.01: slopes -16 - 3 and then, at w = 3.19,
    # 4 (6.38 - 10) - 3 = -17.48: w = 3.3648.
    model = scalar_model(1.0, 3.0)
    example = ExampleSet(torch.tensor([[2.0]]), torch.tensor([[10.0]]))
    sgd = SGD(learning_rate=0.01, momentum=0.0, weight_decay=0.0)
    correction = {"head.weight": torch.tensor([[-3.0]])}
    correction |= {"representation.weight": torch.tensor([[7.0]])}
    correction |= {"other": torch.tensor(1.0)}
    before = {name: value.clone() for name, value in correction.items()}
    loss = MSE
    value = train(model, "head", example, loss, 2, sgd, correction=correction)
    assert model.head.weight.item() == pytest.approx(3.3648, abs=1e-6)
    assert model.representation.weight.item() == 1.0
    assert value == pytest.approx(3.62**2, rel=1e-5)
    assert same_bits(correction, before)


# Custom steps


def test_loop_passes_every_example_once_per_epoch():
    inputs = torch.arange(7.0)[:, None]
    examples = ExampleSet(inputs, -inputs)
    seen: list[list[float]] = []

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        assert torch.equal(y, -x)
        seen.append(x[:, 0].tolist())
        return torch.tensor(0.0)

    torch.manual_seed(0)
    assert loop(step, examples, 3, SGD(batch_size=3)) == 0.0
    assert [len(batch) for batch in seen] == [3, 3, 1] * 3
    epochs = [[*seen[i], *seen[i + 1], *seen[i + 2]] for i in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    # Shuffled anew in each, by torch's generator.
    assert len({tuple(epoch) for epoch in epochs}) == 3
    first, seen = seen, []
    torch.manual_seed(0)
    loop(step, examples, 3, SGD(batch_size=3))
    assert seen == first


def test_loop_returns_the_mean_over_examples_of_the_last_epoch():
    # Batches of 2 and 1 examples; losses 1, 2 in the first epoch and 3, 4 in the
    # second: (2 · 3 + 1 · 4) / 3.
    losses = iter([1.0, 2.0, 3.0, 4.0])
    examples = ExampleSet(torch.zeros(3, 1), torch.zeros(3, 1))
    sgd = SGD(batch_size=2)
    mean = loop(lambda x, y: torch.tensor(next(losses)), examples, 2, sgd)
    assert mean == pytest.approx(10 / 3)
    assert next(losses, None) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_loop_raises_after_an_epoch_with_a_loss_that_is_not_finite(value):
    losses = iter([1.0, 1.0, 1.0, value, 1.0, 1.0])
    examples = ExampleSet(torch.zeros(4, 1), torch.zeros(4, 1))
    sgd = SGD(learning_rate=0.25, batch_size=2)
    line = "after epoch 2 of local training with learning-rate 0.25; a smaller one"
    with pytest.raises(TrainingDivergedError, match=line) as error:
        loop(lambda x, y: torch.tensor(next(losses)), examples, 3, sgd)
    assert "\n" not in str(error.value)
    # The third epoch was not begun.
    assert list(losses) == [1.0, 1.0]


def test_a_custom_step_trains_unfrozen_parameters():
    # Sign SGD on the head: w = 3, target above every output, so + 0.1 a batch.
    model = scalar_model(1.0, 3.0)
    head = freeze(model, "head")

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = MSE(model(x), y)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in head.parameters():
                parameter -= 0.1 * parameter.grad.sign()
        return loss.detach()

    examples = ExampleSet(torch.ones(6, 1), torch.full((6, 1), 50.0))
    loss = loop(step, examples, 2, SGD(batch_size=3))
    assert model.head.weight.item() == pytest.approx(3.4)
    assert model.representation.weight.item() == 1.0
    assert model.representation.weight.grad is None
    # Of the steps at 3.2 and 3.3.
    assert loss == pytest.approx((46.8**2 + 46.7**2) / 2, rel=1e-5)


@pytest.mark.parametrize("part", ["head", "representation", "all"])
def test_freeze_leaves_one_part_trainable(part):
    model = with_batch_norm_and_dropout()
    freeze(model, {"head": "representation"}.get(part, "head"))
    # Whatever could learn before.
    model.eval()
    module = freeze(model, part)
    assert module is model.part(part)
    learning = {id(p) for p in module.parameters()}
    for parameter in model.parameters():
        assert parameter.requires_grad == (id(parameter) in learning)
    # Dropout is active everywhere, batch norms only where something learns.
    inside = set(module.modules())
    for child in model.modules():
        frozen_norm = isinstance(child, nn.modules.batchnorm._BatchNorm)
        frozen_norm &= child not in inside
        assert child.training != frozen_norm


# The frozen part


def with_batch_norm_and_dropout() -> SplitModel:
    torch.manual_seed(0)
    # Biases before a batch norm have no gradient, so there are none.
    representation = nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(4 * 36, 8, bias=False),
        nn.BatchNorm1d(8),
    )
    head = nn.Sequential(
        nn.Dropout(0.3), nn.Linear(8, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 3)
    )
    return SplitModel(representation, head)


@pytest.mark.parametrize("part", ["head", "representation"])
@pytest.mark.parametrize("augment", [True, False])
def test_a_frozen_part_stays_bitwise_equal(part, augment):
    model, examples = with_batch_norm_and_dropout(), images(40, 3, augment)
    sgd = SGD(learning_rate=0.1, momentum=0.9, weight_decay=0.1, batch_size=8)
    # Both parts have been trained before, as in every round of FedRep.
    train(model, "all", examples, CE, 1, sgd)
    other = {"head": "representation", "representation": "head"}[part]
    model.zero_grad()
    frozen, trained = state_of(model.part(other)), state_of(model.part(part))
    train(model, part, examples, CE, 2, sgd)
    assert same_bits(state_of(model.part(other)), frozen)
    assert all(parameter.grad is None for parameter in model.part(other).parameters())
    moved = state_of(model.part(part))
    # Everything else has moved, running statistics included.
    assert not any(torch.equal(moved[name], trained[name]) for name in trained)


@pytest.mark.parametrize("part", ["head", "representation", "all"])
def test_no_epochs_change_nothing(part):
    model = with_batch_norm_and_dropout()
    before = state_of(model)
    loss = train(model, part, images(9, 3), CE, 0, SGD())
    assert loss == 0.0
    assert same_bits(state_of(model), before)


# Features computed once


def count_calls(module: nn.Module) -> Callable[[], int]:
    calls = []
    module.register_forward_hook(lambda _, given, __: calls.append(len(given[0])))
    # With two examples it is tried whether it draws random numbers.
    return lambda: sum(count > 2 for count in calls)


@pytest.mark.parametrize(
    # With three layers in the head the features are images themselves.
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
        (lambda: nn.Sequential(StochasticDepth(0.5, "row"), nn.Flatten()), False, True),
        (lambda: LastState(0.5), False, True),
        (lambda: LastState(0.0), False, False),
    ],
    ids=["dropout", "augmentation", "stochastic depth", "LSTM with dropout", "LSTM"],
)
def test_features_are_recomputed_if_they_are_random(representation, augment, is_random):
    model = SplitModel(representation(), nn.LazyLinear(3))
    examples, loss = images(40, 3, augment), CE
    model(examples.first(2))
    calls = count_calls(model.representation)
    train(model, "head", examples, loss, 3, SGD(batch_size=20))
    assert calls() == (3 * 2 if is_random else 1)


class LastState(nn.Module):
    """A two-layer LSTM, of which only the last state is used."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 3, 2, batch_first=True, dropout=dropout)

    def forward(self, x):
        return self.lstm(x[:, 0])[1][0][-1]


def test_biases_of_recurrent_layers_have_no_weight_decay():
    model = SplitModel(nn.GRU(2, 3), nn.Linear(3, 1))
    steps = SGD(learning_rate=0.5, weight_decay=0.1).optimizer(model)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    steps.step()
    for name, parameter in model.named_parameters():
        kept = 1.0 if "bias" in name else 1 - 0.5 * 0.1
        torch.testing.assert_close(parameter.data, kept * before[name])


def test_optimizer_accepts_a_gradient_in_another_memory_format():
    layer = nn.Conv2d(3, 2, 2, bias=False).to(memory_format=torch.channels_last)
    nn.init.zeros_(layer.weight)
    layer.weight.grad = torch.arange(24.0).view(2, 3, 2, 2)
    SGD(1.0, 0.0, 0.0).optimizer(layer).step()
    assert torch.equal(layer.weight, -torch.arange(24.0).view(2, 3, 2, 2))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_optimizer_equals_torch_sgd(momentum):
    torch.manual_seed(0)
    ours, other = nn.Linear(3, 2), nn.Linear(3, 2)
    other.load_state_dict(ours.state_dict())
    steps = SGD(0.1, momentum, weight_decay=0.01).optimizer(ours)
    groups = [
        {"params": [other.weight], "weight_decay": 0.01},
        {"params": [other.bias], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=momentum, fused=True)
    for t in range(5):
        for model, stepper in ((ours, steps), (other, optimizer)):
            stepper.zero_grad()
            # The bias has no gradient in the second step.
            model.bias.requires_grad_(t != 1)
            model(torch.ones(4, 3) * t).square().sum().backward()
            stepper.step()
    assert all(
        torch.equal(p, q)
        for p, q in zip(ours.parameters(), other.parameters(), strict=True)
    )


class TwoNorms(nn.Module):
    """The first takes one example, of four numbers a channel, and the second does not.

    It counts its calls with one.
    """

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(1), nn.BatchNorm1d(4)
        self.alone = 0

    def forward(self, x):
        self.alone += len(x) == 1
        return self.second(self.first(x[:, None]).flatten(1))


def normed() -> SplitModel:
    torch.manual_seed(0)
    return SplitModel(TwoNorms(), nn.Linear(4, 1))


def without_last(examples: ExampleSet, epochs: int, seed: int) -> list[ExampleSet]:
    """Return the batches of five of each epoch, as they are drawn, without a rest."""
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
    # Found out once, and not even the first norm has learned from it.
    assert model.representation.alone == 1
    assert_near(model, expected)
    # All examples train where none is alone.
    train(model, "all", examples, loss, 1, SGD(0.01, batch_size=6))
    assert int(model.representation.first.num_batches_tracked) == 6


def test_loop_skips_a_last_batch_of_one_if_the_model_refuses_it():
    model, sizes = normed().train(), []

    def step(inputs, targets):
        sizes.append(len(inputs))
        return MSE(model(inputs), targets).detach()

    loop(step, regression(11, 4, 1), 2, SGD(0.01, batch_size=5), model)
    assert sizes == [5, 5] * 2


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
    # In an evaluation nothing is left out.
    assert sum(len(y) for _, y in chosen.batches(5)) == 11


@pytest.mark.parametrize(
    ("make", "count", "expected"),
    [
        (normed, 11, 2),
        (normed, 10, 2),
        (normed, 8, 2),
        # It has nothing else, and is told so elsewhere.
        (normed, 1, 1),
        (lambda: SplitModel(nn.Linear(4, 4), nn.Linear(4, 1)), 11, 3),
    ],
)
def test_steps_an_epoch_equals_the_steps_of_loop(make, count, expected):
    model = make().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    sgd = SGD(0.01, batch_size=5)
    assert steps_an_epoch(model, regression(count, 4, 1), sgd) == expected
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert not any(module.training for module in model.modules())


def test_last_batches_of_one_are_dropped_in_a_cohort(caplog):
    loss, sgd, seats = MSE, SGD(0.01, 0.0, batch_size=5), range(4)
    # The last example of two is alone, at different times.
    sets = [regression(n, 4, 1) for n in (11, 11, 6, 8)]

    def work(i: int, model: SplitModel) -> float:
        torch.manual_seed(i)
        return train(model, "all", sets[i], loss, 2, sgd)

    alone, models = [normed() for _ in seats], [normed() for _ in seats]
    losses = [work(i, alone[i]) for i in seats]
    result = together([partial(work, i, models[i]) for i in seats], 4)
    assert result == pytest.approx(losses, rel=1e-5)
    for own, expected in zip(models, alone, strict=True):
        assert_near(own, expected)
    # All at the same time.
    again = [normed() for _ in seats]
    sets = [sets[0]] * 4
    together([partial(work, i, again[i]) for i in seats], 4)
    for i in (0, 1):
        assert_near(again[i], alone[i])
    assert not caplog.records


def assert_near(model: SplitModel, expected: SplitModel) -> None:
    for name, value in expected.state_dict().items():
        assert torch.allclose(model.state_dict()[name], value, rtol=1e-4), name


@pytest.mark.parametrize(("n", "size"), [(1, 5), (11, 1)])
def test_batches_of_one_only_are_an_error_before_a_batch_norm(n, size):
    args = ("all", regression(n, 4, 1), MSE, 1)
    line = f"batch-size {size} leaves one of {n} examples alone, which this model's bat"
    with pytest.raises(OneExampleError, match=line):
        train(normed(), *args, SGD(0.01, batch_size=size))


def test_dropout_is_active_before_a_trained_head():
    # As in the authors' code: the whole model is in training mode.
    torch.manual_seed(0)
    model = SplitModel(nn.Dropout(0.5), nn.Linear(50, 1, bias=False))
    zeros = []
    model.head.register_forward_hook(
        lambda module, inputs, output: zeros.append((inputs[0] == 0).float().mean())
    )
    examples = ExampleSet(torch.ones(200, 50), torch.zeros(200, 1))
    train(model, "head", examples, MSE, 1, SGD(batch_size=200))
    assert 0.45 < float(zeros[0]) < 0.55


# Numbers


@pytest.mark.parametrize("part", ["head", "representation", "all"])
def test_divergence_is_an_error_that_names_the_rate(part):
    model, examples = linear_model(4, 3, 2), regression(20, 4, 2)
    sgd = SGD(learning_rate=1e20, batch_size=5)
    with pytest.raises(TrainingDivergedError, match=r"learning-rate 1e\+20"):
        train(model, part, examples, MSE, 30, sgd)


@pytest.mark.parametrize(("kind", "lines"), [("AVX2", 1), ("AVX512", 0)])
def test_emulated_bfloat16_is_warned_about_once(kind, lines, monkeypatch, caplog):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: kind)
    warn_if_emulated.cache_clear()
    for bfloat16 in (False, True, True):
        SGD(bfloat16=bfloat16).autocast()
        assert bfloat16 or not caplog.messages
    warn_if_emulated.cache_clear()
    assert len(caplog.messages) == lines


def test_bfloat16_is_near_float32():
    losses, states = [], []
    for bfloat16 in (False, True):
        torch.manual_seed(0)
        model = build_model("digits-cnn", (1, 8, 8), 10)
        sgd = SGD(learning_rate=0.05, bfloat16=bfloat16)
        torch.manual_seed(1)
        data = images(60, 10)
        train(model, "head", data, CE, 1, sgd)
        losses.append(train(model, "all", data, CE, 2, sgd))
        states.append(state_of(model))
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[0] != losses[1]
    for name, value in states[1].items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, states[0][name], rtol=0.1, atol=0.02)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("learning_rate", (0.0, math.nan, math.inf)),
        ("momentum", (1.0, -0.1)),
        ("weight_decay", (-1e-4,)),
        ("batch_size", (0,)),
    ],
)
def test_hyper_parameters_out_of_range(code_of, name, values):
    for value in values:
        code = code_of(lambda value=value: SGD(**{name: value}))
        assert code == name.replace("_", "-")


def test_hyper_parameters_from_settings():
    settings = {"learning-rate": 0.2, "batch-size": 7, "bfloat16": True, "seed": 1}
    assert build(SGD, settings) == SGD(0.2, 0.5, 1e-4, 7, True)


# Evaluation


def test_evaluation_by_hand():
    # The outputs are the inputs. Rows: right, wrong, right, wrong; cross-entropy of two
    # outputs that differ by d: log(1 + e^-d) where the larger is right.
    model = SplitModel(nn.Identity(), nn.Identity())
    inputs = torch.tensor([[2.0, 0.0], [2.0, 0.0], [0.0, 1.0], [0.0, 3.0]])
    examples = ExampleSet(inputs, torch.tensor([0, 1, 1, 0]))
    loss, accuracy = evaluate(model, examples, CE)
    losses = [math.log(1 + math.exp(d)) for d in (-2, 2, -1, 3)]
    assert loss == pytest.approx(sum(losses) / 4)
    assert accuracy == 0.5


def test_evaluation_over_several_batches_is_a_mean_over_examples():
    # 120 examples are batches of 50, 50 and 20; the last 20 have loss 9, others 0.
    model = SplitModel(nn.Identity(), nn.Identity())
    targets = torch.zeros(120, 1)
    targets[100:] = 3
    examples = ExampleSet(torch.zeros(120, 1), targets)
    loss, accuracy = evaluate(model, examples, MSE)
    assert loss == pytest.approx(9 * 20 / 120)
    assert math.isnan(accuracy)


def test_evaluation_changes_nothing_and_uses_no_randomness():
    model = with_batch_norm_and_dropout()
    before = state_of(model)
    examples = images(70, 3, augment=True)
    results = {evaluate(model, examples, CE) for _ in range(3)}
    assert len(results) == 1
    assert same_bits(state_of(model), before)
    whole = copy.deepcopy(model).eval()
    with torch.no_grad():
        ((x, y),) = examples.batches(70)
        right = (whole(x).argmax(1) == y).float().mean()
    assert results.pop()[1] == pytest.approx(right.item())


@pytest.mark.parametrize("targets", [torch.zeros(0).long(), torch.full((3,), -100)])
def test_evaluation_without_counted_targets_is_nan(targets):
    model = SplitModel(nn.Identity(), nn.Identity())
    examples = ExampleSet(torch.ones(len(targets), 2), targets)
    results = evaluate(model, examples, CE)
    assert all(map(math.isnan, results))


def test_accuracy_is_nan_for_integers_with_one_output():
    # Counts, with one output: nothing is the largest.
    examples = ExampleSet(torch.ones(4, 2), torch.tensor([0, 3, 1, 2]))
    model = SplitModel(nn.Identity(), nn.Linear(2, 1))

    def poisson(outputs, targets):
        return nn.functional.poisson_nll_loss(outputs[:, 0], targets)

    loss, accuracy = evaluate(model, examples, poisson)
    assert math.isfinite(loss)
    assert math.isnan(accuracy)


def test_evaluation_excludes_ignored_targets(monkeypatch):
    # Sequences of two places, one example a batch. The outputs are the inputs. Counted
    # are two places of the first, right and wrong, and one of the second, right; the
    # third has none. Cross-entropy of two outputs that differ by d: log(1 + e^-d).
    inputs = torch.tensor(
        [[[2.0, 2.0], [0.0, 0.0]], [[0.0, 9.0], [1.0, 0.0]], [[5.0, 0.0], [0.0, 5.0]]]
    )
    examples = ExampleSet(inputs, torch.tensor([[0, 1], [1, -100], [-100, -100]]))
    monkeypatch.setattr("flwr_frl.task.training.local_training.EVALUATION_BATCH", 1)
    model = SplitModel(nn.Identity(), nn.Identity())
    loss, accuracy = evaluate(model, examples, CE)
    losses = [math.log(1 + math.exp(d)) for d in (-2, 2, -1)]
    assert loss == pytest.approx(sum(losses) / 3)
    assert accuracy == pytest.approx(2 / 3)
