"""Compression operators that keep k random entries, and compositions with them.

Singh, UCLA 2024, section 2.4: Comp_k is Top_k or Rand_k in the operators (a) and (b).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flwr_frl.task.compression.compressor import (
    SEED,
    Compressor,
    Float32s,
    index_bits,
    l1,
    squared_l2,
)
from flwr_frl.task.compression.operators import (
    QSGD,
    KeepsK,
    Sign,
    check_levels,
)


@dataclass(frozen=True)
class RandK(KeepsK):
    """Keep k entries, drawn uniformly without replacement; set the others to zero.

    ω = k / d (Singh 2024, section 2.4): entries are not scaled by d / k. The message
    contains the seed of the draw instead of the indices.

    8 + 4 k bytes: the seed as a little-endian integer, then the entries in the order
    of their indices. Parameters: see ``TopK``.
    """

    is_random = True

    def num_bytes(self, dimension: int) -> int:
        """Return the bytes of the seed and of k encoded entries."""
        return SEED.size + self._entries.num_bytes(self.count(dimension))

    def _encode(self, x: Float32s, generator: np.random.Generator) -> bytes:
        seed = int(generator.integers(2**64, dtype=np.uint64))
        kept = x[_drawn(seed, self.count(len(x)), len(x))]
        return SEED.pack(seed) + self._entries._encode(kept, generator)

    def _decode(self, data: memoryview, dimension: int) -> Float32s:
        k = self.count(dimension)
        (seed,) = SEED.unpack_from(data)
        entries = self._entries._decode(data[SEED.size :], k)
        x = np.zeros(dimension, np.float32)
        x[_drawn(seed, k, dimension)] = entries
        return x


@dataclass(frozen=True)
class SignRandK(RandK):
    """The signs of k random entries times their mean magnitude.

    (‖Rand_k(x)‖₁ / k) sign(Rand_k(x)) on the kept entries (Singh 2024, section 2.4,
    operator (b)). Hence ω(x) = E ‖Rand_k(x)‖₁² / (k ‖x‖₂²), which is at least 1 / d.

    8 + 4 + ⌈k / 8⌉ bytes: the seed, the mean magnitude, the signs. Parameters: see
    ``TopK``.
    """

    def omega_at(self, x: Float32s) -> float:
        """Return (k / d) (1 + (k − 1) / (d − 1) (‖x‖₁² / ‖x‖₂² − 1)) / k."""
        # A pair of entries is kept with probability k (k − 1) / (d (d − 1)).
        d, k = len(x), self.count(len(x))
        pairs = (k - 1) / (d - 1) if d > 1 else 0.0
        return (1 + pairs * (l1(x) ** 2 / squared_l2(x) - 1)) / d

    @property
    def _entries(self) -> Compressor:
        return Sign()


@dataclass(frozen=True)
class QSGDRandK(RandK):
    """Q_s of k random entries, divided by 1 + β_{k,s}.

    ω = k / (d (1 + β_{k,s})) (Singh 2024, section 2.4, operator (a)).

    8 + 4 + ⌈k (⌈log2(s + 1)⌉ + 1) / 8⌉ bytes: the seed, the norm, the levels.
    Parameters: see ``TopK`` and ``QSGD``.
    """

    levels: int = 15

    def __post_init__(self) -> None:
        """Check k and the number of levels."""
        super().__post_init__()
        check_levels(self.levels)

    @property
    def _entries(self) -> Compressor:
        return QSGD(self.levels, scaled=True)


def _drawn(seed: int, k: int, dimension: int) -> NDArray[np.uint64]:
    """Return the increasing indices of k out of d entries, drawn uniformly.

    They are the indices of the k smallest of d random keys. NumPy guarantees the raw
    words of a bit generator across versions, but not `Generator.choice`, and the two
    ends of a connection may run different versions. The lower bits of a key hold its
    index, which makes keys distinct and the k smallest unique.
    """
    mask = np.uint64((1 << index_bits(dimension)) - 1)
    keys = np.random.Philox(key=seed).random_raw(dimension) & ~mask
    keys |= np.arange(dimension, dtype=np.uint64)
    return np.sort(np.partition(keys, k - 1)[:k] & mask)
