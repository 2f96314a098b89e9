"""A small model, its examples and the parameter groups of torch's optimisers."""

import torch
from torch import nn

from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import SplitModel
from flwr_frl.task.training import TrainerSettings


def classes(n: int = 12, seed: int = 3) -> ExampleSet:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator)
    return ExampleSet(x, torch.randint(0, 3, (n,), generator=generator))


def model(seed: int = 0) -> SplitModel:
    torch.manual_seed(seed)
    return SplitModel(nn.Sequential(nn.Linear(4, 5), nn.Tanh()), nn.Linear(5, 3))


def settings(name: str = "sgd", **more) -> TrainerSettings:
    usual = {"learning_rate": 0.05, "weight_decay": 0.1, "batch_size": 12}
    return TrainerSettings(optimizer_=name, **{**usual, **more})


def torch_groups(of: SplitModel) -> list[dict]:
    named = dict(of.named_parameters())
    weights = [p for n, p in named.items() if n.endswith("weight")]
    biases = [p for n, p in named.items() if n.endswith("bias")]
    return [
        {"params": weights, "weight_decay": 0.1},
        {"params": biases, "weight_decay": 0.0},
    ]


def assert_close(ours: SplitModel, other: SplitModel, **tolerance) -> None:
    torch.testing.assert_close(ours.state_dict(), other.state_dict(), **tolerance)
