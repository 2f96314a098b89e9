"""Typical user code (networks, loaders, tables), and errors for unsuitable parts."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from flwr_frl import simulate
from flwr_frl.common.settings import SettingsError, require
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


@pytest.mark.parametrize(
    ("model", "head"),
    [
        (lambda: Net(lambda x: functional.log_softmax(x, 1)), "fc3"),
        (lambda: Net(lambda x: x.squeeze(1), 1), "fc3"),
        (lambda: Net(lambda x: {"logits": x}), "fc3"),
        # A layer in the middle, with a matching and with another width
        (Net, "fc2"),
        (Net, "fc1"),
    ],
)
def test_head_that_is_not_the_last_layer_is_an_error(model, head):
    with pytest.raises(SettingsError, match=f"head is {head!r}, which is not the last"):
        task_of(model, head).check(0)


@pytest.mark.parametrize("noise", [torch.randn_like, lambda x: np.random.random()])
def test_noise_in_forward_does_not_affect_the_check_of_the_head(noise):
    class Noisy(Net):
        def forward(self, x):
            return super().forward(x + noise(x))

    task_of(Noisy).check(0)


def test_a_state_between_calls_is_an_error_of_its_own():
    class Counting(Net):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x + self.calls)

    with pytest.raises(SettingsError, match="forward must keep no state, such as that"):
        task_of(Counting).check(0)


def test_valid_head_is_checked_once():
    models = []

    def model():
        models.append(1)
        return Net()

    task = task_of(model)
    for client in (0, 1, 0, 1):
        task.check(client)
    # One model is created to check the head, and one is the scratch model.
    assert len(models) == 2


LAYER = nn.Linear(4, 8)


def view_of(layer: nn.Linear) -> nn.Linear:
    view = nn.Linear(4, 8)
    view.weight = nn.Parameter(layer.weight.detach())
    return view


NET, SPLIT = Net(), SplitModel(nn.Linear(4, 8), nn.Linear(8, 2))


@pytest.mark.parametrize(
    ("model", "head"),
    [
        (lambda: NET, "fc3"),
        (lambda: SPLIT, ""),
        (lambda: SplitModel(LAYER, nn.Linear(8, 2)), ""),
        (lambda: SplitModel(view_of(LAYER), nn.Linear(8, 2)), ""),
    ],
    ids=["net", "split model", "a layer", "its memory"],
)
def test_model_function_that_reuses_parameters_is_an_error(model, head):
    line = "with parameters that it has returned before"
    with pytest.raises(SettingsError, match=line):
        task_of(model, head).check(0)


def test_task_creates_one_model_before_it_is_checked():
    models = []

    def model():
        models.append(1)
        return Net()

    task = task_of(model)
    initial = {name: value.clone() for name, value in task.initial_state.items()}
    with torch.no_grad():
        task.scratch_model.head.weight.zero_()
    assert len(models) == 1
    for name, value in task.initial_state.items():
        assert torch.equal(value, initial[name])


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


def test_cross_entropy_of_a_single_output_is_an_error():
    numbers = ExampleSet(torch.ones(4, 4), torch.ones(4, 1))
    line = "the loss is cross-entropy and the model has one output, for which it is alw"
    with pytest.raises(SettingsError, match=line):
        task_of(lambda: Net(width=1), train=[numbers], test=[numbers]).check(0)
    mse = functional.mse_loss
    task_of(lambda: Net(width=1), train=[numbers], test=[numbers], loss=mse).check(0)


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(reduction="sum"),
        lambda outputs, targets: (
            functional.cross_entropy(outputs, targets) * len(targets)
        ),
    ],
)
def test_loss_that_is_a_sum_over_examples_is_an_error(loss):
    line = "the loss of a batch and the same again is twice the loss; expected the me"
    with pytest.raises(SettingsError, match=line):
        task_of(Net, loss=loss).check(0)


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


PAIRED = [
    (1, (), {"loss": square}, "the loss compares each output with the targets of all "),
    (2, (), {"loss": gaussian}, r"expected targets of shape \(6, 1\)"),
    (
        1,
        (),
        {"loss": lambda x, y: square(x[:, 0], y), "metrics": {"near": near}},
        "metric 'near' compares each output with the targets of all rows",
    ),
]


@pytest.mark.parametrize(("width", "shape", "change", "line"), PAIRED)
def test_outputs_and_targets_that_broadcast_are_an_error(width, shape, change, line):
    more = {part: numbers(6, *shape) for part in ("train", "test")} | change
    with pytest.raises(SettingsError, match=line):
        task_of(lambda: Net(width=width), **more).check(0)


def test_integers_and_outputs_without_a_second_dimension_may_not_broadcast_either():
    counts = [ExampleSet(torch.randn(6, 4), torch.arange(6))]
    with pytest.raises(SettingsError, match="the loss compares each output with the t"):
        task_of(lambda: Net(width=1), train=counts, loss=square).check(0)

    class Flat(nn.Linear):
        def forward(self, x):
            return super().forward(x).squeeze(1)

    def flat():
        return SplitModel(nn.Linear(4, 4), Flat(4, 1))

    with pytest.raises(SettingsError, match=r"expected targets of shape \(6,\)"):
        task_of(flat, "", train=numbers(6, 1), loss=square).check(0)
    task_of(flat, "", train=numbers(6), test=numbers(6), loss=square).check(0)


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
    task_of(lambda: Net(width=1), loss=loss, **more).check(0)


def test_clients_may_have_names(tmp_path):
    sets = {"north": examples(6), "south": examples(4)}
    task = task_of(Net, train=sets, test=dict(reversed(sets.items())))
    assert task.client_names == ("north", "south")
    assert [len(task.train_examples(i)) for i in (0, 1)] == [6, 4]
    assert [len(task.test_examples(i)) for i in (0, 1)] == [6, 4]
    with pytest.raises(SettingsError, match="client 'south' is in one of train and te"):
        task_of(Net, train=sets, test={"north": examples()})
    with pytest.raises(SettingsError, match="train is a mapping; train and test must"):
        task_of(Net, train=sets)


def test_loaders_are_an_error_and_their_datasets_are_converted():
    data = TensorDataset(torch.randn(5, 4), torch.tensor([0, 1, 0, 1, 1]))
    loader = DataLoader(data, batch_size=2, shuffle=True)
    with pytest.raises(SettingsError, match=r"a DataLoader; .*must be an ExampleSet"):
        task_of(Net, train=[loader]).check(0)
    with pytest.raises(SettingsError, match=r"expected its dataset \(loader.dataset"):
        ExampleSet.from_dataset(loader)
    converted = ExampleSet.from_dataset(loader.dataset)
    assert torch.equal(converted.inputs, data.tensors[0])
    assert converted.targets.tolist() == [0, 1, 0, 1, 1]


def test_several_columns_are_stacked_as_inputs():
    rows = [
        {"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0], "labels": 1},
        {"input_ids": [7, 8, 9], "attention_mask": [1, 1, 1], "labels": 0},
    ]
    data = ExampleSet.from_dataset(rows, ["input_ids", "attention_mask"], "labels")
    assert data.inputs.tolist() == [[[5, 6, 0], [1, 1, 0]], [[7, 8, 9], [1, 1, 1]]]
    assert data.targets.tolist() == [1, 0]


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
    with pytest.raises(SettingsError, match=r"a function that returns the task$"):
        simulate("fedrep", "inline", task=task_of(Net), **more)
    line = "task is '__main__:mine'; expected of a module that workers can import"
    with pytest.raises(SettingsError, match=line):
        simulate("fedrep", "ray", task="__main__:mine", **more)


def test_long_value_is_shortened_to_one_line():
    with pytest.raises(SettingsError) as error:
        require(False, "task", [np.zeros(9)] * 30, "short")
    assert str(error.value).startswith("task is a list, [array([0., 0., 0.")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400
