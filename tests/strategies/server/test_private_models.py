"""Models to which client-level differential privacy cannot be applied."""

from functools import partial

import pytest
import torch
from refusals import assert_says
from torch import nn

from flwr_frl import simulate
from flwr_frl.task import ExampleSet, ExampleTask, SplitModel

PRIVATE = {"server_dp_noise": 1.0, "server_dp_clip": 2.0, "server_dp_delta": 1e-5}


class Constants(nn.Linear):
    """A layer that divides its inputs by a constant."""

    def __init__(self, inputs, outputs, persistent):
        super().__init__(inputs, outputs)
        self.register_buffer("std", torch.full((inputs,), 2.0), persistent=persistent)

    def forward(self, x):
        return super().forward(x / self.std)


class Twice(nn.Module):
    """One parameter under two names."""

    def __init__(self):
        super().__init__()
        self.one = self.other = nn.Linear(2, 2)

    def forward(self, x):
        return self.other(self.one(x))


def task_of(representation):
    examples = [ExampleSet(torch.rand(4, 2), torch.tensor([0, 1, 0, 1]))] * 2
    return ExampleTask(
        model=lambda: SplitModel(representation(), nn.Linear(2, 2)),
        train=examples,
        test=examples,
    )


def constants(num_clients):
    return task_of(lambda: Constants(2, 2, persistent=True))


def hidden_constants(num_clients):
    return task_of(lambda: Constants(2, 2, persistent=False))


def tied(num_clients):
    return task_of(Twice)


@pytest.mark.parametrize(
    ("task", "line"),
    [
        (constants, "the buffer 'representation.std': register it with persistent"),
        (tied, "one parameter as 'representation.one.weight' and as 'representation."),
        (hidden_constants, ""),
    ],
)
def test_models_incompatible_with_noise_are_refused(task, line, tmp_path) -> None:
    given = {"clients": 2, "rounds": 1, "output": str(tmp_path), **PRIVATE}
    call = partial(simulate, "fedavg", "inline", task=task, fraction=1.0, **given)
    if line:
        assert_says(line, call)
    else:
        assert call().summary["epsilon"] > 0
