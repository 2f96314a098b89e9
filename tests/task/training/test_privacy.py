"""Private training compared with plain training, NumPy and known values of ε."""

import math
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from refusals import assert_says, code_of, refusal
from small_models import CE, MSE, assert_close, classes, classifier, without_noise
from torch import nn

from flwr_frl.clients.fedproto import NearPrototypes
from flwr_frl.clients.flute import Penalty
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import SplitModel, build_model
from flwr_frl.task.training import privacy
from flwr_frl.task.training.local_training import TrainCall
from flwr_frl.task.training.privacy import (
    ExamplePrivacy,
    epsilon,
    sampled_batches,
    sampling,
    train_privately,
)
from flwr_frl.task.training.sgd import SGD, Proximal


def model(seed: int = 0) -> SplitModel:
    return classifier(seed, nn.LayerNorm(5))


def call_of(trained: SplitModel, part="all", **more) -> TrainCall:
    sgd = SGD(learning_rate=0.1, momentum=0.5, weight_decay=0.01, batch_size=12)
    usual = {"examples": classes(), "loss": CE, "epochs": 4, "sgd": sgd}
    usual |= {"regularizer": None, "correction": None}
    return TrainCall(trained, part, **{**usual, **more})


MASK = torch.tensor([[True, True, False]])
REGULARIZERS = {
    "none": None,
    "proximal": Proximal(0.5, {k: v + 0.1 for k, v in model(1).state_dict().items()}),
    "penalty": Penalty(0.02, 0.1, 0.3, MASK),
    "prototypes": NearPrototypes(0.7, torch.ones(3, 5), MASK[0]),
}


@pytest.mark.parametrize("part", ["all", "head", "representation"])
@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_private_training_without_noise_and_clipping_equals_plain_training(
    part, regularizer
):
    # Each batch has all examples.
    correction = {"head.bias": torch.tensor([0.1, 0.0, -0.2])}
    more = {"regularizer": REGULARIZERS[regularizer], "correction": correction}
    plain, private = model(), model()
    expected = call_of(plain, part, **more).alone()
    result = train_privately(call_of(private, part, **more), without_noise())
    assert result == pytest.approx(expected, rel=1e-5)
    assert_close(private, plain)
    # Opacus leaves no hooks or attributes behind.
    assert private.__dict__.keys() == plain.__dict__.keys()
    assert not any(p.__dict__ for p in private.parameters())
    assert not any(m._forward_hooks or m._backward_hooks for m in private.modules())


def test_unclipped_terms_do_not_depend_on_targets():
    plain, private = model(), model()
    call_of(plain, "head").alone()

    def telling(features, targets, model):
        return model.head.weight[targets].sum()

    call = call_of(private, "head", regularizer=telling)
    train_privately(call, without_noise())
    torch.testing.assert_close(private.head.weight, plain.head.weight)


@pytest.mark.parametrize(
    ("name", "channels", "side"),
    [("digits-cnn", 1, 8), ("digits-cnn", 3, 8), ("cifar10-cnn", 3, 16)],
)
def test_private_training_of_convolutions_equals_plain_training(name, channels, side):
    # Channels are last in memory in such a model, and in images.
    torch.manual_seed(0)
    plain = build_model(name, (channels, side, side), 3)
    private = deepcopy(plain)
    examples = ExampleSet(
        torch.randint(0, 256, (12, side, side, channels), dtype=torch.uint8),
        torch.arange(12) % 3,
        torch.full((channels,), 120.0),
        torch.full((channels,), 60.0),
    )
    call_of(plain, examples=examples).alone()
    train_privately(call_of(private, examples=examples), without_noise())
    for key, value in plain.state_dict().items():
        result = private.state_dict()[key]
        torch.testing.assert_close(result, value, rtol=1e-4, atol=1e-5)
        assert result.stride() == value.stride()


def test_each_example_is_clipped_over_all_trained_parameters():
    # y = x w + b from 0 with squared errors (y - t)²: gradients are −2 t (x, 1).
    x = torch.tensor([[3.0, 4.0], [0.1, 0.0], [1.0, 1.0]])
    t = torch.tensor([[5.0], [0.2], [-2.0]])
    trained = SplitModel(nn.Identity(), nn.Linear(2, 1))
    nn.init.zeros_(trained.head.weight)
    nn.init.zeros_(trained.head.bias)
    sgd = SGD(learning_rate=0.1, momentum=0.0, weight_decay=0.0, batch_size=3)
    examples = ExampleSet(x, t)
    call = call_of(trained, "head", examples=examples, loss=MSE, epochs=1, sgd=sgd)
    train_privately(call, without_noise(1.0))
    gradients = -2 * t.numpy() * np.hstack([x.numpy(), np.ones((3, 1))])
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    assert (norms > 1).tolist() == [[True], [False], [True]]
    step = -0.1 * (gradients * np.minimum(1, 1 / norms)).sum(0) / 3
    result = [*trained.head.weight[0].tolist(), trained.head.bias.item()]
    np.testing.assert_allclose(result, step, rtol=1e-5)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_clipping_is_exact_in_bfloat16(seed):
    trained = model(seed)
    before = torch.cat([p.detach().flatten().clone() for p in trained.parameters()])
    sgd = SGD(1.0, 0.0, 0.0, batch_size=1, bfloat16=True)
    call = call_of(trained, examples=classes(1), epochs=1, sgd=sgd)
    train_privately(call, without_noise(0.001))
    after = torch.cat([p.detach().flatten() for p in trained.parameters()])
    assert torch.dist(after, before).item() == pytest.approx(0.001, rel=4e-4)


class Unused(nn.Linear):
    def forward(self, x):
        return x


def test_a_parameter_without_per_example_gradients_is_an_error():
    layers = Unused(100, 100), nn.Linear(4, 5)
    trained = SplitModel(nn.Sequential(*layers), nn.Linear(5, 3))
    error = refusal(train_privately, call_of(trained), ExamplePrivacy(1.5, 2.0, 1e-5))
    assert error.code == "dp-noise"
    assert "gradients of 'representation.0.weight'" in str(error)


def quiet(width: int) -> SplitModel:
    """Return a model without gradients: weights, inputs and targets are all 0."""
    model_of_zeros = SplitModel(nn.Identity(), nn.Linear(1, width, bias=False))
    nn.init.zeros_(model_of_zeros.head.weight)
    return model_of_zeros


@pytest.mark.parametrize("rate", [1.0, 0.01])
def test_noise_has_the_right_standard_deviation_even_in_empty_batches(rate):
    width, n = 40_000, 5 if rate == 1.0 else 100
    examples = ExampleSet(torch.zeros(n, 1), torch.zeros(n, width))
    trained = quiet(width)
    sgd = SGD(0.5, 0.0, 0.0, batch_size=5 if rate == 1.0 else 1)
    call = call_of(trained, "head", examples=examples, loss=MSE, epochs=1, sgd=sgd)
    steps = sampling(n, sgd.batch_size)[1]
    train_privately(call, ExamplePrivacy(1.5, 2.0, 1e-5))
    # η z C / b in each step; 40,000 numbers determine it to 0.35 %.
    expected = 0.5 * 1.5 * 2.0 / sgd.batch_size * math.sqrt(steps)
    deviation = trained.head.weight.detach().std().item()
    assert deviation == pytest.approx(expected, rel=0.02)


def test_noise_and_batches_do_not_depend_on_the_seed():
    def trained() -> torch.Tensor:
        torch.manual_seed(0)
        trained_model = quiet(3)
        examples = ExampleSet(torch.zeros(4, 1), torch.zeros(4, 3))
        call = call_of(trained_model, "head", examples=examples, loss=MSE, epochs=1)
        train_privately(call, ExamplePrivacy(1.0, 1.0, 1e-5))
        return torch.cat([trained_model.head.weight.detach().flatten(), torch.rand(1)])

    assert not (trained() == trained()).any()


def test_each_example_is_in_a_batch_with_the_same_probability():
    n, count, sizes = 20, torch.zeros(20), []
    examples = ExampleSet(torch.arange(n)[:, None].float(), torch.zeros(n))
    torch.manual_seed(0)
    for _ in range(500):
        batches = list(sampled_batches(examples, 3))
        assert len(batches) == 7
        for inputs, targets in batches:
            assert len(inputs) == len(targets)
            count[inputs.flatten().long()] += 1
            sizes.append(len(inputs))
    # In 3,500 batches with probability 0.15, each example occurs 525 ± 21 times, and
    # batch sizes are binomial.
    assert count.min() > 525 - 5 * 21
    assert count.max() < 525 + 5 * 21
    assert np.var(sizes) == pytest.approx(20 * 0.15 * 0.85, rel=0.1)


# Privacy accounting


def test_epsilon_of_the_example_of_abadi_et_al():
    # The example of Abadi et al.: q = 0.01, σ = 4, 10,000 steps, δ = 1e-5. Their
    # moments accountant gave 1.26. The conversion of Balle et al. (2020), which
    # TensorFlow Privacy, Opacus and dp-accounting use, gives 1.0355.
    result = epsilon(((4.0, 0.01, 10_000),), 1e-5)
    assert result == pytest.approx(1.0355, abs=5e-5)
    accountant = RdpAccountant()
    event = dp_event.PoissonSampledDpEvent(0.01, dp_event.GaussianDpEvent(4.0))
    accountant.compose(event, 10_000)
    assert result == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9)


def test_steps_of_several_kinds_compose():
    from opacus.accountants import RDPAccountant  # Importing takes a second

    accountant = RDPAccountant()
    for noise, rate, steps in ((1.0, 0.1, 30), (2.0, 0.5, 4)):
        for _ in range(steps):
            accountant.step(noise_multiplier=noise, sample_rate=rate)
    result = epsilon(((1.0, 0.1, 30), (2.0, 0.5, 4)), 1e-3)
    assert result == pytest.approx(accountant.get_epsilon(1e-3), rel=1e-12)
    assert epsilon((), 1e-3) == epsilon(((1.0, 0.1, 0),), 1e-3) == 0


@pytest.mark.filterwarnings("ignore:Optimal order")
def test_epsilon_is_not_negative():
    assert epsilon(((10.0, 0.01, 10),), 0.01) == 0


# Unsupported models and targets


def test_unsupported_models_targets_and_settings_are_rejected(monkeypatch):
    dp = ExamplePrivacy(1.0, 1.0, 1e-5)
    privacy.check_model(model().eval(), dp)
    # Examples that affect each other; frozen parts are checked as well.
    for layer in (nn.BatchNorm1d(4), nn.LSTM(4, 4)):
        frozen = SplitModel(layer, nn.Linear(4, 3)).eval().requires_grad_(False)
        assert code_of(privacy.check_model, frozen, dp) == "dp-noise"
    examples = classes()
    targets = examples.targets.clone()
    targets[0] = -100
    call = call_of(model(), examples=replace(examples, targets=targets))
    assert_says("where some targets do not count", train_privately, call, dp)
    monkeypatch.setattr("flwr_frl.common.errors.find_spec", lambda name: None)
    assert ExamplePrivacy().dp_noise == 0
    assert code_of(ExamplePrivacy, 1.0, 1.0, 1e-5) == "missing-package"


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ((0.0, 0.0, 1e-5), "dp-noise"),
        ((0.0, 1.0, 0.0), "dp-noise"),
        ((1.0, 1.0, 0.0), "dp-noise"),
        ((1.0, 0.0, 1e-5), "dp-noise"),
        ((1.0, 1.0, 1.0), "dp-delta"),
        ((-1.0, 1.0, 1e-5), "dp-noise"),
        ((1e-200, 1.0, 1e-5), "dp-noise"),
    ],
)
def test_noise_clip_and_delta_are_all_positive_or_all_zero(values, code):
    assert code_of(ExamplePrivacy, *values) == code


def test_a_part_without_parameters_changes_nothing():
    trained = SplitModel(nn.Flatten(), nn.Linear(4, 3))
    before = trained.head.weight.clone()
    loss = train_privately(call_of(trained, "representation"), without_noise(1.0))
    assert loss > 0
    assert torch.equal(trained.head.weight, before)
