"""Typical user code (networks, loaders, tables), and errors for unsuitable parts."""

import numpy as np
import pytest
import torch
from refusals import assert_says, refusal
from small_models import same_bits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from flwr_frl import simulate
from flwr_frl.common.settings import require
from flwr_frl.task import ExampleSet, ExampleTask, SplitModel
from flwr_frl.task.training import SGD, train


class Net(nn.Module):
    """A typical network of tutorials."""

    def __init__(self, behind=lambda x: x, width: int = 2):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 8)
        self.fc3, self.behind = nn.Linear(8, width), behind

    def forward(self, x):
        hidden = functional.relu(self.fc2(functional.relu(self.fc1(x))))
        return self.behind(self.fc3(hidden))


def examples(n: int = 6) -> ExampleSet:
    generator = torch.Generator().manual_seed(0)
    return ExampleSet(torch.randn(n, 4, generator=generator), torch.arange(n) % 2)


def task_of(model, head: str = "fc3", **more) -> ExampleTask:
    sets = [examples(), examples()]
    return ExampleTask(
        **{"model": model, "train": sets, "test": sets, **more}, head=head
    )


LAYER = nn.Linear(4, 8)
NET, SPLIT = Net(), SplitModel(nn.Linear(4, 8), nn.Linear(8, 2))
REUSED = "with parameters that it has returned before"


def view_of(layer: nn.Linear) -> nn.Linear:
    view = nn.Linear(4, 8)
    view.weight = nn.Parameter(layer.weight.detach())
    return view


@pytest.mark.parametrize(
    ("model", "head", "line"),
    [
        (lambda: Net(lambda x: functional.log_softmax(x, 1)), "fc3", "not the last"),
        (lambda: Net(lambda x: x.squeeze(1), 1), "fc3", "is not the last"),
        (lambda: Net(lambda x: {"logits": x}), "fc3", "is not the last"),
        # A layer in the middle, with a matching and with another width
        (Net, "fc2", "head is 'fc2', which is not the last"),
        (Net, "fc1", "head is 'fc1', which is not the last"),
        # A function that returns the same model, a layer of another one, or its memory
        (lambda: NET, "fc3", REUSED),
        (lambda: SPLIT, "", REUSED),
        (lambda: SplitModel(LAYER, nn.Linear(8, 2)), "", REUSED),
        (lambda: SplitModel(view_of(LAYER), nn.Linear(8, 2)), "", REUSED),
    ],
)
def test_unsuitable_heads_and_models_are_an_error(model, head, line):
    assert_says(line, task_of(model, head).check, 0)


@pytest.mark.parametrize("noise", [torch.randn_like, lambda x: np.random.random()])
def test_forward_may_be_random_but_keeps_no_state(noise):
    class Noisy(Net):
        def forward(self, x):
            return super().forward(x + noise(x))

    class Counting(Net):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x + self.calls)

    task_of(Noisy).check(0)
    assert_says("forward must keep no state, such as that", task_of(Counting).check, 0)


def test_few_models_are_created():
    models = []

    def model():
        models.append(1)
        return Net()

    task = task_of(model)
    initial = {name: value.clone() for name, value in task.initial_state.items()}
    with torch.no_grad():
        task.scratch_model.head.weight.zero_()
    assert len(models) == 1
    assert same_bits(task.initial_state, initial)
    for client in (0, 1, 0, 1):
        task.check(client)
    # A second one is created to check the head.
    assert len(models) == 2


def test_models_may_share_buffers():
    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(4, 8)
            self.register_buffer("scale", LAYER.bias.detach())

    task_of(lambda: SplitModel(Scaled(), nn.Linear(8, 2)), "").check(0)


def test_models_may_have_extra_state_and_expanded_buffers():
    class Masked(nn.Linear):
        def __init__(self):
            super().__init__(4, 8)
            self.register_buffer("mask", torch.ones(1).expand(8), persistent=False)

        def get_extra_state(self):
            return {"version": 2}

        def set_extra_state(self, state):
            pass

        def forward(self, x):
            return super().forward(x) * self.mask

    task = task_of(lambda: SplitModel(Masked(), nn.Linear(8, 2)), "")
    task.check(0)
    before = task.scratch_model.state_dict()["head.weight"].clone()
    args = (functional.cross_entropy, 1, SGD(learning_rate=0.1))
    train(task.scratch_model, "all", task.train_examples(0), *args)
    assert not torch.equal(task.scratch_model.state_dict()["head.weight"], before)


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0])),
        # A loss of 0, losses of pairs, and a loss for a fixed batch size
        lambda outputs, targets: (outputs - outputs.detach()).abs().mean(),
        lambda outputs, targets: (outputs @ outputs.T).logsumexp(1).mean(),
        lambda outputs, targets: (
            (torch.cdist(outputs, outputs) * (targets[:, None] == targets)).sum()
            / len(targets)
        ),
        lambda outputs, targets: -torch.corrcoef(outputs.T)[0, 1],
        lambda outputs, targets: (outputs[:, 0] * torch.arange(6)).mean(),
    ],
)
def test_loss_that_is_not_a_sum_is_accepted(loss):
    task_of(Net, loss=loss).check(0)

    def normed():
        return SplitModel(nn.Sequential(Net(), nn.BatchNorm1d(2)), nn.Linear(2, 2))

    task_of(normed, "", loss=loss).check(0)


def square(outputs, targets):
    return (outputs - targets).square().mean()


def near(outputs, targets):
    return ((outputs - targets).abs() < 0.2).float().mean()


def gaussian(outputs, targets):
    mean, deviation = outputs[:, :1], outputs[:, 1:].exp()
    return (deviation.log() + ((mean - targets) / deviation).square()).mean()


def numbers(n: int, *shape: int) -> list[ExampleSet]:
    return [ExampleSet(torch.randn(n, 4), torch.randn(n, *shape))]


def sum_of(outputs, targets):
    return functional.cross_entropy(outputs, targets) * len(targets)


def flat():
    class Flat(nn.Linear):
        def forward(self, x):
            return super().forward(x).squeeze(1)

    return SplitModel(nn.Linear(4, 4), Flat(4, 1))


def single():
    return Net(width=1)


BROADCAST, SUM = (
    "the loss compares each output with the targets of all ",
    "twice the loss",
)
NEAR = {"loss": lambda x, y: square(x[:, 0], y), "metrics": {"near": near}}
COUNTS = [ExampleSet(torch.randn(6, 4), torch.arange(6))]
ONES = [ExampleSet(torch.ones(4, 4), torch.ones(4, 1))]


@pytest.mark.parametrize(
    ("model", "train", "more", "line"),
    [
        (single, numbers(6), {"loss": square}, BROADCAST),
        (Net, numbers(6), {"loss": gaussian}, "expected targets of shape (6, 1)"),
        (single, numbers(6), NEAR, "metric 'near' compares each output with the"),
        (single, COUNTS, {"loss": square}, BROADCAST),
        (flat, numbers(6, 1), {"loss": square}, "expected targets of shape (6,)"),
        (single, ONES, {}, "the loss is cross-entropy and the model has one output"),
        (Net, [examples()], {"loss": nn.CrossEntropyLoss(reduction="sum")}, SUM),
        (Net, [examples()], {"loss": sum_of}, SUM),
    ],
)
def test_unsuitable_losses_are_an_error(model, train, more, line):
    head = "" if model is flat else "fc3"
    task = task_of(model, head, train=train, test=train, **more)
    assert_says(line, task.check, 0)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: square(x[:, 0], y),
        lambda x, y: square(x, y[:, None]),
        # Losses of the whole batch
        lambda x, y: square(x.mean(), y.mean()),
        lambda x, y: x.square().mean(),
    ],
)
def test_losses_may_align_outputs_and_targets(loss):
    def bias(outputs, targets):
        return outputs.mean() - targets.mean()

    sets = numbers(6)
    more = {"train": sets, "test": sets, "metrics": {"bias": bias}}
    task_of(single, loss=loss, **more).check(0)
    task_of(flat, "", train=sets, test=sets, loss=square).check(0)


def test_clients_may_have_names(tmp_path):
    sets = {"north": examples(6), "south": examples(4)}
    task = task_of(Net, train=sets, test=dict(reversed(sets.items())))
    assert task.client_names == ("north", "south")
    assert [len(task.train_examples(i)) for i in (0, 1)] == [6, 4]
    assert [len(task.test_examples(i)) for i in (0, 1)] == [6, 4]
    north = {"north": examples()}
    assert_says("client 'south' is in one of", task_of, Net, train=sets, test=north)
    assert_says("train is a mapping; train and test must", task_of, Net, train=sets)


def test_loaders_are_an_error_and_their_datasets_are_converted():
    data = TensorDataset(torch.randn(5, 4), torch.tensor([0, 1, 0, 1, 1]))
    loader = DataLoader(data, batch_size=2, shuffle=True)
    assert_says("a DataLoader; ", task_of(Net, train=[loader]).check, 0)
    converted = ExampleSet.from_dataset(loader.dataset)
    assert torch.equal(converted.inputs, data.tensors[0])
    assert converted.targets.tolist() == [0, 1, 0, 1, 1]


def brought(num_clients):
    """Return a task; the test uses this function as a task."""
    sets = [examples() for _ in range(num_clients)]
    return ExampleTask(lambda: SplitModel.wrap(Net(), "fc3"), sets, sets)


def test_a_task_is_a_function_or_its_path(monkeypatch, tmp_path):
    import sys
    import types

    here = types.ModuleType("brought_along")
    here.brought = brought
    monkeypatch.setitem(sys.modules, "brought_along", here)
    monkeypatch.setattr(brought, "__module__", "brought_along")
    more = {"clients": 2, "rounds": 1, "fraction": 1.0, "output": str(tmp_path)}
    run = simulate("fedrep", "inline", task=brought, **more)
    same = simulate("fedrep", "inline", task="brought_along:brought", **more)
    assert run.summary["accuracy"] == same.summary["accuracy"]
    line = "a function that returns the task"
    assert_says(line, simulate, "fedrep", "inline", task=task_of(Net), **more)
    line = "task is '__main__:mine'; expected of a module that workers can import"
    assert_says(line, simulate, "fedrep", "ray", task="__main__:mine", **more)


def test_long_value_is_shortened_to_one_line():
    error = str(refusal(require, False, "task", [np.zeros(9)] * 30, "short"))
    assert error.startswith("task is a list, [array([0., 0., 0.")
    assert len(error) < 400
