"""Small models and examples for local training."""

import numpy as np
import torch
from torch import nn

from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import SplitModel
from flwr_frl.task.training.privacy import ExamplePrivacy
from flwr_frl.task.training.sgd import TrainerSettings

CE, MSE = nn.functional.cross_entropy, nn.functional.mse_loss


def linear_model(inputs: int, features: int, outputs: int) -> SplitModel:
    torch.manual_seed(0)
    return SplitModel(nn.Linear(inputs, features), nn.Linear(features, outputs))


def scalar_model(b: float, w: float) -> SplitModel:
    """Return x ↦ w (b x)."""
    model = SplitModel(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    nn.init.constant_(model.representation.weight, b)
    nn.init.constant_(model.head.weight, w)
    return model


def classifier(seed: int = 0, norm: nn.Module | None = None) -> SplitModel:
    """Return a model of four inputs and three classes."""
    torch.manual_seed(seed)
    layers = [nn.Linear(4, 5), *([norm] if norm else []), nn.Tanh()]
    return SplitModel(nn.Sequential(*layers), nn.Linear(5, 3))


def classes(n: int = 12, seed: int = 3) -> ExampleSet:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator)
    return ExampleSet(x, torch.randint(0, 3, (n,), generator=generator))


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


def with_batch_norm_and_dropout() -> SplitModel:
    torch.manual_seed(0)
    # Biases before a batch norm have no gradient, so they are omitted.
    representation = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.Dropout(0.3), nn.Flatten(), nn.Linear(4 * 36, 8, bias=False)),
        nn.BatchNorm1d(8),
    )
    head = nn.Sequential(
        nn.Dropout(0.3), nn.Linear(8, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 3)
    )
    return SplitModel(representation, head)


class TwoNorms(nn.Module):
    """Two batch norms, of which only the second needs more than one example.

    The first has four values per channel and example. Calls with one example are
    counted.
    """

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(1), nn.BatchNorm1d(4)
        self.alone = 0

    def forward(self, x):
        self.alone += len(x) == 1
        return self.second(self.first(x[:, None]).flatten(1))


def normed() -> SplitModel:
    torch.manual_seed(0)
    return SplitModel(TwoNorms(), nn.Linear(4, 1))


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def assert_close(ours: nn.Module, other: nn.Module, **tolerance) -> None:
    torch.testing.assert_close(ours.state_dict(), other.state_dict(), **tolerance)


# Trainers


def trainer(name: str = "sgd", **more) -> TrainerSettings:
    usual = {"learning_rate": 0.05, "weight_decay": 0.1, "batch_size": 12}
    return TrainerSettings(optimizer_=name, **{**usual, **more})


def torch_groups(of: nn.Module) -> list[dict]:
    """Return the groups of `trainer` for an optimiser of torch."""
    named = dict(of.named_parameters())
    weights = [p for n, p in named.items() if n.endswith("weight")]
    biases = [p for n, p in named.items() if n.endswith("bias")]
    return [
        {"params": weights, "weight_decay": 0.1},
        {"params": biases, "weight_decay": 0.0},
    ]


def without_noise(clip: float = 1e9) -> ExamplePrivacy:
    privacy = ExamplePrivacy(1.0, clip, 1e-5)
    # Users cannot request this value.
    object.__setattr__(privacy, "dp_noise", 0.0)
    return privacy
