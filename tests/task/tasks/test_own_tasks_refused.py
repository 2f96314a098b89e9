"""Custom tasks whose parts do not fit are rejected before the first round."""

import math
import random
from copy import deepcopy

import numpy as np
import pytest
import torch
from own_tasks import examples, model
from refusals import assert_says
from small_models import same_bits
from torch import nn

from flwr_frl.common.settings import SettingsError
from flwr_frl.task import ExampleTask, SplitModel
from flwr_frl.task.examples import ExampleSet


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


def one(inputs: torch.Tensor, targets: torch.Tensor) -> list[ExampleSet]:
    """Return the examples of a single client."""
    return [ExampleSet(inputs, targets)]


# Targets that lack the shape (n, 1) of the model's outputs
NUMBERS = one(torch.ones(4, 3), torch.arange(4.0))


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


class Stateful(nn.LSTM):
    """Begins with the hidden state of its last call."""

    def __init__(self) -> None:
        super().__init__(3, 3, batch_first=True)
        self.hidden = None

    def forward(self, x):
        outputs, (hidden, cell) = super().forward(x[:, None], self.hidden)
        self.hidden = hidden.detach(), cell.detach()
        return outputs[:, -1]


class Bag(nn.Module):
    """Returns the mean of the embeddings of tokens."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 3, sparse=sparse)

    def forward(self, x):
        return self.embed(x).mean(1)


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


TOKENS = one(torch.arange(8).reshape(4, 2), torch.arange(4) % 2)
MSE, CE = nn.functional.mse_loss, nn.functional.cross_entropy
BCE = nn.functional.binary_cross_entropy_with_logits
CLASSES, ROWS, ZEROS = torch.tensor([0, 1]), torch.ones(80, 3), torch.zeros(80).long()
LARGE = torch.tensor([1] * 77 + [7, 0, 9])
HOLES = torch.tensor([[0.0]] * 4 + [[math.nan]] + [[0.0]] * 75)
FLOATS = one(torch.ones(2, 3).double(), CLASSES)
BAGS = one(torch.tensor([[1], [2], [10], [3]]), torch.arange(4) % 2)


def single(layer: nn.Module | None = None) -> SplitModel:
    """Return a model with one output."""
    return SplitModel(layer or nn.Identity(), nn.Linear(3, 1))


def behind(layer: nn.Module, head: nn.Module | None = None) -> SplitModel:
    return SplitModel(layer, head or nn.Linear(3, 2))


def binary(outputs, targets):
    return BCE(outputs[:, 0], targets.float())


CHECKED = [
    # Examples that the model or the loss rejects
    ({"train": FLOATS}, "refuses inputs of type float64"),
    ({"train": one(torch.ones(2, 5), CLASSES)}, "and shape (2, 5)"),
    ({"train": one(ROWS[:2], CLASSES * 7)}, "train examples of client 0: row 1: the l"),
    ({"test": one(ROWS[:2], CLASSES * 7)}, "test examples of client 0: row 1: the los"),
    ({"train": one(ROWS, LARGE)}, "the target of row 77 is 7"),
    ({"test": one(ROWS, torch.tensor([0, -100] * 39 + [0, -1]))}, "of row 79 is -1"),
    ({"train": one(late(math.nan), ZEROS)}, "row 78 are not finite"),
    ({"train": one(late(math.nan).flip(0), ZEROS)}, "row 1 are not"),
    (
        {"train": one(ROWS, HOLES), "model": single, "loss": MSE},
        "the targets of row 4 are not finite; the loss of the first batch is nan",
    ),
    ({"train": one(ROWS[:2] * math.nan, CLASSES)}, "inputs of row 0 are not finite"),
    (
        {"train": BAGS, "model": lambda: behind(Bag(sparse=False))},
        "row 2: the model refuses inputs of type int64 and shape (4, 1): index out of",
    ),
    # Integers of the outputs' shape
    (
        {
            "train": one(ROWS[:2], torch.tensor([[0, 1], [1, 1]])),
            "loss": lambda x, y: BCE(x, y.float()),
        },
        "integers are classes, so the targets of several labels or numbers must be fl",
    ),
    ({"train": [[1, 2]]}, "the train examples are a list; they must be an ExampleSet"),
    ({"train": []}, "the task's train has examples of 0 clients"),
    ({"test": []}, "the task's test has examples of 0 clients"),
    # Classes
    ({"classes": ("a", "b", "c")}, "the model has 2 outputs; of 3 classes"),
    (
        {"classes": ("a", "b"), "model": single, "loss": binary},
        "the model has 1 outputs; of 2 classes",
    ),
    ({"classes": ("one",), "loss": lambda x, y: x.mean()}, "of row 1 is 1; of 1 class"),
    (
        {"classes": ("a", "b"), "train": one(ROWS[:2], torch.tensor([1, 2]))},
        "train examples of client 0: the target of row 1 is 2; of 2 classes",
    ),
    # Models
    ({"model": lambda: model().requires_grad_(False)}, "does not require a gradient"),
    ({"model": lambda: model().half()}, "is float16; expected float32"),
    ({"model": lambda: masked(-math.inf)}, "the model's 'mask' is not finite"),
    ({"model": lambda: behind(nn.Identity(), nn.LSTM(3, 2))}, "returns a tuple"),
    ({"model": lambda: behind(nn.LazyLinear(3))}, "ation.weight' has no shape yet"),
    ({"model": lambda: behind(Average())}, "replaces its buffer 'representation.mean'"),
    ({"model": lambda: behind(Auxiliary())}, "the representation returns a tuple"),
    (
        {"model": lambda: behind(nn.Linear(3, 2), Auxiliary())},
        "the model returns a tuple in training mode and a tensor in evaluation mode",
    ),
    (
        {"model": lambda: behind(Stateful())},
        "two calls of SplitModel with the same inputs and random numbers differ",
    ),
    # Training steps, and batches of one example
    (
        {"model": lambda: behind(Bag(sparse=True)), "train": TOKENS},
        "the gradient of 'representation.embed.weight' is sparse; expected dense",
    ),
    ({"model": lambda: behind(Refusing())}, "a training step fails: no gradient here"),
    (
        {"model": lambda: behind(Squeezed())},
        "outputs of shape (8, 2) for 8 examples and of shape (2,) for one; expected",
    ),
    (
        {"loss": lambda x, y: BCE(x[:, :1].squeeze(), y.float())},
        "the loss refuses outputs of type float32 and shape (1, 2)",
    ),
    # Losses
    ({"train": NUMBERS, "loss": MSE}, "Using a target size"),
    ({"train": NUMBERS, "loss": lambda x, y: nn.L1Loss()(x[:, :1], y)}, "(4, 2) and"),
    ({"loss": lambda x, y: CE(x.detach(), y)}, "the loss has no gradient"),
    ({"loss": lambda x, y: (x.sum(1) - y).square()}, "of a batch is shape (8,)"),
    ({"loss": nn.MSELoss}, "loss is the class MSELoss; expected a function, such as"),
    ({"loss": lambda x, y: 0.5}, "the loss of a batch is 0.5; expected a tensor of"),
    ({"loss": lambda x, y: (x - 9).log().mean()}, "the first batch is nan"),
    # Metrics
    ({"metrics": {"m": lambda x, y: 1e39}}, "metric 'm' is 1e+39; expected at most"),
    ({"metrics": {"f1": lambda x, y: x}}, "metric 'f1' is tensor("),
    ({"metrics": {"f1": lambda x, y: x.foo}}, "metric 'f1' refuses outputs"),
    # Arguments of wrong types
    ({"model": model()}, "model is a SplitModel; expected a function"),
    ({"metrics": [max]}, "metrics is a list"),
    ({"weights": "strange.pth"}, "weights is 'strange.pth'; there is no such file"),
    ({"train": (x for x in [])}, "train is a generator; expected a sequence"),
    ({"test": None}, "test is a NoneType; expected a sequence"),
    ({"classes": 3}, "classes is of type int; expected a tuple"),
    ({"classes": None}, "classes is of type NoneType; expected a tuple"),
    ({"metrics": {3: max}}, "a metric is called 3; expected a string"),
    ({"metrics": {"": max}}, "a metric is called ''; expected a string"),
]


@pytest.mark.parametrize(("change", "line"), CHECKED)
def test_parts_that_do_not_fit_together_are_an_error(change, line):
    usual = {"model": model, "train": [examples(8, 0)], "test": [examples(4, 2)]}
    with pytest.raises(SettingsError) as caught:
        ExampleTask(**{**usual, **change}).check(0)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value).replace("\n ", "")


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


def test_unusual_values_are_accepted_if_model_and_loss_handle_them():
    missing = ExampleSet(late(math.nan), torch.tensor([0, -1] * 40))

    def masked(outputs, targets):
        there = targets >= 0
        return nn.functional.cross_entropy(outputs[there], targets[there])

    class Filled(nn.Linear):
        def forward(self, x):
            return super().forward(x.nan_to_num())

    def filled():
        return SplitModel(Filled(3, 4), nn.Linear(4, 2))

    task = ExampleTask(filled, [missing], [missing], loss=masked)
    task.check(0)


def test_numbers_of_inputs_and_targets_must_be_equal():
    line = "there are 3 inputs and 2 targets; there"
    assert_says(line, ExampleSet, torch.ones(3, 1), torch.ones(2, 1))
    arrays = torch.ones(3, 1).numpy()
    assert_says("inputs is of type ndarray", ExampleSet, arrays, torch.ones(3, 1))
