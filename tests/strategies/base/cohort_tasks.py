"""Tasks for clients that train in cohorts: unequal sizes, various models."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from flwr_frl.task import ExampleSet, ExampleTask, SplitModel

N, CLASSES = 5, 3


def draw(i: int, test: bool, shape: tuple[int, ...]) -> ExampleSet:
    rng = np.random.default_rng([i, test])
    n = 7 if test else (9, 9, 4, 13, 9)[i]
    x = torch.from_numpy(rng.standard_normal((n, *shape))).float()
    scores = x.flatten(1)[:, :CLASSES] + torch.from_numpy(rng.standard_normal(CLASSES))
    return ExampleSet(x, scores.argmax(1))


def task_of(model, shape: tuple[int, ...]) -> ExampleTask:
    train, test = ([draw(i, t, shape) for i in range(N)] for t in (False, True))
    return ExampleTask(model, train, test, classes=("a", "b", "c"))


def dense(num_clients: int = N) -> ExampleTask:
    def model() -> SplitModel:
        return SplitModel(nn.Sequential(nn.Linear(6, 5), nn.Tanh()), nn.Linear(5, 3))

    return task_of(model, (6,))


def doubles(num_clients: int = N) -> ExampleTask:
    """As `dense`, in float64."""
    task = dense()
    train, test = (
        [ExampleSet(s.inputs.double(), s.targets) for s in sets]
        for sets in (task.train, task.test)
    )
    return replace(task, model=lambda: dense().model().double(), train=train, test=test)


def normalised(num_clients: int = N) -> ExampleTask:
    """A model with batch norms before and after a convolution."""

    def model() -> SplitModel:
        layers = nn.BatchNorm2d(2), nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        return SplitModel(nn.Sequential(*layers, nn.Flatten()), nn.Linear(16, 3))

    return task_of(model, (2, 4, 4))


class Sorting(nn.Module):
    """A layer that `torch.func.vmap` cannot batch, as it calls `item`."""

    def forward(self, x):
        return x * float(x.sum().item() > 0)


def unusual(num_clients: int = N) -> ExampleTask:
    def model() -> SplitModel:
        return SplitModel(nn.Sequential(nn.Linear(6, 5), Sorting()), nn.Linear(5, 3))

    return task_of(model, (6,))


def dropping(num_clients: int = N) -> ExampleTask:
    def model() -> SplitModel:
        layers = nn.Linear(6, 5), nn.Dropout(0.5)
        return SplitModel(nn.Sequential(*layers), nn.Linear(5, 3))

    return task_of(model, (6,))


def padded(num_clients: int = N) -> ExampleTask:
    """A model with a padding index, whose gradient PyTorch gets wrong under `vmap`."""

    def model() -> SplitModel:
        words = nn.Embedding(8, 4, padding_idx=0)
        return SplitModel(nn.Sequential(words, nn.Flatten()), nn.Linear(12, 3))

    def tokens(i: int, test: bool) -> ExampleSet:
        rng = np.random.default_rng([i, test])
        n = 7 if test else (9, 9, 4, 13, 9)[i]
        x = torch.from_numpy(rng.integers(0, 8, size=(n, 3)))
        return ExampleSet(x, x.sum(1) % CLASSES)

    train, test = ([tokens(i, t) for i in range(N)] for t in (False, True))
    return ExampleTask(model, train, test, classes=("a", "b", "c"))


@dataclass
class Weighted:
    """A loss that is not hashable."""

    factor: float = 2.0

    def __call__(self, outputs, targets):
        return self.factor * nn.functional.cross_entropy(outputs, targets)


def unhashable(num_clients: int = N) -> ExampleTask:
    return replace(dense(), loss=Weighted())


class Centred(nn.Module):
    """A layer in which the examples of a batch affect each other."""

    def forward(self, x):
        return x - x.mean(0)


def centred(num_clients: int = N) -> ExampleTask:
    def model() -> SplitModel:
        return SplitModel(nn.Sequential(nn.Linear(6, 5), Centred()), nn.Linear(5, 3))

    return task_of(model, (6,))


def hooked(num_clients: int = N) -> ExampleTask:
    """A model with a hook that counts calls outside of the model's state."""

    def model() -> SplitModel:
        split = SplitModel(nn.Sequential(nn.Linear(6, 5), nn.Tanh()), nn.Linear(5, 3))
        seen = []
        split.head.register_forward_hook(lambda module, x, y: seen.append(0))
        return split

    return task_of(model, (6,))


def normed(num_clients: int = N) -> ExampleTask:
    """A model with a linear layer and a batch norm."""

    def model() -> SplitModel:
        layers = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh()
        return SplitModel(nn.Sequential(*layers), nn.Linear(5, 3))

    return task_of(model, (6,))


def untrained(num_clients: int = N) -> ExampleTask:
    """The third client has test examples only."""
    return without_training(normed())


def untrained_dense(num_clients: int = N) -> ExampleTask:
    """As `untrained`, without batch norms."""
    return without_training(dense())


def without_training(task: ExampleTask) -> ExampleTask:
    task.train[2] = task.train[2].subset(torch.arange(0))
    return task
