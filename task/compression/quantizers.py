"""Compression operators that keep every entry, in fewer bits: identity, sign, QSGD."""

import math
from dataclasses import dataclass

import numpy as np

from flwr_frl.task.compression.compressor import Compressor
from flwr_frl.task.compression.packing import (
    FLOAT,
    LARGEST_FLOAT32,
    Float32s,
    l1,
    pack,
    packed_bytes,
    read_norm,
    squared_l2,
    unpack,
)
from flwr_frl.task.settings import require


@dataclass(frozen=True)
class Identity(Compressor):
    """No compression: the entries as floats. omega = 1; 4 d bytes."""

    def num_bytes(self, dimension: int) -> int:
        """Give 4 d."""
        return 4 * dimension

    def omega(self, dimension: int) -> float:
        """Give 1."""
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
    """Mean magnitude times sign: ||x||_1 / d * sign(x).

    omega(x) = ||x||_1^2 / (d ||x||_2^2) (Singh 2024, section 2.4), with equality in
    equation 2.5. It depends on x and is at least 1/d, which is reached when a single
    entry is not zero. sign(0) = +1 leaves it as it is: with m = ||x||_1 / d the error
    is d m^2 - 2 m <sign(x), x> + ||x||^2, and entries that are zero add nothing to
    the inner product whatever their sign.

    4 + ceil(d / 8) bytes: the mean magnitude as a float, then the signs.
    """

    def num_bytes(self, dimension: int) -> int:
        """Give 4 + ceil(d / 8)."""
        return FLOAT.size + packed_bytes(dimension, 1)

    def omega(self, dimension: int) -> float:
        """Give 1 / d, the least omega(x); see ``omega_at`` for omega(x)."""
        return 1 / dimension

    def _omega_at(self, x: Float32s) -> float:
        return l1(x) ** 2 / (len(x) * squared_l2(x))

    def _encode(self, x: Float32s, generator: np.random.Generator) -> bytes:
        return FLOAT.pack(l1(x) / len(x)) + pack(x >= 0, 1)

    def _decode(self, data: memoryview, dimension: int) -> Float32s:
        mean = read_norm(data)
        positive = unpack(data[FLOAT.size :], dimension, 1).view(np.bool_)
        return np.where(positive, mean, -mean)


@dataclass(frozen=True)
class QSGD(Compressor):
    """Stochastic quantiser Q_s to s levels of |x_i| / ||x||_2.

    Q_s(x)_i = ||x||_2 * sgn(x_i) * l_i / s, where l_i is s |x_i| / ||x||_2 rounded up
    or down at random so that E Q_s(x) = x. Its variance is at most beta ||x||^2 with
    beta_{d,s} = min(d / s^2, sqrt(d) / s) (Singh 2024, section 2.4, footnote 2).
    Q_s itself contracts, with omega = 1 - beta, only where beta < 1; Q_s / (1 + beta)
    does for every s, with omega = 1 / (1 + beta), and takes its place where beta >= 1
    (with 15 levels that is from 225 entries on). The message is the same.

    The norm is sent as a float. Rounding it does not bias Q_s, since the levels are
    taken relative to the rounded norm, nor make a level exceed s: no entry, itself a
    float, is larger than the exact norm, nor then than the nearest float to it.

    4 + ceil(d (ceil(log2(s + 1)) + 1) / 8) bytes: the norm, then the levels.

    Parameters
    ----------
    levels : int, default 15
        s, from 1 to 32,767. The default is the largest s of 4 bits (5 with the sign).
    scaled : bool, default False
        Whether to divide by 1 + beta where beta < 1 too: no longer unbiased.

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

    def beta(self, dimension: int) -> float:
        """Give beta_{d,s} = min(d / s^2, sqrt(d) / s), as the class explains it."""
        ratio = math.sqrt(dimension) / self.levels
        return min(ratio**2, ratio)

    def num_bytes(self, dimension: int) -> int:
        """Give 4 + ceil(d (ceil(log2(s + 1)) + 1) / 8)."""
        return FLOAT.size + packed_bytes(dimension, self._bits)

    def omega(self, dimension: int) -> float:
        """Give 1 - beta, or 1 / (1 + beta) where Q_s is divided by that."""
        beta = self.beta(dimension)
        return 1 / (1 + beta) if self._divides(beta) else 1 - beta

    def _omega_at(self, x: Float32s) -> float:
        beta = self.beta(len(x))
        if self._divides(beta):
            return 1 / (1 + beta)
        # The bound comes near 0 as beta comes near 1, and the error does not. A level
        # between two is rounded with the variance p (1 - p), p its way to the upper.
        level = np.abs(x.astype(np.float64)) / math.sqrt(squared_l2(x)) * self.levels
        p = level - np.floor(level)
        return max(1 - beta, 1 - float((p * (1 - p)).sum()) / self.levels**2)

    def _divides(self, beta: float) -> bool:
        """Return whether Q_s is divided by 1 + beta."""
        return self.scaled or beta >= 1

    @property
    def _bits(self) -> int:
        return self.levels.bit_length() + 1

    def _encode(self, x: Float32s, generator: np.random.Generator) -> bytes:
        exact = math.sqrt(squared_l2(x))
        if exact > LARGEST_FLOAT32:
            raise ValueError(f"the norm {exact:.3g} of the vector is no float32 number")
        norm = np.float32(exact)
        # Dividing first keeps the quotient at most 1, and so the level at most s.
        level = np.abs(x) / (norm or np.float32(1)) * np.float32(self.levels)
        low = np.floor(level)
        up = generator.random(len(x), dtype=np.float32) < level - low
        code = (low.astype(np.uint16) + up) << 1
        # A level of zero has no sign: one vector, one message.
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
    """Raise `SettingsError` unless a number of levels is one of QSGD's."""
    # 16 bits hold a level and its sign; float32 itself is hardly longer beyond that.
    valid = isinstance(levels, int) and 1 <= levels < 2**15
    require(valid, "levels", levels, "an int from 1 to 32767")
