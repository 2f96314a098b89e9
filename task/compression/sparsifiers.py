"""Compression operators that keep a few entries: the largest, or drawn ones."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flwr_frl.task.compression.compressor import Compressor
from flwr_frl.task.compression.packing import (
    SEED,
    Float32s,
    index_bits,
    pack,
    packed_bytes,
    squared_l2,
    unpack,
)
from flwr_frl.task.compression.quantizers import QSGD, Identity, Sign, check_levels
from flwr_frl.task.settings import require


@dataclass(frozen=True)
class TopK(Compressor):
    """The k entries of largest magnitude, the others set to zero.

    omega = k / d (Singh 2024, section 2.4); at x it is the kept share of ||x||^2. Of
    entries that are equally large the first ones are kept.

    ceil(k ceil(log2 d) / 8) + 4 k bytes: the indices, then the entries.

    Parameters
    ----------
    k : int or float, default 0.01
        Number of entries kept: an int counts them (at most d are kept), a float in
        (0, 1] is a fraction of d, rounded, at least one entry. The default is that of
        the dissertation's deep models (sections 3.5.1 and 3.5.2).

    Raises
    ------
    SettingsError
        If `k` is neither.
    """

    k: int | float = 0.01

    def __post_init__(self) -> None:
        """Check k."""
        _check_k(self.k)

    def num_bytes(self, dimension: int) -> int:
        """Give the bytes of k indices and of k entries in the entries' own code."""
        k = _count(self.k, dimension)
        indices = packed_bytes(k, index_bits(dimension))
        return indices + self._entries.num_bytes(k)

    def omega(self, dimension: int) -> float:
        """Give k / d times the omega of the code of the kept entries."""
        k = _count(self.k, dimension)
        return k / dimension * self._entries.omega(k)

    @property
    def _entries(self) -> Compressor:
        """The operator that the kept entries, a vector of R^k, go through."""
        return Identity()

    def _omega_at(self, x: Float32s) -> float:
        # ||x - C(x)||^2 = ||x - Top_k(x)||^2 + ||Top_k(x) - C(x)||^2, as their
        # supports are disjoint; the second is (1 - omega(Top_k(x))) ||Top_k(x)||^2.
        kept = x[_largest(x, _count(self.k, len(x)))]
        share = squared_l2(kept) / squared_l2(x)
        return share * self._entries._omega_at(kept)

    def _encode(self, x: Float32s, generator: np.random.Generator) -> bytes:
        indices = _largest(x, _count(self.k, len(x)))
        packed = pack(indices, index_bits(len(x)))
        return packed + self._entries._encode(x[indices], generator)

    def _decode(self, data: memoryview, dimension: int) -> Float32s:
        k, bits = _count(self.k, dimension), index_bits(dimension)
        split = packed_bytes(k, bits)
        indices = unpack(data[:split], k, bits)
        if indices[-1] >= dimension or (indices[1:] <= indices[:-1]).any():
            raise ValueError(
                f"the indices are not strictly increasing numbers below {dimension}"
            )
        entries = self._entries._decode(data[split:], k)
        x = np.zeros(dimension, np.float32)
        x[indices] = entries
        return x


@dataclass(frozen=True)
class SignTopK(TopK):
    """The signs of the k largest entries times their mean magnitude.

    ||Top_k(x)||_1 / k * sign(Top_k(x)) on the kept entries (Singh 2024, section 2.4,
    operator (b)). There ||C(x) - x||^2 = ||x||^2 - ||Top_k(x)||_1^2 / k, hence
    omega(x) = ||Top_k(x)||_1^2 / (k ||x||_2^2). Its least value over x is
    min(1 / k, k / d), more than the 1 / d stated there. For let the kept magnitudes
    a_1 >= ... >= a_k have sum 1: ||x||^2 <= sum a_j^2 + (d - k) a_k^2 is convex in a
    and so largest at a corner, where the first j are equal and the rest zero: 1 / j
    for j < k, and d / k^2 for j = k.

    ceil(k ceil(log2 d) / 8) + 4 + ceil(k / 8) bytes: the indices, the mean magnitude,
    the signs. Parameters: see ``TopK``.
    """

    def omega(self, dimension: int) -> float:
        """Give min(1 / k, k / d), the least omega(x); ``omega_at`` gives omega(x)."""
        k = _count(self.k, dimension)
        return min(1 / k, k / dimension)

    @property
    def _entries(self) -> Compressor:
        return Sign()


@dataclass(frozen=True)
class QSGDTopK(TopK):
    """The k largest entries through Q_s, divided by 1 + beta_{k,s}.

    omega = k / (d (1 + beta_{k,s})) (Singh 2024, section 2.4, operator (a)): with
    T = Top_k(x), E Q_s(T) = T and E ||Q_s(T)||^2 <= (1 + beta) ||T||^2 give
    E ||T - Q_s(T) / (1 + beta)||^2 <= (1 - 1 / (1 + beta)) ||T||^2.

    ceil(k ceil(log2 d) / 8) + 4 + ceil(k (ceil(log2(s + 1)) + 1) / 8) bytes: the
    indices, the norm, the levels. Parameters: see ``TopK`` and ``QSGD``.
    """

    levels: int = 15

    def __post_init__(self) -> None:
        """Check k and the number of levels."""
        _check_k(self.k)
        check_levels(self.levels)

    @property
    def _entries(self) -> Compressor:
        return QSGD(self.levels, scaled=True)


@dataclass(frozen=True)
class RandK(Compressor):
    """k entries drawn uniformly without replacement, the others set to zero.

    omega = k / d (Singh 2024, section 2.4): entries are not scaled up by d / k. The
    draw follows from a seed, which is sent in place of the indices.

    8 + 4 k bytes: the seed as a little-endian integer, then the entries in the order
    of their indices. Parameters: see ``TopK``.
    """

    k: int | float = 0.01

    def __post_init__(self) -> None:
        """Check k."""
        _check_k(self.k)

    def num_bytes(self, dimension: int) -> int:
        """Give 8 + 4 k."""
        return SEED.size + 4 * _count(self.k, dimension)

    def omega(self, dimension: int) -> float:
        """Give k / d."""
        return _count(self.k, dimension) / dimension

    def _encode(self, x: Float32s, generator: np.random.Generator) -> bytes:
        seed = int(generator.integers(2**64, dtype=np.uint64))
        kept = x[_drawn(seed, _count(self.k, len(x)), len(x))]
        return SEED.pack(seed) + Identity()._encode(kept, generator)

    def _decode(self, data: memoryview, dimension: int) -> Float32s:
        k = _count(self.k, dimension)
        (seed,) = SEED.unpack_from(data)
        entries = Identity()._decode(data[SEED.size :], k)
        x = np.zeros(dimension, np.float32)
        x[_drawn(seed, k, dimension)] = entries
        return x


def _check_k(k: int | float) -> None:
    valid = k >= 1 if isinstance(k, int) else isinstance(k, float) and 0 < k <= 1
    require(valid, "k", k, "a count (an int >= 1) or a fraction (a float in (0, 1])")


def _count(k: int | float, dimension: int) -> int:
    """Turn the setting k into a number of entries from 1 to d."""
    return min(k if isinstance(k, int) else max(1, round(k * dimension)), dimension)


def _largest(x: Float32s, k: int) -> NDArray[np.int64]:
    """Give the increasing indices of the k largest magnitudes, first come on ties.

    A partition finds the k-th largest magnitude; whatever is above it is kept, and of
    its equals the first few. Indices found this way are nearly sorted already, and
    are the same on every machine, which `torch.topk` does not promise on ties.
    """
    magnitude = np.abs(x)
    bound = np.partition(magnitude, len(x) - k)[len(x) - k]
    above = np.flatnonzero(magnitude > bound)
    equal = np.flatnonzero(magnitude == bound)[: k - len(above)]
    return np.sort(np.concatenate([above, equal]), kind="stable")


def _drawn(seed: int, k: int, dimension: int) -> NDArray[np.uint64]:
    """Give the increasing indices of k out of d entries, drawn uniformly.

    They are those with the k smallest of d random keys. NumPy promises the raw words
    of a bit generator to be the same in every version, but not `Generator.choice`,
    and both ends of a connection may well differ in version. The index in a key's
    lower bits makes the keys distinct, so that "the smallest" has one meaning.
    """
    mask = np.uint64((1 << index_bits(dimension)) - 1)
    keys = np.random.Philox(key=seed).random_raw(dimension) & ~mask
    keys |= np.arange(dimension, dtype=np.uint64)
    return np.sort(np.partition(keys, k - 1)[:k] & mask)
