"""Custom tasks, created from examples or loaded by an import path."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from named_tasks import dashed
from own_tasks import examples, model, task_of
from PIL import Image
from refusals import assert_says, code_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_frl import simulate
from flwr_frl.common.settings import declared, resolve
from flwr_frl.task import ExampleTask, SplitModel
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.tasks import build_task, task_maker
from flwr_frl.task.training.local_training import evaluate, train
from flwr_frl.task.training.sgd import SGD

# Tasks from examples


def test_task_from_examples_has_the_given_parts():
    task = task_of(classes=("a", "b"))
    assert [len(task.train_examples(i)) for i in (0, 1)] == [8, 12]
    assert [len(task.test_examples(i)) for i in (0, 1)] == [4, 6]
    assert (task.classes, task.unused_settings) == (("a", "b"), {})
    # The default loss is cross-entropy: log 2 for equal outputs.
    loss = task.loss(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
    assert loss.item() == pytest.approx(0.6931, abs=1e-4)


def test_clients_may_have_names():
    sets = {"north": examples(6, 0), "south": examples(4, 1)}
    task = ExampleTask(model, sets, dict(reversed(sets.items())))
    assert task.client_names == ("north", "south")
    assert [len(task.train_examples(i)) for i in (0, 1)] == [6, 4]
    assert [len(task.test_examples(i)) for i in (0, 1)] == [6, 4]


def test_models_may_have_extra_state_and_expanded_buffers():
    class Masked(nn.Linear):
        def __init__(self):
            super().__init__(3, 8)
            self.register_buffer("mask", torch.ones(1).expand(8), persistent=False)

        def get_extra_state(self):
            return {"version": 2}

        def set_extra_state(self, state):
            pass

        def forward(self, x):
            return super().forward(x) * self.mask

    sets = [examples(6, 0)]
    task = ExampleTask(lambda: SplitModel(Masked(), nn.Linear(8, 2)), sets, sets)
    task.check(0)
    before = task.scratch_model.state_dict()["head.weight"].clone()
    args = (nn.functional.cross_entropy, 1, SGD(learning_rate=0.1))
    train(task.scratch_model, "all", task.train_examples(0), *args)
    assert not torch.equal(task.scratch_model.state_dict()["head.weight"], before)


def test_seed_determines_only_the_initial_model():
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    states = [task_of(seed=s).initial_model().state_dict() for s in (0, 0, 1)]
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(states[0][n], states[1][n]) for n in states[0])
    assert not any(torch.equal(states[0][n], states[2][n]) for n in states[0])


def test_training_the_scratch_model_does_not_change_the_initial_one():
    task = task_of()
    before = {n: v.clone() for n, v in task.initial_state.items()}
    assert task.scratch_model is task.scratch_model
    args = (nn.functional.cross_entropy, 20, SGD(learning_rate=0.1))
    train(task.scratch_model, "all", task.train_examples(1), *args)
    loss, accuracy = evaluate(task.scratch_model, task.test_examples(1), task.loss)
    assert accuracy == 1.0
    assert loss < 0.2
    assert all(torch.equal(task.initial_state[n], before[n]) for n in before)
    again = task.initial_model().state_dict()
    assert all(torch.equal(again[n], before[n]) for n in before)
    assert not torch.equal(task.scratch_model.head.weight, before["head.weight"])


# Tasks by import path


MODULE = """
import torch
from typing import Annotated
from torch import nn
from flwr_frl.task import ExampleSet, ExampleTask, SplitModel, setting

CALLS = []

def sensors(
    num_clients,
    *,
    noise: Annotated[float, setting(ge=0)] = 0.25,
    seed: Annotated[int, setting(ge=0)] = 0,
    hidden=3,
):
    CALLS.append((num_clients, noise, seed, hidden))
    one = ExampleSet(torch.ones(2, hidden), torch.ones(2, 1))
    return ExampleTask(
        lambda: SplitModel(nn.Identity(), nn.Linear(hidden, 1)),
        [one] * max(num_clients, 1),
        [one] * max(num_clients, 1),
        nn.functional.mse_loss,
        seed=seed,
    )

def alone():
    return sensors(1)

def unseeded(num_clients, seed_of=None):
    one = ExampleSet(torch.ones(2, 3), torch.ones(2, 1))
    build = lambda: SplitModel(nn.Identity(), nn.Linear(3, 1))
    return ExampleTask(
        build, [one] * 2, [one] * 2, nn.functional.mse_loss, seed=seed_of
    )

COMMON = unseeded(2)
COMMON.initial_state

def common():
    return COMMON

def seeded_by_itself():
    return unseeded(2, 1)

class Sensors(ExampleTask):
    def __init__(self, num_clients, width: Annotated[int, setting(ge=1)] = 2):
        one = ExampleSet(torch.ones(2, width), torch.zeros(2, dtype=torch.int64))
        build = lambda: SplitModel(nn.Identity(), nn.Linear(width, 2))
        super().__init__(build, [one] * num_clients, [one] * num_clients)

class Halfway:
    classes = ()
    loss = staticmethod(nn.functional.mse_loss)

    def initial_model(self):
        return SplitModel(nn.Identity(), nn.Linear(1, 1))

    def train_examples(self, client):
        return ExampleSet(torch.ones(2, 1), torch.ones(2, 1))

    test_examples = train_examples

def nothing():
    pass

def words(num_clients):
    return {"model": "a model"}

number = 7
"""


@pytest.fixture
def own(write_module):
    """Return a function that resolves settings of a task in an external module."""
    module = write_module("own_tasks", MODULE)

    def settings(name: str, **more):
        path = f"{module}:{name}"
        settings = {"task": path, **dashed(more)}
        return resolve(settings, lambda _: [task_maker(path)])

    return settings


def calls_of(settings) -> list[tuple]:
    """Return the arguments of all calls of the module's function."""
    return task_maker(settings["task"]).__globals__["CALLS"]


def test_a_function_is_called_with_its_settings_and_the_number_of_clients(own):
    settings = declared(task_maker(own("sensors")["task"]))
    assert settings.keys() == {"noise", "seed"}
    task = build_task(own("sensors", noise=2, seed=7, momentum=0.1), 5)
    assert isinstance(task, ExampleTask)
    assert len(task.train) == 5
    # Omitted settings have their defaults, and undeclared ones are not passed.
    default = build_task(own("sensors"), 0)
    assert default.initial_model().head.in_features == 3
    assert calls_of(own("sensors")) == [(5, 2.0, 7, 3), (0, 0.25, 0, 3)]


def test_initial_model_uses_the_seed_of_the_run_unless_the_task_sets_one(own):
    def weight_of(function: str, **run: int) -> torch.Tensor:
        return build_task(own(function, **run), 2).initial_state["head.weight"]

    first, second = weight_of("unseeded"), weight_of("unseeded", seed=1)
    assert not torch.equal(first, second)
    # Without a run, the seed is 0.
    common = task_maker(own("common")["task"])()
    assert torch.equal(first, common.initial_state["head.weight"])
    # One task object serves all runs, and was used before.
    assert torch.equal(weight_of("common"), first)
    assert torch.equal(weight_of("common", seed=1), second)
    assert common.seed is None
    # The task defines its own seed.
    assert torch.equal(weight_of("seeded_by_itself"), second)
    assert torch.equal(weight_of("seeded_by_itself", seed=2), second)


def test_task_may_be_a_function_without_arguments_or_a_class(own):
    assert len(build_task(own("alone"), 9).train) == 1
    task = build_task(own("Sensors", width=6), 3)
    assert type(task).__name__ == "Sensors"
    assert len(task.train) == 3
    assert task.initial_state["head.weight"].shape == (2, 6)


@pytest.mark.parametrize("name", ["nothing", "words", "Halfway"])
def test_function_that_returns_no_task_is_an_error(own, name):
    assert code_of(build_task, own(name), 2) == "task"


def test_paths_to_something_else_and_invalid_settings_are_an_error(own, write_module):
    module = write_module("own_tasks", MODULE)
    for path in (f"{module}:number", f"{module}:sensor", "no_tasks:f"):
        assert code_of(build_task, resolve({"task": path}), 2) == "task"
    assert code_of(build_task, own("sensors", noise=-1.0), 2) == "noise"
    assert code_of(own, "sensors", noise="loud") == "noise"
    assert code_of(own, "sensors", nois=1.0) == "setting"


def test_a_task_is_a_function_or_its_path(write_module, tmp_path):
    path = f"{write_module('own_tasks', MODULE)}:unseeded"
    more = {"clients": 2, "rounds": 1, "fraction": 1.0, "output": str(tmp_path)}
    run = simulate("fedrep", "inline", task=task_maker(path), **more)
    same = simulate("fedrep", "inline", task=path, **more)
    assert run.summary["loss"] == same.summary["loss"]
    assert code_of(simulate, "fedrep", "inline", task=task_of(), **more) == "task"
    assert code_of(simulate, "fedrep", "ray", task="__main__:mine", **more) == "task"


# Models, weights and metrics


def whole() -> nn.Module:
    return nn.Sequential(
        OrderedDict(body=nn.Linear(3, 4), relu=nn.ReLU(), out=nn.Linear(4, 2))
    )


def test_any_module_may_be_split_at_a_named_head_and_load_weights(tmp_path):
    sets = [examples(8, 0)]
    task = ExampleTask(whole, sets, sets, head="out")
    names = ["representation.body.weight", "representation.body.bias"]
    assert list(task.initial_state) == [*names, "head.weight", "head.bias"]
    torch.manual_seed(3)
    state = whole().state_dict()
    torch.save(state, tmp_path / "w.pth")
    task = ExampleTask(whole, sets, sets, head="out", weights=str(tmp_path / "w.pth"))
    for ours, theirs in (("representation.body", "body"), ("head", "out")):
        value = task.initial_state[f"{ours}.weight"]
        assert torch.equal(value, state[f"{theirs}.weight"])


def test_lines_of_input_are_read_as_tensors():
    task = task_of()
    assert task.read("1, 2.5,-3").tolist() == [1.0, 2.5, -3.0]
    assert_says("'x'; expected numbers and commas", task.read, "1,x")
    lengths = task_of(reader=lambda line: torch.tensor([float(len(line))]))
    assert lengths.read("abc").tolist() == [3.0]


# Data sets of PyTorch and Hugging Face


def test_data_set_of_torch_is_converted():
    dataset = TensorDataset(
        torch.arange(6).view(3, 2).double(), torch.tensor([0, 2, 1])
    )
    data = ExampleSet.from_dataset(dataset)
    assert data.inputs.dtype == torch.float32
    assert data.inputs.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert data.targets.dtype == torch.int64
    assert data.targets.tolist() == [0, 2, 1]


class Indexed:
    """A map-style data set of pairs, without ``__iter__``."""

    def __init__(self, rows, length):
        self.rows, self.length = rows, length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        return self.rows[i]


class Endless(Indexed):
    def __getitem__(self, i):
        return [float(i)], i % 2


@pytest.mark.parametrize("kind", [Indexed, Endless])
@pytest.mark.parametrize("keep", [list, lambda rows: dict(enumerate(rows))])
def test_the_length_of_a_data_set_is_the_number_of_its_examples(kind, keep):
    rows = keep([([float(i)], i % 2) for i in range(10)])
    data = ExampleSet.from_dataset(kind(rows, 8))
    assert data.inputs.flatten().tolist() == list(range(8))
    loaded = DataLoader(kind(rows, 8), batch_size=8)
    assert torch.equal(next(iter(loaded))[1], data.targets)


def test_data_set_of_hugging_face_is_converted():
    # Its examples are mappings to lists, numbers and Pillow images.
    rows = [{"tokens": [1, 2], "score": 0.5}, {"tokens": [3, 4], "score": 1.5}]
    data = ExampleSet.from_dataset(rows, "tokens", "score")
    assert data.inputs.dtype == torch.int64
    assert data.targets.tolist() == [[0.5], [1.5]]
    pixels = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    rows = [{"image": Image.fromarray(pixels), "label": 1}]
    std = torch.tensor([2.0, 2.0, 2.0])
    data = ExampleSet.from_dataset(rows, "image", "label", mean=torch.zeros(3), std=std)
    ((inputs, targets),) = data.batches(5)
    assert torch.equal(inputs[0], torch.from_numpy(pixels).permute(2, 0, 1) / 2)
    assert targets.tolist() == [1]
    # Several columns are stacked as inputs.
    rows = [{"ids": [5, 6], "mask": [1, 0], "label": 1}]
    data = ExampleSet.from_dataset(rows, ["ids", "mask"], "label")
    assert data.inputs.tolist() == [[[5, 6], [1, 0]]]
