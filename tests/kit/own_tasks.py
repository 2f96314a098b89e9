"""Parts of custom tasks."""

import torch
from torch import nn

from flwr_frl.task import ExampleTask, SplitModel
from flwr_frl.task.examples import ExampleSet


def examples(n: int, seed: int) -> ExampleSet:
    """Return examples of two classes, separated along the first of three inputs."""
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
