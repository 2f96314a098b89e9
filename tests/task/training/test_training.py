"""Local training and evaluation compared with NumPy and hand-computed steps."""

import math

import numpy as np
import pytest
import torch
from small_models import (
    MSE,
    linear_model,
    regression,
    same_bits,
    scalar_model,
    state_of,
)

from flwr_frl.common.errors import TrainingDivergedError
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import SplitModel
from flwr_frl.task.training.local_training import train
from flwr_frl.task.training.sgd import SGD, Proximal, loop

# Hand-computed steps


def numpy_training(
    state: dict[str, np.ndarray],
    trained: tuple[str, ...],
    x: np.ndarray,
    y: np.ndarray,
    epochs: int,
    sgd: SGD,
    terms: dict,
) -> dict[str, np.ndarray]:
    """Run full-batch SGD on the mean squared error of a two-layer linear model.

    ``terms`` has ``extra`` terms of gradients, and an ``anchor`` with its ``weight``.
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
def test_training_matches_numpy(part, weight):
    # Corrections and the anchor are part of the gradient, to which momentum and decay
    # are applied. A parameter may have neither.
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


def test_regularizer_is_trained_but_not_reported():
    # The loss is 0, since targets equal the outputs. The regularizer 5 h has slope 5:
    # h = 0 - 0.1 * 5 = -0.5, then -1. Its last value, -2.5, is not reported.
    model = scalar_model(0.0, 0.0)
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


# Terms of FedProx and SCAFFOLD


def test_correction_is_added_to_the_gradient_in_every_step():
    # x = 2, y = 10, b = 1 is frozen: loss (2 w - 10)², slope 4 (2 w - 10). The
    # correction is -3. From w = 3 at rate 0.01, slopes are -16 - 3 and then,
    # at w = 3.19, 4 (6.38 - 10) - 3 = -17.48, so w = 3.3648.
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
    # PyTorch's generator shuffles each epoch differently.
    assert len({tuple(epoch) for epoch in epochs}) == 3
    first, seen = seen, []
    torch.manual_seed(0)
    loop(step, examples, 3, SGD(batch_size=3))
    assert seen == first


def test_loop_returns_the_mean_over_examples_of_the_last_epoch():
    # Batches have 2 and 1 examples; losses are 1, 2 in the first epoch and 3, 4 in the
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
    # The third epoch did not start.
    assert list(losses) == [1.0, 1.0]
