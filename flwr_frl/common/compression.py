"""Compression operators C for messages between neighbours, and to the server.

An operator with parameter ω in (0, 1] satisfies, for every x in R^d,

    E ‖C(x) − x‖² ≤ (1 − ω) ‖x‖²

(Singh, UCLA 2024, section 2.4, Definition 1, equation 2.5). An operator keeps all, the
k largest or k random entries, and encodes them as floats (`Identity`), as signs with
their mean magnitude (`Sign`), or as random levels of their norm (`QSGD`); `PerTensor`
applies one operator to each tensor. The section's operators (a) and (b) are those that
keep k entries, Comp_k, with `QSGD` and with `Sign`.

``compress`` encodes C(x) as bytes and ``decompress`` decodes it. C(x) is defined as the
output of ``decompress``, so the sender and the receivers hold identical floats. The
operators work on matrices with a row for each vector, as many nodes of one process send
messages at once.

Every encoding has a fixed size, which depends only on the dimension and the operator's
settings: ``num_bytes(d)`` is the length of every message. Fields are concatenated, and
each is padded with zero bits to a whole byte.

=========  ==================================================================
float      IEEE binary32, little-endian
index      ⌈log2 d⌉ bits, most significant first, strictly increasing
sign       1 bit, 1 for +1; sign(0) = +1
level      of QSGD: 0 to s in ⌈log2(s + 1)⌉ bits, followed by a bit that is
           1 for a negative entry
=========  ==================================================================

Messages are untrusted input. ``decompress`` first compares the message's length with
``num_bytes(dimension)``, and ranges of norms, indices and levels are checked.

NumPy computes the sums that enter a message, in float64. Sums in torch or BLAS depend
on the number of threads, and so would the messages.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast, get_args

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from flwr_frl.common.errors import require
from flwr_frl.common.settings import Checked, setting

Float32s = NDArray[np.float32]
Bytes = NDArray[np.uint8]
# Returns a message's generator, always the same one. Making one takes as long as a
# small message, so deterministic operators do not call it.
Source = Callable[[], np.random.Generator]

# Bytes of a float, and of a seed
FLOAT, SEED = 4, 8
# Number of entries that are encoded at once, as temporary arrays take more memory.
AT_ONCE = 2**16


class Compressor(ABC):
    """An operator C of Definition 1 together with its encoding.

    Subclasses implement ``omega``, ``encode`` and ``decode``. The last two receive only
    rows: finite vectors, and messages of the right length.
    """

    @lru_cache(maxsize=1024)  # noqa: B019 - operators are small.
    def num_bytes(self, dimension: int) -> int:
        """Return the length in bytes of ``compress(x)`` for every x in R^d.

        Parameters
        ----------
        dimension : int
            Number of entries d of the vector.
        """
        ones = np.ones((1, dimension), np.float32)
        return int(self.encode(ones, [np.random.default_rng]).shape[1])

    @abstractmethod
    def omega(self, dimension: int) -> float:
        """Return the ω in (0, 1] that holds for every vector of R^d.

        Parameters
        ----------
        dimension : int
            Number of entries d of the vector.
        """

    def omega_at(self, x: Float32s) -> float:
        """Return ω(x) in (0, 1], with E ‖C(x) − x‖² ≤ (1 − ω(x)) ‖x‖² at one vector.

        It is at least ``omega(d)``, and can be larger if the operator's error depends
        on the vector, as with ``Sign``, ``QSGD`` and ``TopK``.

        Parameters
        ----------
        x : ndarray of float32, shape (d,)
            A vector of finite entries that are not all 0.
        """
        return self.omega(len(x))

    @lru_cache(maxsize=4)  # noqa: B019 - operators are small.
    def typical_omega(self, dimension: int) -> float:
        """Return ω(x) in (0, 1] at a fixed vector x of independent Gaussian entries.

        For many operators the worst case, ``omega(d)``, occurs at vectors with one
        non-zero entry, which differences between models do not resemble.

        Parameters
        ----------
        dimension : int
            Number of entries d of the vector.
        """
        vector = np.random.default_rng(0).standard_normal(dimension, np.float32)
        # Rounding can lift the ratio slightly above 1.
        return min(1.0, float(self.omega_at(vector)))

    def compress(self, x: Float32s, generator: np.random.Generator) -> bytes:
        """Encode C(x).

        Parameters
        ----------
        x : ndarray of float32, shape (d,)
            The vector, d ≥ 1; every entry is finite.
        generator : numpy.random.Generator
            Source of randomness. Deterministic operators draw nothing from it.

        Returns
        -------
        bytes
            ``num_bytes(d)`` bytes.

        Raises
        ------
        ValueError
            If an entry is not finite.
        """
        return self.compress_rows(x[None], [lambda: generator])[0][0]

    def compress_rows(
        self, x: Float32s, generators: Sequence[Source]
    ) -> tuple[list[bytes], Float32s]:
        """Encode C(x) of each row of a matrix.

        Parameters
        ----------
        x : ndarray of float32, shape (rows, d)
            The vectors; every entry is finite.
        generators : sequence of callable
            The source of each row.

        Returns
        -------
        messages : list of bytes
            A message for each row.
        decoded : ndarray of float32, shape (rows, d)
            C(x) of each row.

        Raises
        ------
        ValueError
            If an entry is not finite.
        """
        if not np.isfinite(x).all():
            raise ValueError("the vector has an entry that is not finite")
        messages, decoded = list[bytes](), np.empty_like(x)
        step = max(1, AT_ONCE // x.shape[1])
        for first in range(0, len(x), step):
            rows = slice(first, first + step)
            data = self.encode(x[rows], generators[rows])
            messages += [row.tobytes() for row in data]
            decoded[rows] = self.decode(data, x.shape[1])
        return messages, decoded

    def decompress(self, data: bytes, dimension: int) -> Float32s:
        """Decode C(x).

        Parameters
        ----------
        data : bytes
            A message of ``compress``.
        dimension : int
            Number of entries d of the vector.

        Returns
        -------
        ndarray of float32
            C(x): shape (d,).

        Raises
        ------
        ValueError
            If ``compress`` cannot produce `data` for this dimension.
        """
        expected = self.num_bytes(dimension)
        if len(data) != expected:
            raise ValueError(
                f"a {type(self).__name__} message of {dimension} entries has "
                f"{expected} bytes, not {len(data)}"
            )
        (vector,) = self.decode(np.frombuffer(data, np.uint8)[None], dimension)
        return cast(Float32s, vector)

    @abstractmethod
    def encode(self, x: Float32s, generators: Sequence[Source]) -> Bytes:
        """Return the messages of finite vectors, shape (rows, ``num_bytes(d)``)."""

    @abstractmethod
    def decode(self, data: Bytes, dimension: int) -> Float32s:
        """Return C(x), shape (rows, d), from the result of ``encode``."""


@dataclass(frozen=True)
class Identity(Compressor):
    """No compression: the entries as floats. ω = 1; 4 d bytes."""

    def omega(self, dimension: int) -> float:
        """Return 1."""
        return 1.0

    def encode(self, x: Float32s, generators: Sequence[Source]) -> Bytes:
        """Return the messages of finite vectors."""
        return as_bytes(x, "<f4")

    def decode(self, data: Bytes, dimension: int) -> Float32s:
        """Return C(x)."""
        entries = data.view("<f4")
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

    def omega(self, dimension: int) -> float:
        """Return 1 / d, the smallest ω(x)."""
        return 1 / dimension

    def omega_at(self, x: Float32s) -> float:
        """Return ‖x‖₁² / (d ‖x‖₂²)."""
        return l1(x) ** 2 / (len(x) * squared_l2(x))

    def encode(self, x: Float32s, generators: Sequence[Source]) -> Bytes:
        """Return the messages of finite vectors."""
        means = [[l1(row) / len(row)] for row in x]
        return np.hstack([as_bytes(means, "<f4"), np.packbits(x >= 0, axis=1)])

    def decode(self, data: Bytes, dimension: int) -> Float32s:
        """Return C(x)."""
        mean = read_norms(data)
        positive = unpack_bits(data[:, FLOAT:], dimension).view(np.bool_)
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
    """

    # 16 bits hold a level and its sign; more would hardly be shorter than float32.
    levels: int = 15
    scaled: bool = False

    def beta(self, dimension: int) -> float:
        """Return β_{d,s} = min(d / s², √d / s)."""
        ratio = math.sqrt(dimension) / self.levels
        return min(ratio**2, ratio)

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

    def encode(self, x: Float32s, generators: Sequence[Source]) -> Bytes:
        """Return the messages of finite vectors."""
        norm = np.array([[math.sqrt(squared_l2(row))] for row in x], np.float32)
        # Dividing first keeps the quotient at most 1, and so the level at most s.
        level = np.abs(x) / np.where(norm, norm, np.float32(1))
        level *= np.float32(self.levels)
        low = np.floor(level)
        drawn = [draw().random(x.shape[1], dtype=np.float32) for draw in generators]
        up = np.stack(drawn) < level - low
        code = (low.astype(np.uint16) + up) << 1
        # A level of zero has no sign, so every vector has exactly one encoding.
        code |= (x < 0) & (code > 0)
        return np.hstack([as_bytes(norm, "<f4"), pack(code, self._bits)])

    def decode(self, data: Bytes, dimension: int) -> Float32s:
        """Return C(x)."""
        norm = read_norms(data)
        code = unpack(data[:, FLOAT:], dimension, self._bits)
        level = code >> 1
        if level.max() > self.levels:
            raise ValueError(f"a level is {level.max()}, above {self.levels}")
        entries = level.astype(np.float32) / np.float32(self.levels) * norm
        np.negative(entries, out=entries, where=(code & 1).astype(np.bool_))
        beta = self.beta(dimension)
        if self._divides(beta):
            entries /= np.float32(1 + beta)
        return entries


@dataclass(frozen=True)
class KeepsK(Compressor):
    """Base of the operators that keep k of d entries.

    Parameters
    ----------
    k : int or float, default 0.01
        An int ≥ 1 is the number of entries to keep, at most d. A float in (0, 1] is a
        fraction of d, rounded, with at least one entry. The default is the value for
        the dissertation's deep models (sections 3.5.1 and 3.5.2).
    entries : Compressor, default Identity()
        The operator applied to the kept entries, a vector of R^k: `Sign`, or `QSGD`
        with ``scaled``.
    """

    k: int | float = 0.01
    entries: Compressor = Identity()

    def count(self, dimension: int) -> int:
        """Return the number of kept entries, from 1 to d."""
        k = self.k
        return min(k if isinstance(k, int) else max(1, round(k * dimension)), dimension)

    def omega(self, dimension: int) -> float:
        """Return k / d times the ω of the operator applied to the kept entries.

        With `QSGD` it is k / (d (1 + β_{k,s})) (operator (a)): with T = Comp_k(x),
        E Q_s(T) = T and E ‖Q_s(T)‖² ≤ (1 + β) ‖T‖² imply
        E ‖T − Q_s(T) / (1 + β)‖² ≤ (1 − 1 / (1 + β)) ‖T‖².
        """
        k = self.count(dimension)
        return k / dimension * self.entries.omega(k)


class TopK(KeepsK):
    """Keep the k entries of largest magnitude and set the others to zero.

    ω = k / d (Singh 2024, section 2.4); ω(x) is the fraction of ‖x‖² that is kept. Ties
    are broken in favour of the lower index.

    With `Sign`, C(x) is (‖Top_k(x)‖₁ / k) sign(Top_k(x)) on the kept entries (operator
    (b)). There ‖C(x) − x‖² = ‖x‖² − ‖Top_k(x)‖₁² / k, hence
    ω(x) = ‖Top_k(x)‖₁² / (k ‖x‖₂²). Its minimum over x is min(1 / k, k / d), at least
    the 1 / d given there. To see this, let the kept magnitudes a_1 ≥ ... ≥ a_k sum to
    1: ‖x‖² ≤ Σ a_j² + (d − k) a_k² is convex in a and so attains its maximum at a
    corner, where the first j are equal and the rest zero. Its value there is 1 / j for
    j < k, and d / k² for j = k.

    ⌈k ⌈log2 d⌉ / 8⌉ bytes of indices, then the encoded entries.
    """

    def omega(self, dimension: int) -> float:
        """Return k / d times the ω of the entries; min(1 / k, k / d) with `Sign`."""
        k = self.count(dimension)
        if isinstance(self.entries, Sign):
            return min(1 / k, k / dimension)
        return super().omega(dimension)

    def omega_at(self, x: Float32s) -> float:
        """Return the fraction of ‖x‖² that is kept, times the ω of its encoding."""
        # ‖x − C(x)‖² = ‖x − Top_k(x)‖² + ‖Top_k(x) − C(x)‖², as the supports are
        # disjoint; the second term is (1 − ω(Top_k(x))) ‖Top_k(x)‖².
        kept = x[_largest(x[None], self.count(len(x)))[0]]
        return squared_l2(kept) / squared_l2(x) * self.entries.omega_at(kept)

    def encode(self, x: Float32s, generators: Sequence[Source]) -> Bytes:
        """Return the messages of finite vectors."""
        dimension = x.shape[1]
        indices = _largest(x, self.count(dimension))
        kept = self.entries.encode(np.take_along_axis(x, indices, 1), generators)
        return np.hstack([pack(indices, index_bits(dimension)), kept])

    def decode(self, data: Bytes, dimension: int) -> Float32s:
        """Return C(x)."""
        k, bits = self.count(dimension), index_bits(dimension)
        split = (k * bits + 7) // 8
        indices = unpack(data[:, :split], k, bits)
        last, steps = indices[:, -1], np.diff(indices)
        if (last >= dimension).any() or (steps <= 0).any():
            raise ValueError(
                f"the indices are not strictly increasing numbers below {dimension}"
            )
        return scattered(self.entries.decode(data[:, split:], k), indices, dimension)


class RandK(KeepsK):
    """Keep k entries, drawn uniformly without replacement; set the others to zero.

    ω = k / d (Singh 2024, section 2.4): entries are not scaled by d / k. The message
    contains the seed of the draw instead of the indices: 8 bytes, little-endian, then
    the encoded entries in the order of their indices.

    With `Sign`, C(x) is (‖Rand_k(x)‖₁ / k) sign(Rand_k(x)) on the kept entries
    (operator (b)), hence ω(x) = E ‖Rand_k(x)‖₁² / (k ‖x‖₂²), which is at least 1 / d.
    """

    def omega_at(self, x: Float32s) -> float:
        """Return ω, or the ω(x) of `Sign`.

        The latter is (k / d) (1 + (k − 1) / (d − 1) (‖x‖₁² / ‖x‖₂² − 1)) / k.
        """
        if not isinstance(self.entries, Sign):
            return self.omega(len(x))
        # A pair of entries is kept with probability k (k − 1) / (d (d − 1)).
        d, k = len(x), self.count(len(x))
        pairs = (k - 1) / (d - 1) if d > 1 else 0.0
        return (1 + pairs * (l1(x) ** 2 / squared_l2(x) - 1)) / d

    def encode(self, x: Float32s, generators: Sequence[Source]) -> Bytes:
        """Return the messages of finite vectors."""
        seeds = [[draw().integers(2**64, dtype=np.uint64)] for draw in generators]
        indices = _drawn(seeds, self.count(x.shape[1]), x.shape[1])
        kept = self.entries.encode(np.take_along_axis(x, indices, 1), generators)
        return np.hstack([as_bytes(seeds, "<u8"), kept])

    def decode(self, data: Bytes, dimension: int) -> Float32s:
        """Return C(x)."""
        k = self.count(dimension)
        indices = _drawn(data[:, :SEED].view("<u8"), k, dimension)
        return scattered(self.entries.decode(data[:, SEED:], k), indices, dimension)


@dataclass(frozen=True)
class PerTensor(Compressor):
    """Apply one operator to each tensor of a model separately.

    The vector is the concatenation of the tensors' entries. A fractional k is then a
    fraction of each tensor, as in the dissertation's deep models (sections 3.5.1 and
    3.5.2). Messages are concatenated. ω is the minimum over the tensors.

    Parameters
    ----------
    compressor : Compressor
        The operator.
    sizes : tuple of int
        Number of entries of each tensor, d in total; one or more numbers ≥ 1.
    """

    compressor: Compressor
    sizes: tuple[int, ...]

    def omega(self, dimension: int) -> float:
        """Return the smallest ω of the tensors."""
        return min(self.compressor.omega(size) for size in self.sizes)

    def _split(self, x: Float32s) -> list[Float32s]:
        return np.split(x, np.cumsum(self.sizes)[:-1], axis=-1)

    def omega_at(self, x: Float32s) -> float:
        """Return the mean of the tensors' ω(x), weighted by their squared norms."""
        kept = sum(
            squared_l2(tensor) * self.compressor.omega_at(tensor)
            for tensor in self._split(x)
            if tensor.any()
        )
        return kept / squared_l2(x)

    def encode(self, x: Float32s, generators: Sequence[Source]) -> Bytes:
        """Return the messages of finite vectors."""
        encode = self.compressor.encode
        return np.hstack([encode(tensor, generators) for tensor in self._split(x)])

    def decode(self, data: Bytes, dimension: int) -> Float32s:
        """Return C(x)."""
        tensors, start = [], 0
        for size in self.sizes:
            end = start + self.compressor.num_bytes(size)
            tensors.append(self.compressor.decode(data[:, start:end], size))
            start = end
        return np.hstack(tensors)


CompressorName = Literal[
    "identity",
    "top-k",
    "rand-k",
    "qsgd",
    "sign",
    "sign-top-k",
    "qsgd-top-k",
    "sign-rand-k",
    "qsgd-rand-k",
]
WITHOUT_K = tuple(n for n in get_args(CompressorName) if not n.endswith("-k"))
WITHOUT_LEVELS = tuple(n for n in get_args(CompressorName) if not n.startswith("qsgd"))


@dataclass(frozen=True)
class CompressionSettings(Checked):
    """Compression of messages (Singh, UCLA 2024, section 2.4).

    Parameters
    ----------
    compressor : str, default "sign-top-k"
        The operator C of the messages to neighbours.
    compressor_k : float, default 0.1
        k of the TopK and RandK operators: below 1 a fraction of the entries, from 1 on
        a count.
    compressor_levels : int, default 15
        Levels s of the QSGD operators, at most 32,767. With the sign, 15 levels take
        5 bits per entry and 16 take 6.
    per_tensor : bool, default False
        If True, each parameter tensor is compressed separately.
    """

    compressor: CompressorName = setting("sign-top-k")
    compressor_k: float = setting(0.1, gt=0, unused_if={"compressor": WITHOUT_K})
    compressor_levels: int = setting(
        15, ge=1, le=2**15 - 1, unused_if={"compressor": WITHOUT_LEVELS}
    )
    per_tensor: bool = setting(False)

    @property
    def operator(self) -> str:
        """The name of C."""
        return self.compressor


# Value of `upload-compressor` with which its other settings have no effect
NONE = "none"


@dataclass(frozen=True)
class UploadSettings(Checked):
    """Compression of the changes that clients send to the server.

    The parameters of the operator are those of `CompressionSettings`.

    Parameters
    ----------
    upload_compressor : str, default "none"
        The operator C. A client sends C(v) with v = change + error, where the change is
        the difference of the trained from the received arrays, and keeps v − C(v) as
        its next error. The server adds C(v) to what it sent. Integers and statistics,
        such as those of batch norms, are sent as they are. Algorithms whose server does
        more than average models refuse it.
    """

    upload_compressor: Literal["none", CompressorName] = setting(NONE)
    compressor_k: float = setting(
        0.1, gt=0, unused_if={"upload-compressor": (NONE, *WITHOUT_K)}
    )
    compressor_levels: int = setting(
        15, ge=1, le=2**15 - 1, unused_if={"upload-compressor": (NONE, *WITHOUT_LEVELS)}
    )
    per_tensor: bool = setting(False, unused_if={"upload-compressor": (NONE,)})

    @property
    def operator(self) -> str:
        """The name of C."""
        return self.upload_compressor


def from_settings(
    settings: CompressionSettings | UploadSettings, sizes: tuple[int, ...]
) -> Compressor:
    """Build the compressor of a run for a vector of tensors of these sizes.

    Raises
    ------
    SettingsError
        If ``compressor-k`` is neither a fraction nor a count.
    """
    k = settings.compressor_k
    require(k < 1 or k.is_integer(), "compressor-k", k, "in (0, 1) or a count")
    name, kept = settings.operator, settings.operator.endswith("-k")
    compressor: Compressor = Identity()
    if name.startswith("sign"):
        compressor = Sign()
    elif name.startswith("qsgd"):
        compressor = QSGD(settings.compressor_levels, scaled=kept)
    if kept:
        keeps = TopK if name.endswith("top-k") else RandK
        compressor = keeps(k if k < 1 else int(k), compressor)
    if not settings.per_tensor or isinstance(compressor, Identity):
        return compressor
    return PerTensor(compressor, sizes)


# Sums, norms and packed integers


def l1(x: Float32s) -> float:
    """Return ‖x‖₁, summed in float64."""
    return float(np.abs(x).sum(dtype=np.float64))


def squared_l2(x: Float32s) -> float:
    """Return ‖x‖₂², summed in float64."""
    return float(np.square(x, dtype=np.float64).sum())


def as_bytes(values: npt.ArrayLike, dtype: str) -> Bytes:
    """Return the bytes of a matrix in a dtype, row by row."""
    return np.ascontiguousarray(values, dtype).view(np.uint8)


def scattered(entries: Float32s, indices: NDArray[Any], dimension: int) -> Float32s:
    """Return rows with entries at the indices of each row, and 0 elsewhere."""
    x = np.zeros((len(entries), dimension), np.float32)
    np.put_along_axis(x, indices, entries, 1)
    return x


def read_norms(data: Bytes) -> Float32s:
    """Read finite, non-negative float32s, shape (rows, 1); ValueError for others."""
    norms = data[:, :FLOAT].view("<f4")
    valid = (norms >= 0) & (norms < math.inf)
    if not valid.all():
        norm = norms[~valid][0]
        raise ValueError(f"the norm is {norm}; expected a finite number >= 0")
    return norms.astype(np.float32)


def index_bits(dimension: int) -> int:
    """Return ⌈log2 d⌉, the bits of an index below d."""
    return (dimension - 1).bit_length()


def pack(values: NDArray[np.integer], bits: int) -> Bytes:
    """Write every value in ``bits`` bits, the most significant first, row by row."""
    wide = np.unpackbits(as_bytes(values[..., None], ">u4"), axis=2)
    return np.packbits(wide[..., 32 - bits :].reshape(len(values), -1), axis=1)


def unpack_bits(data: Bytes, count: int) -> Bytes:
    """Read bits as 0 and 1, row by row; ValueError if the padding is not zero."""
    padding = 8 * data.shape[1] - count
    if padding and (data[:, -1] & ((1 << padding) - 1)).any():
        raise ValueError("the padding bits of the last byte are not all zero")
    return np.unpackbits(data, axis=1, count=count)


def unpack(data: Bytes, count: int, bits: int) -> NDArray[np.int64]:
    """Read the values written by ``pack``, shape (rows, count)."""
    # Floats of 24 and of 53 bits are exact here, and their product is the fastest way.
    powers = 2.0 ** np.arange(bits, dtype="f4" if bits <= 24 else "f8")[::-1]
    columns = unpack_bits(data, count * bits).reshape(len(data) * count, bits)
    values = (columns.astype(powers.dtype) @ powers).astype(np.int64)
    return values.reshape(len(data), count)


def _largest(x: Float32s, k: int) -> NDArray[np.int64]:
    """Return the increasing indices of each row's k largest magnitudes.

    Among equal magnitudes, the lower index is kept. `torch.topk` does not guarantee
    this on every machine.
    """
    magnitude = np.abs(x)
    place = x.shape[1] - k
    bound = np.partition(magnitude, place, axis=1)[:, place, None]
    kept = magnitude >= bound
    surplus = np.count_nonzero(kept, axis=1) - k
    for i in np.flatnonzero(surplus):
        equal = np.flatnonzero(magnitude[i] == bound[i])
        kept[i, equal[-surplus[i] :]] = False
    return np.nonzero(kept)[1].reshape(len(x), k)


def _drawn(seeds: npt.ArrayLike, k: int, dimension: int) -> NDArray[np.int64]:
    """Return the increasing indices of k out of d entries, drawn uniformly.

    There is a row of them for each seed. They are the indices of the k smallest of d
    random keys. NumPy guarantees the raw words of a bit generator across versions, but
    not `Generator.choice`, and the two ends of a connection may run different versions.
    The lower bits of a key hold its index, which makes keys distinct and the k smallest
    unique.
    """
    mask = np.uint64((1 << index_bits(dimension)) - 1)
    words = [
        np.random.Philox(key=int(seed)).random_raw(dimension)
        for seed in np.ravel(seeds)
    ]
    keys = np.stack(words) & ~mask | np.arange(dimension, dtype=np.uint64)
    kept = np.partition(keys, k - 1, axis=1)[:, :k] & mask
    return np.sort(kept, axis=1).astype(np.int64)
