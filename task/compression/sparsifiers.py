"""Sparse compression operators, which keep the k largest or k random entries."""

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
class _KeepsK(Compressor):
    """Base of the operators that keep k of d entries."""

    k: int | float = 0.01

    def __post_init__(self) -> None:
        """Check k."""
        k = self.k
        valid = k >= 1 if isinstance(k, int) else isinstance(k, float) and 0 < k <= 1
        allowed = "a count (an int >= 1) or a fraction (a float in (0, 1])"
        require(valid, "k", k, allowed)

    def count(self, dimension: int) -> int:
        """Return the number of kept entries, from 1 to d."""
        k = self.k
        return min(k if isinstance(k, int) else max(1, round(k * dimension)), dimension)


@dataclass(frozen=True)
class TopK(_KeepsK):
    """Keep the k entries of largest magnitude and set the others to zero.

    ω = k / d (Singh 2024, section 2.4); ω(x) is the fraction of ‖x‖² that is kept. Ties
    are broken in favour of the lower index.

    ⌈k ⌈log2 d⌉ / 8⌉ + 4 k bytes: the indices, then the entries.

    Parameters
    ----------
    k : int or float, default 0.01
        An int is the number of entries to keep, at most d. A float in (0, 1] is a
        fraction of d, rounded, with at least one entry. The default is the value for
        the dissertation's deep models (sections 3.5.1 and 3.5.2).

    Raises
    ------
    SettingsError
        If `k` is neither.
    """

    def num_bytes(self, dimension: int) -> int:
        """Return the bytes of k indices and of k encoded entries."""
        k = self.count(dimension)
        indices = packed_bytes(k, index_bits(dimension))
        return indices + self._entries.num_bytes(k)

    def omega(self, dimension: int) -> float:
        """Return k / d times the ω of the operator applied to the kept entries."""
        k = self.count(dimension)
        return k / dimension * self._entries.omega(k)

    @property
    def _entries(self) -> Compressor:
        """The operator applied to the kept entries, a vector of R^k."""
        return Identity()

    def _omega_at(self, x: Float32s) -> float:
        # ‖x − C(x)‖² = ‖x − Top_k(x)‖² + ‖Top_k(x) − C(x)‖², as the supports are
        # disjoint; the second term is (1 − ω(Top_k(x))) ‖Top_k(x)‖².
        kept = x[_largest(x, self.count(len(x)))]
        share = squared_l2(kept) / squared_l2(x)
        return share * self._entries._omega_at(kept)

    def _encode(self, x: Float32s, generator: np.random.Generator) -> bytes:
        indices = _largest(x, self.count(len(x)))
        packed = pack(indices, index_bits(len(x)))
        return packed + self._entries._encode(x[indices], generator)

    def _decode(self, data: memoryview, dimension: int) -> Float32s:
        k, bits = self.count(dimension), index_bits(dimension)
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

    (‖Top_k(x)‖₁ / k) sign(Top_k(x)) on the kept entries (Singh 2024, section 2.4,
    operator (b)). There ‖C(x) − x‖² = ‖x‖² − ‖Top_k(x)‖₁² / k, hence
    ω(x) = ‖Top_k(x)‖₁² / (k ‖x‖₂²). Its minimum over x is min(1 / k, k / d), more than
    the 1 / d given there. To see this, let the kept magnitudes a_1 ≥ ... ≥ a_k sum to
    1: ‖x‖² ≤ Σ a_j² + (d − k) a_k² is convex in a and so attains its maximum at a
    corner, where the first j are equal and the rest zero. Its value there is 1 / j for
    j < k, and d / k² for j = k.

    ⌈k ⌈log2 d⌉ / 8⌉ + 4 + ⌈k / 8⌉ bytes: the indices, the mean magnitude, the signs.
    Parameters: see ``TopK``.
    """

    def omega(self, dimension: int) -> float:
        """Return min(1 / k, k / d), the smallest ω(x)."""
        k = self.count(dimension)
        return min(1 / k, k / dimension)

    @property
    def _entries(self) -> Compressor:
        return Sign()


@dataclass(frozen=True)
class QSGDTopK(TopK):
    """Q_s of the k largest entries, divided by 1 + β_{k,s}.

    ω = k / (d (1 + β_{k,s})) (Singh 2024, section 2.4, operator (a)): with
    T = Top_k(x), E Q_s(T) = T and E ‖Q_s(T)‖² ≤ (1 + β) ‖T‖² imply
    E ‖T − Q_s(T) / (1 + β)‖² ≤ (1 − 1 / (1 + β)) ‖T‖².

    ⌈k ⌈log2 d⌉ / 8⌉ + 4 + ⌈k (⌈log2(s + 1)⌉ + 1) / 8⌉ bytes: the indices, the norm, the
    levels. Parameters: see ``TopK`` and ``QSGD``.
    """

    levels: int = 15

    def __post_init__(self) -> None:
        """Check k and the number of levels."""
        super().__post_init__()
        check_levels(self.levels)

    @property
    def _entries(self) -> Compressor:
        return QSGD(self.levels, scaled=True)


@dataclass(frozen=True)
class RandK(_KeepsK):
    """Keep k entries, drawn uniformly without replacement; set the others to zero.

    ω = k / d (Singh 2024, section 2.4): entries are not scaled by d / k. The message
    contains the seed of the draw instead of the indices.

    8 + 4 k bytes: the seed as a little-endian integer, then the entries in the order
    of their indices. Parameters: see ``TopK``.
    """

    def num_bytes(self, dimension: int) -> int:
        """Return 8 + 4 k."""
        return SEED.size + 4 * self.count(dimension)

    def omega(self, dimension: int) -> float:
        """Return k / d."""
        return self.count(dimension) / dimension

    def _encode(self, x: Float32s, generator: np.random.Generator) -> bytes:
        seed = int(generator.integers(2**64, dtype=np.uint64))
        kept = x[_drawn(seed, self.count(len(x)), len(x))]
        return SEED.pack(seed) + Identity()._encode(kept, generator)

    def _decode(self, data: memoryview, dimension: int) -> Float32s:
        k = self.count(dimension)
        (seed,) = SEED.unpack_from(data)
        entries = Identity()._decode(data[SEED.size :], k)
        x = np.zeros(dimension, np.float32)
        x[_drawn(seed, k, dimension)] = entries
        return x


def _largest(x: Float32s, k: int) -> NDArray[np.int64]:
    """Return the increasing indices of the k largest magnitudes, lower index on ties.

    All entries above the k-th largest magnitude are kept, and the first of its equals.
    The result is the same on every machine, which `torch.topk` does not guarantee for
    ties.
    """
    magnitude = np.abs(x)
    bound = np.partition(magnitude, len(x) - k)[len(x) - k]
    above = np.flatnonzero(magnitude > bound)
    equal = np.flatnonzero(magnitude == bound)[: k - len(above)]
    # Both parts are sorted, which makes a stable sort fast.
    return np.sort(np.concatenate([above, equal]), kind="stable")


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
