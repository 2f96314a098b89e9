"""Compression operators and their inputs."""

import numpy as np

from flwr_frl.common import compression as c

OPERATORS: list[c.Compressor] = [
    *(c.Identity(), c.TopK(0.01), c.TopK(7), c.RandK(0.05)),
    *(c.QSGD(1), c.QSGD(15), c.QSGD(300, scaled=True)),
    *(c.Sign(), c.TopK(0.01, c.Sign()), c.TopK(3, c.Sign())),
    *(c.TopK(0.1, c.QSGD(4, scaled=True)), c.RandK(0.05, c.Sign())),
    c.RandK(0.1, c.QSGD(4, scaled=True)),
]


def generator(seed=0):
    return np.random.default_rng(seed)


def apply(operator, x, seed=0):
    """Return C(x) as an array, encoded and decoded."""
    data = operator.compress(x, generator(seed))
    return operator.decompress(data, len(x))


def normal(d, seed=0):
    return generator(seed).standard_normal(d, dtype=np.float32)
