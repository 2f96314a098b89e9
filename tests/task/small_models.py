"""Small models and examples for local training."""

import numpy as np
import torch
from torch import nn

from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import SplitModel

CE, MSE = nn.functional.cross_entropy, nn.functional.mse_loss


def linear_model(inputs: int, features: int, outputs: int) -> SplitModel:
    torch.manual_seed(0)
    return SplitModel(nn.Linear(inputs, features), nn.Linear(features, outputs))


def regression(n: int, inputs: int, outputs: int) -> ExampleSet:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((n, inputs))).float()
    y = torch.from_numpy(rng.standard_normal((n, outputs))).float()
    return ExampleSet(x, y)


def images(n: int, classes: int, augment: bool = False) -> ExampleSet:
    rng = np.random.default_rng(1)
    pixels = rng.integers(0, 256, (n, 8, 8, 1), dtype=np.uint8)
    targets = torch.from_numpy(rng.integers(0, classes, n))
    mean, std = torch.tensor([128.0]), torch.tensor([64.0])
    return ExampleSet(torch.from_numpy(pixels), targets, mean, std, augment)


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def with_batch_norm_and_dropout() -> SplitModel:
    torch.manual_seed(0)
    # Biases before a batch norm have no gradient, so they are omitted.
    representation = nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(4 * 36, 8, bias=False),
        nn.BatchNorm1d(8),
    )
    head = nn.Sequential(
        nn.Dropout(0.3), nn.Linear(8, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 3)
    )
    return SplitModel(representation, head)
