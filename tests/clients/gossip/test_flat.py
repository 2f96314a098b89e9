"""Parameters as one vector: views, order, gradients and weight decay; sketches."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from flwr_frl.clients.gossip.flat import (
    SMALLEST_SKETCHED,
    FlatParameters,
    _hash,
    sketch,
)
from flwr_frl.common.messages import SKETCH
from flwr_frl.task.models import build_model

SHAPES = {"logistic": (1, 8, 8), "digits-cnn": (1, 8, 8), "resnet20": (3, 16, 16)}
by_model = pytest.mark.parametrize("name", sorted(SHAPES))
LAST = torch.channels_last


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return build_model(name, SHAPES[name], 10)


def joined(tensors) -> torch.Tensor:
    """Concatenate the entries of tensors; those of convolutions channels last."""
    each = [t.permute(0, 2, 3, 1) if t.dim() == 4 else t for t in tensors]
    return torch.cat([tensor.detach().reshape(-1) for tensor in each])


@by_model
def test_gradients_are_those_of_an_untouched_copy(name):
    model = model_of(name)
    untouched = copy.deepcopy(model)
    flat = FlatParameters(model)
    x = torch.randn(4, *SHAPES[name]).to(memory_format=LAST)
    y = torch.tensor([1, 2, 3, 4])
    nn.functional.cross_entropy(untouched(x), y).backward()
    expected = joined(p.grad for p in untouched.parameters())
    flat.gradient.zero_()
    # Gradients accumulate unless they are set to zero.
    for times in (1, 2):
        nn.functional.cross_entropy(model(x), y).backward()
        close = {"rtol": 1e-4, "atol": 1e-6}
        torch.testing.assert_close(flat.gradient, times * expected, **close)


def test_layouts_match_hand_computed_ones():
    # Shape 1 x 2 x 1 x 2. Channels last: both channels of a pixel are adjacent.
    conv = nn.Conv2d(2, 1, (1, 2))
    with torch.no_grad():
        conv.weight.copy_(torch.tensor([[[[1.0, 2.0]], [[3.0, 4.0]]]]))
        conv.bias.fill_(9)
    plain = FlatParameters(copy.deepcopy(conv))
    assert plain.vector.tolist() == [1, 2, 3, 4, 9]
    last = FlatParameters(conv.to(memory_format=LAST))
    assert last.vector.tolist() == [1, 3, 2, 4, 9]
    assert last.decayed.tolist() == [1, 1, 1, 1, 0]
    assert last.sizes == (4, 1)
    # Scalars and other shapes
    module = nn.Module()
    module.scale = nn.Parameter(torch.tensor(3.0))
    module.cube = nn.Parameter(torch.arange(8.0).view(2, 2, 2))
    flat = FlatParameters(module)
    assert flat.vector.tolist() == [3, *range(8)]
    (module.scale * module.cube.sum()).backward()
    assert flat.gradient.tolist() == [28] + [3] * 8


def test_a_sketch_preserves_lengths_within_its_standard_error():
    """||Sx||^2 / ||x||^2 has mean 1 and standard deviation sqrt(2 / 256) = 8.8 %.

    For 300 Gaussian vectors, each ratio is within 5.5 standard deviations (a sum of 256
    squares; by Laurent and Massart's bound, one fails with probability below 10^-5, any
    of them with 0.3 %). The standard deviation of all ratios is within 20 % of its
    theoretical value.
    """
    rng = np.random.default_rng(0)
    ratios = []
    for d in (650, 7850, 20_000):
        for _ in range(100):
            x = rng.standard_normal(d).astype(np.float32)
            ratios.append(np.square(sketch(x)).sum() / np.square(x).sum())
    ratios = np.array(ratios)
    error = (2 / SKETCH) ** 0.5
    assert np.abs(ratios - 1).max() < 5.5 * error
    assert abs(ratios.mean() - 1) < 0.05
    assert 0.8 * error < ratios.std() < 1.2 * error


def test_reconstruction_from_a_sketch_is_poor():
    # The minimum-norm solution of the sketch's equations.
    x = np.random.default_rng(0).normal(size=SMALLEST_SKETCHED).astype(np.float32)
    index, signs = _hash(len(x))
    shares = signs / np.bincount(index)[index]
    guess = shares * sketch(x)[index]
    cosine = x @ guess / np.linalg.norm(x) / np.linalg.norm(guess)
    # Expected cosine: sqrt(256 / 25,600) = 0.1
    assert 0.07 < cosine < 0.13
