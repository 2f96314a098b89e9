"""Custom models with convolutions in channels-last format."""

import pytest
import torch
from torch import nn

from flwr_frl.task import ExampleSet, ExampleTask, SplitModel


class Viewing(nn.Module):
    """Flattens with ``view``, which needs contiguous features."""

    def forward(self, x):
        return x.view(len(x), -1)


def convolutional(flatten: nn.Module, groups: int = 1) -> SplitModel:
    layers = nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=groups), flatten
    return SplitModel(nn.Sequential(*layers), nn.Linear(4 * 4 * 4, 3))


def task_of(model, *shape: int) -> ExampleTask:
    inputs = torch.randn(6, *shape, generator=torch.Generator().manual_seed(0))
    sets = [ExampleSet(inputs, torch.tensor([0, 1, 2, 0, 1, 2]))]
    return ExampleTask(model, sets, sets, classes=("a", "b", "c"), seed=1)


def is_channels_last(model: SplitModel) -> bool:
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d)]
    return all(w.is_contiguous(memory_format=torch.channels_last) for w in weights)


def test_dense_convolutions_become_channels_last_with_the_same_values():
    model = task_of(lambda: convolutional(nn.Flatten()), 2, 8, 8).initial_model()
    assert is_channels_last(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        expected = convolutional(nn.Flatten()).state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name])


@pytest.mark.parametrize(
    "make",
    [lambda: convolutional(Viewing()), lambda: convolutional(nn.Flatten(), groups=2)],
    ids=["that needs contiguous features", "with groups"],
)
def test_model_that_does_not_support_channels_last_is_unchanged(make):
    task = task_of(make, 2, 8, 8)
    assert not is_channels_last(task.initial_model())
    task.check(0)
