"""Custom tasks whose parts do not fit are rejected before the first round."""

import math
import random
from copy import deepcopy

import numpy as np
import pytest
import torch
from own_tasks import examples, model
from refusals import assert_says, refusal
from small_models import same_bits
from torch import nn
from torch.nn import functional
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from flwr_frl.task import ExampleSet, ExampleTask, SplitModel


class Net(nn.Module):
    """A network of tutorials, and a function that it applies after its layers."""

    def __init__(self, behind=lambda x: x, width: int = 2):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(3, 8), nn.Linear(8, 8)
        self.fc3, self.behind = nn.Linear(8, width), behind

    def forward(self, x):
        hidden = functional.relu(self.fc2(functional.relu(self.fc1(x))))
        return self.behind(self.fc3(hidden))


class Average(nn.Module):
    """Replaces its buffer by a new tensor in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return x - self.mean


class Auxiliary(nn.Module):
    """Returns a second value in training, as Inception does."""

    def forward(self, x):
        return (x, x) if self.training else x


class Refusing(nn.Linear):
    """A layer that has no gradient."""

    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, x):
        outputs = super().forward(x)
        if outputs.requires_grad:
            outputs.register_hook(self.refuse)
        return outputs

    def refuse(self, gradient):
        raise ValueError("no gradient here")


class Squeezed(nn.Module):
    """Removes all dimensions of size 1, also that of a single example."""

    def forward(self, x):
        return x[:, :, None].squeeze()


def one(inputs: torch.Tensor, targets: torch.Tensor) -> list[ExampleSet]:
    """Return the examples of a single client."""
    return [ExampleSet(inputs, targets)]


def late(value: float) -> torch.Tensor:
    """Return inputs with a given value in a late row."""
    inputs = torch.ones(80, 3)
    inputs[78, 1] = value
    return inputs


def masked(value: float) -> SplitModel:
    """Return a model with a buffer."""
    made = model()
    made.register_buffer("mask", torch.tensor([value]))
    return made


def behind(layer: nn.Module, head: nn.Module | None = None) -> SplitModel:
    return SplitModel(layer, head or nn.Linear(3, 2))


def single() -> SplitModel:
    """Return a model with one output."""
    return behind(nn.Identity(), nn.Linear(3, 1))


def square(outputs, targets):
    return (outputs - targets).square().mean()


def headed(head: str, **net) -> dict:
    return {"model": lambda: Net(**net), "head": head}


NET, SPLIT, LAYER = Net(), model(), nn.Linear(3, 8)
CLASSES, ROWS, ZEROS = torch.tensor([0, 1]), torch.ones(80, 3), torch.zeros(80).long()
LARGE = torch.tensor([1] * 77 + [7, 0, 9])
HOLES = torch.tensor([[0.0]] * 4 + [[math.nan]] + [[0.0]] * 75)
# Targets that lack the shape (n, 1) of the model's outputs
NUMBERS = one(torch.ones(4, 3), torch.arange(4.0))
LOADER = DataLoader(TensorDataset(torch.ones(5, 3), torch.arange(5) % 2))

CHECKED = [
    # Examples
    ({"train": one(torch.ones(2, 3).double(), CLASSES)}, "(torch.float64, (2, 3))"),
    ({"train": one(torch.ones(2, 5), CLASSES)}, "(2, 5))"),
    ({"train": one(ROWS[:2], CLASSES * 7)}, "train examples of client 0: "),
    ({"train": one(ROWS, LARGE)}, "the target of row 77 is 7"),
    ({"test": one(ROWS[:2], CLASSES * 7)}, "test examples of client 0: "),
    ({"train": one(late(math.nan), ZEROS)}, "inputs of row 78"),
    (
        {"train": one(ROWS, HOLES), "model": single, "loss": mse_loss},
        "targets of row 4",
    ),
    ({"train": [[1, 2]]}, "ExampleSet"),
    ({"train": [LOADER]}, "ExampleSet"),
    ({"train": []}, "below 0"),
    ({"train": (x for x in [])}, "train is <class 'generator'>"),
    ({"train": {"north": examples(6, 0)}}, "train is <class 'dict'>"),
    ({"train": {"north": 1, "south": 2}, "test": {"north": 1}}, "['south']"),
    # Shapes of outputs and targets
    ({"train": one(ROWS[:2], torch.tensor([[0, 1], [1, 1]]))}, "targets are classes"),
    ({"classes": ("a", "b", "c")}, "has 3 names"),
    ({"classes": ("a", "b"), "train": NUMBERS}, "has 2 names"),
    (
        {"classes": ("a", "b"), "train": one(ROWS[:2], CLASSES + 1)},
        "the target of row 1 is 2",
    ),
    ({"train": NUMBERS, "loss": mse_loss, "model": single}, "as many dimensions"),
    ({"train": NUMBERS, "loss": square, "model": single}, "as many dimensions"),
    ({"model": single}, "as many dimensions"),
    # Losses
    ({"loss": lambda x, y: cross_entropy(x.detach(), y)}, "does not require grad"),
    ({"loss": lambda x, y: (x.sum(1) - y).square()}, "fails in evaluation"),
    ({"loss": lambda x, y: 0.5}, "fails in evaluation"),
    ({"loss": lambda x, y: (x - 9).log().mean()}, "first batch is nan"),
    ({"loss": nn.MSELoss}, "the loss fails"),
    # Models
    ({"model": model()}, "expected a function"),
    ({"model": dict}, "model() is {}"),
    ({"model": lambda: model().requires_grad_(False)}, "none requires a gradient"),
    ({"model": lambda: model().half()}, "16 bits"),
    ({"model": lambda: masked(-math.inf)}, "'mask' has"),
    ({"model": lambda: behind(nn.LazyLinear(3))}, "has no shape yet"),
    ({"model": lambda: behind(nn.Identity(), nn.LSTM(3, 2))}, "a tuple, "),
    ({"model": lambda: behind(Average())}, "replaces its buffer"),
    ({"model": lambda: behind(nn.Linear(3, 2), Auxiliary())}, "a tuple, "),
    ({"model": lambda: behind(Refusing())}, "no gradient here"),
    ({"model": lambda: behind(Squeezed())}, "the shape (1,)"),
    ({"model": lambda: SPLIT}, "returned before"),
    ({"model": lambda: NET, "head": "fc3"}, "returned before"),
    ({"model": lambda: SplitModel(LAYER, nn.Linear(8, 2))}, "returned before"),
    ({"weights": "strange.pth"}, "'strange.pth' cannot be read"),
    # Heads
    (headed("", width=2), "has no head named ''"),
    (headed("fc3", behind=lambda x: functional.log_softmax(x, 1)), "not the last"),
    (headed("fc3", behind=lambda x: {"logits": x}), "not the last"),
    (headed("fc2"), "not the last"),
    # Metrics
    ({"metrics": {"f1": lambda x, y: x.foo}}, "metric 'f1' fails"),
    ({"metrics": [max]}, "expected a text"),
    ({"metrics": {3: max}}, "is called 3"),
]


@pytest.mark.parametrize(("change", "part"), CHECKED)
def test_parts_that_do_not_fit_together_are_an_error(change, part):
    usual = {"model": model, "train": [examples(8, 0)], "test": [examples(4, 2)]}
    error = refusal(lambda: ExampleTask(**{**usual, **change}).check(0))
    assert part in str(error)


def test_numbers_of_inputs_and_targets_must_be_equal():
    assert_says("3 inputs and 2 targets", ExampleSet, torch.ones(3, 1), torch.ones(2))
    arrays = torch.ones(3, 1).numpy()
    assert_says("expected a tensor", ExampleSet, arrays, torch.ones(3, 1))


# Accepted


class Noisy(nn.Module):
    """Draws from all global generators, in evaluation mode as well."""

    def forward(self, x):
        factor = 1 + random.random() + np.random.random()
        return factor * x + torch.randn_like(x)


def test_check_changes_neither_models_nor_random_numbers():
    def noisy():
        layers = Noisy(), nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 4)
        return SplitModel(nn.Sequential(*layers), nn.Linear(4, 2))

    sets = [examples(8, 0), examples(12, 1)]
    task = ExampleTask(noisy, sets, sets, metrics={"top": lambda x, y: torch.rand(1)})
    model = task.scratch_model
    states = [deepcopy(state) for state in (task.initial_state, model.state_dict())]
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    for client in (0, 1):
        task.check(client)
    assert same_bits(states[0], task.initial_state)
    assert same_bits(states[1], model.state_dict())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert np.array_equal(np.random.get_state()[1], generators[2])


def scaled() -> SplitModel:
    """Return a model that shares a buffer with all others."""
    layer = nn.Linear(3, 3)
    layer.register_buffer("scale", LAYER.bias.detach())
    return behind(layer)


@pytest.mark.parametrize(
    "change",
    [
        {"model": scaled},
        {"model": lambda: Net(lambda x: x + 1e-7 * torch.randn_like(x)), "head": "fc3"},
        {"metrics": {"auc": lambda x, y: 1 / 0}},
    ],
)
def test_unusual_parts_are_accepted(change):
    usual = {"model": model, "train": [examples(8, 0)], "test": [examples(8, 2)]}
    ExampleTask(**{**usual, **change}).check(0)


# Clients after the first


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [
        (torch.full((4, 2), torch.nan), CLASSES.repeat(2)),
        (torch.zeros(4, 2), torch.tensor([0, 1, 0, 2])),
        (torch.zeros(4, 2), torch.tensor([0, 1, 0, -1])),
        (torch.zeros(4, 3), CLASSES.repeat(2)),
        (torch.zeros(4, 2, dtype=torch.float64), CLASSES.repeat(2)),
    ],
)
def test_client_with_other_invalid_examples_is_rejected(inputs, targets):
    good = torch.ones(4, 2)
    labels = CLASSES.repeat(2)
    pairs = (good, labels), (good, labels), (inputs, targets)
    sets = [ExampleSet(*pair) for pair in pairs]
    task = ExampleTask(lambda: behind(nn.Linear(2, 3)), sets, sets)
    task.check(0)
    for _ in range(2):
        # A client that failed is not remembered as accepted.
        assert_says("train examples of client 2: ", task.check, 2)
    task.check(1)
