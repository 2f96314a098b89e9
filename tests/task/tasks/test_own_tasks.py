"""A task of one's own: from examples that are there, or by an import path."""

import re

import pytest
import torch
from torch import nn

from task import ExampleTask, SplitModel
from task.examples import ExampleSet
from task.settings import SettingsError, declared, resolve
from task.tasks import build_task, task_maker
from task.training import SGD, evaluate, train


def examples(n: int, seed: int) -> ExampleSet:
    """Two classes apart along the first of three inputs."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.arange(n) % 2
    inputs = torch.randn(n, 3, generator=generator)
    inputs[:, 0] += 6.0 * targets - 3
    return ExampleSet(inputs, targets)


def model() -> SplitModel:
    return SplitModel(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 2))


def task_of(**more) -> ExampleTask:
    train_sets = [examples(8, 0), examples(12, 1)]
    test_sets = [examples(4, 2), examples(6, 3)]
    return ExampleTask(model, train_sets, test_sets, **more)


# From examples


def test_a_task_from_examples_has_what_it_was_given():
    task = task_of()
    assert [len(task.train_examples(i)) for i in (0, 1)] == [8, 12]
    assert [len(task.test_examples(i)) for i in (0, 1)] == [4, 6]
    assert task.train_examples(1) is task.train[1]
    assert task.classes == ()
    assert task.idle_settings == {}
    # Cross-entropy unless another loss is given: of equal outputs log 2.
    loss = task.loss(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
    assert loss.item() == pytest.approx(0.6931, abs=1e-4)
    other = task_of(loss=nn.functional.mse_loss, classes=("a", "b"))
    assert other.loss(torch.zeros(2), torch.tensor([1.0, 3.0])).item() == 5.0
    assert other.classes == ("a", "b")


def test_the_seed_fixes_the_initial_model_and_nothing_else():
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    states = [task_of(seed=s).initial_model().state_dict() for s in (0, 0, 1)]
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(states[0][n], states[1][n]) for n in states[0])
    assert not any(torch.equal(states[0][n], states[2][n]) for n in states[0])


def test_training_the_scratch_model_leaves_the_initial_one():
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


# By an import path

MODULE = """
import torch
from typing import Annotated
from torch import nn
from task import ExampleSet, ExampleTask, Range, SplitModel

CALLS = []

def sensors(
    num_clients,
    *,
    noise: Annotated[float, Range("[0, inf)")] = 0.25,
    seed: Annotated[int, Range("[0, inf)")] = 0,
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

class Sensors(ExampleTask):
    def __init__(self, num_clients, width: Annotated[int, Range("[1, inf)")] = 2):
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
    """Settings of a task in an outsider's module, all those that it declares."""
    module = write_module("own_tasks", MODULE)

    def settings(name: str, **more):
        path = f"{module}:{name}"
        names = {n.replace("_", "-"): value for n, value in more.items()}
        return resolve({"task": path, **names}, [task_maker(path)])

    return settings


def calls_of(settings) -> list[tuple]:
    """Return what the module's function has been called with."""
    return task_maker(settings["task"]).__globals__["CALLS"]


def test_a_function_is_called_with_its_settings_and_the_number_of_clients(own):
    found = declared(task_maker(own("sensors")["task"]))
    assert found.keys() == {"noise", "seed"}
    task = build_task(own("sensors", noise=2, seed=7, momentum=0.1), 5)
    assert isinstance(task, ExampleTask)
    assert len(task.train) == 5
    # The default of what was not given; what it does not declare it does not get.
    default = build_task(own("sensors"), 0)
    assert default.initial_model().head.in_features == 3
    assert calls_of(own("sensors")) == [(5, 2.0, 7, 3), (0, 0.25, 0, 3)]


def test_a_function_is_called_once_for_the_same_settings(own):
    first = build_task(own("sensors", noise=1.0), 2)
    assert build_task(own("sensors", noise=1.0, momentum=0.9), 2) is first
    assert build_task(own("sensors", noise=1.5), 2) is not first
    assert len(calls_of(own("sensors"))) == 2


def test_a_function_without_arguments_and_a_class(own):
    assert len(build_task(own("alone"), 9).train) == 1
    task = build_task(own("Sensors", width=6), 3)
    assert type(task).__name__ == "Sensors"
    assert len(task.train) == 3
    assert task.initial_state["head.weight"].shape == (2, 6)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("nothing", "made a NoneType without 'initial_model'"),
        ("words", "made a dict without 'initial_model'"),
        # What clients need besides, and a BaseTask has.
        ("Halfway", "made a Halfway without 'initial_state'"),
    ],
)
def test_a_function_that_returns_no_task(own, name, line):
    settings = own(name)
    message = f"task '{settings['task']}' {line}; it must be a Task, for example an "
    with pytest.raises(SettingsError, match=f"^{message}ExampleTask$"):
        build_task(settings, 2)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("{own}:number", "names 7; it must be a function that returns a task"),
        ("{own}:sensor", "cannot be imported: module '{own}' has no 'sensor'"),
        ("no_tasks:f", "cannot be imported: ModuleNotFoundError: No module named 'no"),
    ],
)
def test_a_path_that_names_no_task(write_module, path, line):
    own = write_module("own_tasks", MODULE)
    path, line = path.format(own=own), line.format(own=own)
    with pytest.raises(
        SettingsError, match=re.escape(f"task {path!r} {line}")
    ) as error:
        build_task(resolve({"task": path}), 2)
    assert "\n" not in str(error.value)


def test_a_module_that_breaks_when_it_is_imported(write_module):
    name = write_module("broken_tasks", "raise RuntimeError('no sensor\\nhere')")
    line = f"task '{name}:f' cannot be imported: RuntimeError: no sensor here"
    with pytest.raises(SettingsError, match=f"^{line}$"):
        build_task(resolve({"task": f"{name}:f"}), 2)


def test_settings_of_an_own_task_are_checked_like_ours(own):
    with pytest.raises(SettingsError, match=r"^noise is -1.0; it must be at least 0$"):
        build_task(own("sensors", noise=-1.0), 2)
    with pytest.raises(
        SettingsError, match="noise is 'loud'; it must be of type float"
    ):
        own("sensors", noise="loud")
    with pytest.raises(
        SettingsError, match="unknown setting 'nois'; did you mean 'noi"
    ):
        own("sensors", nois=1.0)
