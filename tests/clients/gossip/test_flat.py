"""Parameters as one vector: views, order, gradients and weight decay; sketches."""

import copy

import numpy as np
import torch
from torch import nn

from flwr_frl.clients.gossip.flat import (
    SMALLEST_SKETCHED,
    FlatParameters,
    _hash,
    sketch,
)
from flwr_frl.common.messages import SKETCH

LAST = torch.channels_last


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
