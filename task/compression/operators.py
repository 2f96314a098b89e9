"""Compression operators: identity, sign, QSGD and k largest entries."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flwr_frl.common.settings import require
from flwr_frl.task.compression.compressor import (
    FLOAT,
    LARGEST_FLOAT32,
    Compressor,
    Float32s,
    index_bits,
    l1,
    pack,
    packed_bytes,
    read_norm,
    squared_l2,
    unpack,
)


@dataclass(frozen=True)
class Identity(Compressor):
    """No compression: the entries as floats. ω = 1; 4 d bytes."""

    @property
    def is_exact(self) -> bool:
        """True."""
        return True

    def num_bytes(self, dimension: int) -> int:
        """Return 4 d."""
        return 4 * dimension

    def omega(self, dimension: int) -> float:
        """Return 1."""
        return 1.0

    def _encode(self, x: Float32s, generator: np.random.Generator) -> bytes:
        return x.astype("<f4", copy=False).tobytes()

    def _decode(self, data: memoryview, dimension: int) -> Float32s:
        entries = np.frombuffer(data, "<f4")
        if not np.isfinite(entries).all():
            raise ValueError("a compressed entry is not finite")
        return entries.astype(np.float32)


@dataclass(frozen=True)
class Sign(Compressor):
    """Mean magnitude times sign: (‖x‖₁ / d) sign(x).

    ω(x) = ‖x‖₁² / (d ‖x‖₂²) (Singh 2024, section 2.4), with equality in equation 2.5.
    It is at least 1 / d, its value at a vector with a single non-zero entry. The choice
    sign(0) = +1 does not change it: with m = ‖x‖₁ / d the error is
    d m² − 2 m ⟨sign(x), x⟩ + ‖x‖², and zero entries add nothing to the inner product.

    4 + ⌈d / 8⌉ bytes: the mean magnitude as a float, then the signs.
    """

    def num_bytes(self, dimension: int) -> int:
        """Return 4 + ⌈d / 8⌉."""
        return FLOAT.size + packed_bytes(dimension, 1)

    def omega(self, dimension: int) -> float:
        """Return 1 / d, the smallest ω(x)."""
        return 1 / dimension

    def omega_at(self, x: Float32s) -> float:
        """Return ‖x‖₁² / (d ‖x‖₂²)."""
        return l1(x) ** 2 / (len(x) * squared_l2(x))

    def _encode(self, x: Float32s, generator: np.random.Generator) -> bytes:
        return FLOAT.pack(l1(x) / len(x)) + pack(x >= 0, 1)

    def _decode(self, data: memoryview, dimension: int) -> Float32s:
        mean = read_norm(data)
        positive = unpack(data[FLOAT.size :], dimension, 1).view(np.bool_)
        return np.where(positive, mean, -mean)


@dataclass(frozen=True)
class QSGD(Compressor):
    """Stochastic quantiser Q_s to s levels of |x_i| / ‖x‖₂.

    Q_s(x)_i = ‖x‖₂ sgn(x_i) l_i / s, where l_i is s |x_i| / ‖x‖₂, rounded up or down at
    random such that E Q_s(x) = x. Its variance is at most β ‖x‖² with
    β_{d,s} = min(d / s², √d / s) (Singh 2024, section 2.4, footnote 2).
    Q_s satisfies equation 2.5, with ω = 1 − β, only if β < 1. Q_s / (1 + β) satisfies
    it for every s, with ω = 1 / (1 + β), and replaces Q_s if β ≥ 1 (with 15 levels,
    from 225 entries on). The message is the same.

    The norm is sent as a float. Levels are relative to the rounded norm, so rounding
    does not bias Q_s. A level cannot exceed s: each entry is a float and at most the
    exact norm, so it is also at most the float nearest to the norm.

    4 + ⌈d (⌈log2(s + 1)⌉ + 1) / 8⌉ bytes: the norm, then the levels.

    Parameters
    ----------
    levels : int, default 15
        s, from 1 to 32,767. The default is the largest s of 4 bits (5 with the sign).
    scaled : bool, default False
        If True, also divide by 1 + β if β < 1; the result is then biased.

    Raises
    ------
    SettingsError
        If `levels` is out of range.
    """

    levels: int = 15
    scaled: bool = False

    def __post_init__(self) -> None:
        """Check the number of levels."""
        check_levels(self.levels)

    is_random = True

    def beta(self, dimension: int) -> float:
        """Return β_{d,s} = min(d / s², √d / s)."""
        ratio = math.sqrt(dimension) / self.levels
        return min(ratio**2, ratio)

    def num_bytes(self, dimension: int) -> int:
        """Return 4 + ⌈d (⌈log2(s + 1)⌉ + 1) / 8⌉."""
        return FLOAT.size + packed_bytes(dimension, self._bits)

    def omega(self, dimension: int) -> float:
        """Return 1 − β, or 1 / (1 + β) if Q_s is divided by 1 + β."""
        beta = self.beta(dimension)
        return 1 / (1 + beta) if self._divides(beta) else 1 - beta

    def omega_at(self, x: Float32s) -> float:
        """Return ω(x) of the exact variance; 1 / (1 + β) if Q_s is divided by 1 + β."""
        beta = self.beta(len(x))
        if self._divides(beta):
            return 1 / (1 + beta)
        # As β nears 1, the bound nears 0 although the error does not. Rounding a level
        # has variance p (1 − p), where p is its fractional part.
        level = np.abs(x.astype(np.float64)) / math.sqrt(squared_l2(x)) * self.levels
        p = level - np.floor(level)
        return max(1 - beta, 1 - float((p * (1 - p)).sum()) / self.levels**2)

    def _divides(self, beta: float) -> bool:
        return self.scaled or beta >= 1

    @property
    def _bits(self) -> int:
        return self.levels.bit_length() + 1

    def _encode(self, x: Float32s, generator: np.random.Generator) -> bytes:
        exact = math.sqrt(squared_l2(x))
        if exact > LARGEST_FLOAT32:
            raise ValueError(f"the norm {exact:.3g} exceeds the range of float32")
        norm = np.float32(exact)
        # Dividing first keeps the quotient at most 1, and so the level at most s.
        level = np.abs(x) / (norm or np.float32(1)) * np.float32(self.levels)
        low = np.floor(level)
        up = generator.random(len(x), dtype=np.float32) < level - low
        code = (low.astype(np.uint16) + up) << 1
        # A level of zero has no sign, so every vector has exactly one encoding.
        code |= (x < 0) & (code > 0)
        return FLOAT.pack(norm) + pack(code, self._bits)

    def _decode(self, data: memoryview, dimension: int) -> Float32s:
        norm = read_norm(data)
        code = unpack(data[FLOAT.size :], dimension, self._bits)
        level = code >> 1
        if level.max() > self.levels:
            raise ValueError(f"a level is {level.max()}, above {self.levels}")
        entries = level.astype(np.float32) / np.float32(self.levels) * norm
        np.negative(entries, out=entries, where=(code & 1).astype(np.bool_))
        beta = self.beta(dimension)
        if self._divides(beta):
            entries /= np.float32(1 + beta)
        return entries


def check_levels(levels: int) -> None:
    """Raise `SettingsError` unless QSGD supports this number of levels."""
    # 16 bits hold a level and its sign; more would hardly be shorter than float32.
    valid = isinstance(levels, int) and 1 <= levels < 2**15
    require(valid, "levels", levels, "an int from 1 to 32767")


@dataclass(frozen=True)
class KeepsK(Compressor):
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

    def omega(self, dimension: int) -> float:
        """Return k / d times the ω of the operator applied to the kept entries."""
        k = self.count(dimension)
        return k / dimension * self._entries.omega(k)

    @property
    def _entries(self) -> Compressor:
        """The operator applied to the kept entries, a vector of R^k."""
        return Identity()


@dataclass(frozen=True)
class TopK(KeepsK):
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

    def omega_at(self, x: Float32s) -> float:
        """Return the fraction of ‖x‖² that is kept, times the ω of its encoding."""
        # ‖x − C(x)‖² = ‖x − Top_k(x)‖² + ‖Top_k(x) − C(x)‖², as the supports are
        # disjoint; the second term is (1 − ω(Top_k(x))) ‖Top_k(x)‖².
        kept = x[_largest(x, self.count(len(x)))]
        share = squared_l2(kept) / squared_l2(x)
        return share * self._entries.omega_at(kept)

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
    ω(x) = ‖Top_k(x)‖₁² / (k ‖x‖₂²). Its minimum over x is min(1 / k, k / d), at least
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

    is_random = True

    @property
    def _entries(self) -> Compressor:
        return QSGD(self.levels, scaled=True)


def _largest(x: Float32s, k: int) -> NDArray[np.int64]:
    """Return the increasing indices of the k largest magnitudes, lower index on ties.

    All entries above the k-th largest magnitude are kept, and the first that equal it.
    The result is the same on every machine, which `torch.topk` does not guarantee for
    ties.
    """
    magnitude = np.abs(x)
    bound = np.partition(magnitude, len(x) - k)[len(x) - k]
    above = np.flatnonzero(magnitude > bound)
    equal = np.flatnonzero(magnitude == bound)[: k - len(above)]
    # Both parts are sorted, which makes a stable sort fast.
    return np.sort(np.concatenate([above, equal]), kind="stable")
