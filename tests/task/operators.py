"""Compression operators and their inputs."""

import numpy as np
import torch

from flwr_frl.task.compression.per_tensor import (
    QSGD,
    Compressor,
    Identity,
    QSGDRandK,
    QSGDTopK,
    RandK,
    Sign,
    SignRandK,
    SignTopK,
    TopK,
)

OPERATORS: list[Compressor] = [
    Identity(),
    TopK(0.01),
    TopK(7),
    RandK(0.05),
    QSGD(1),
    QSGD(15),
    QSGD(300, scaled=True),
    Sign(),
    SignTopK(0.01),
    SignTopK(3),
    QSGDTopK(0.1, levels=4),
    SignRandK(0.05),
    QSGDRandK(0.1, levels=4),
]


def generator(seed=0):
    return np.random.default_rng(seed)


def apply(operator, x, seed=0):
    """Return C(x) as an array, encoded and decoded."""
    data = operator.compress(torch.from_numpy(x), generator(seed))
    return operator.decompress(data, len(x)).numpy()


def normal(d, seed=0):
    return generator(seed).standard_normal(d, dtype=np.float32)
