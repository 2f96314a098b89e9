"""Compression operators C, each with its exact bytes, its length and its omega.

An operator of parameter omega in (0, 1] satisfies, for every x in R^d,

    E ||C(x) - x||^2 <= (1 - omega) ||x||^2

(Singh, UCLA 2024, section 2.4, Definition 1, equation 2.5). ``compress`` writes C(x)
as bytes and ``decompress`` reads it back. C(x) is by definition what ``decompress``
returns, so sender and receivers hold identical floats.

Every code has a fixed size: ``num_bytes(d)`` depends on the dimension and the
operator's settings only, and is the length of every message. Numbers are written as
follows; fields follow each other and each is padded with zero bits to a whole byte.

=========  ==================================================================
float      IEEE binary32, little-endian
index      ceil(log2 d) bits, most significant first, strictly increasing
sign       1 bit, 1 for +1; sign(0) = +1
level      of QSGD: 0 to s in ceil(log2(s + 1)) bits, followed by a bit that is
           1 for a negative entry
=========  ==================================================================

What comes from the network is never trusted: ``decompress`` first compares the
message's length with ``num_bytes(dimension)``, and builds no array of ``dimension``
floats before norms, indices and levels have passed their range checks.

Sums that end up in a message are taken by NumPy in float64: unlike a sum in torch or
BLAS they do not depend on the number of threads, so a message does not either.
"""

import math
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray

from task.settings import Settings, SettingsError, require, unknown

Floats = NDArray[np.float32]

_FLOAT = struct.Struct("<f")
_SEED = struct.Struct("<Q")
_LARGEST = float(np.finfo(np.float32).max)


class Compressor(ABC):
    """An operator C of Definition 1 together with its code.

    A subclass states ``num_bytes`` and ``omega`` and writes ``_encode`` and
    ``_decode``, which see only arguments that passed the checks made here.
    """

    @abstractmethod
    def num_bytes(self, dimension: int) -> int:
        """Give the length of every message.

        Parameters
        ----------
        dimension : int
            Number of entries d of the vector.

        Returns
        -------
        int
            Length in bytes of ``compress(x)`` for every x in R^d.
        """

    @abstractmethod
    def omega(self, dimension: int) -> float:
        """Give the omega that holds for every vector of R^d.

        Parameters
        ----------
        dimension : int
            Number of entries d of the vector.

        Returns
        -------
        float
            omega in (0, 1].
        """

    def omega_at(self, x: torch.Tensor) -> float:
        """Give the omega that holds at one vector.

        It is never less than ``omega(d)``, and larger where the error depends on the
        vector (``Sign`` and whatever keeps the largest entries).

        Parameters
        ----------
        x : torch.Tensor
            Shape (d,), float32, finite. At x = 0 the answer is ``omega(d)``.

        Returns
        -------
        float
            omega(x) with E ||C(x) - x||^2 <= (1 - omega(x)) ||x||^2.

        Raises
        ------
        ValueError
            If `x` is not such a tensor.
        """
        array = _checked(x)
        return self._omega_at(array) if array.any() else self.omega(len(array))

    def compress(self, x: torch.Tensor, generator: np.random.Generator) -> bytes:
        """Write C(x).

        Parameters
        ----------
        x : torch.Tensor
            Shape (d,), float32, d >= 1, every entry finite; on any device.
        generator : numpy.random.Generator
            Source of the operator's randomness; deterministic operators leave it as
            it is.

        Returns
        -------
        bytes
            ``num_bytes(d)`` bytes.

        Raises
        ------
        ValueError
            If `x` is not such a tensor, or its norm is sent and too large for float32.
        """
        return self._encode(_checked(x), generator)

    def decompress(self, data: bytes, dimension: int) -> torch.Tensor:
        """Read C(x).

        Parameters
        ----------
        data : bytes
            A message of ``compress``.
        dimension : int
            Number of entries d of the vector.

        Returns
        -------
        torch.Tensor
            C(x): shape (d,), float32, on the CPU.

        Raises
        ------
        ValueError
            If `data` is not a message that ``compress`` can write for this dimension.
        """
        expected = self.num_bytes(dimension)
        if len(data) != expected:
            raise ValueError(
                f"a {type(self).__name__} message of {dimension} entries has "
                f"{expected} bytes, not {len(data)}"
            )
        return torch.from_numpy(self._decode(memoryview(data), dimension))

    def _omega_at(self, x: Floats) -> float:
        return self.omega(len(x))

    @abstractmethod
    def _encode(self, x: Floats, generator: np.random.Generator) -> bytes: ...

    @abstractmethod
    def _decode(self, data: memoryview, dimension: int) -> Floats: ...


@dataclass(frozen=True)
class Identity(Compressor):
    """No compression: the entries as floats.

    omega = 1; 4 d bytes.
    """

    def num_bytes(self, dimension: int) -> int:
        """Give 4 d."""
        return 4 * dimension

    def omega(self, dimension: int) -> float:
        """Give 1."""
        return 1.0

    def _encode(self, x: Floats, generator: np.random.Generator) -> bytes:
        return x.astype("<f4", copy=False).tobytes()

    def _decode(self, data: memoryview, dimension: int) -> Floats:
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
        return _FLOAT.size + _packed_bytes(dimension, 1)

    def omega(self, dimension: int) -> float:
        """Give 1 / d, the least omega(x); see ``omega_at`` for omega(x)."""
        return 1 / dimension

    def _omega_at(self, x: Floats) -> float:
        return _l1(x) ** 2 / (len(x) * _squared_l2(x))

    def _encode(self, x: Floats, generator: np.random.Generator) -> bytes:
        return _FLOAT.pack(_l1(x) / len(x)) + _pack(x >= 0, 1)

    def _decode(self, data: memoryview, dimension: int) -> Floats:
        mean = _read_norm(data)
        positive = _unpack(data[_FLOAT.size :], dimension, 1).view(np.bool_)
        return np.where(positive, mean, -mean)


@dataclass(frozen=True)
class QSGD(Compressor):
    """Stochastic quantiser Q_s to s levels of |x_i| / ||x||_2.

    Q_s(x)_i = ||x||_2 * sgn(x_i) * l_i / s, where l_i is s |x_i| / ||x||_2 rounded up
    or down at random so that E Q_s(x) = x. Its variance is at most beta ||x||^2 with
    beta_{d,s} = min(d / s^2, sqrt(d) / s) (Singh 2024, section 2.4, footnote 2).
    Q_s itself contracts, with omega = 1 - beta, only where beta < 1; Q_s / (1 + beta)
    does for every s, with omega = 1 / (1 + beta).

    The norm is sent as a float. Rounding it does not bias Q_s, since the levels are
    taken relative to the rounded norm, nor make a level exceed s: no entry, itself a
    float, is larger than the exact norm, nor then than the nearest float to it.

    4 + ceil(d (ceil(log2(s + 1)) + 1) / 8) bytes: the norm, then the levels.

    Parameters
    ----------
    levels : int, default 15
        s, from 1 to 32,767. The default is the largest s of 4 bits (5 with the sign).
    scaled : bool, default False
        Whether to divide by 1 + beta: a contraction, but no longer unbiased.

    Raises
    ------
    SettingsError
        If `levels` is out of range.
    """

    levels: int = 15
    scaled: bool = False

    def __post_init__(self) -> None:
        """Check the number of levels."""
        _check_levels(self.levels)

    def beta(self, dimension: int) -> float:
        """Give beta_{d,s} = min(d / s^2, sqrt(d) / s), the relative variance's bound.

        Parameters
        ----------
        dimension : int
            Number of entries d of the vector.

        Returns
        -------
        float
            beta > 0.
        """
        ratio = math.sqrt(dimension) / self.levels
        return min(ratio**2, ratio)

    def num_bytes(self, dimension: int) -> int:
        """Give 4 + ceil(d (ceil(log2(s + 1)) + 1) / 8)."""
        return _FLOAT.size + _packed_bytes(dimension, self._bits)

    def omega(self, dimension: int) -> float:
        """Give 1 - beta, or 1 / (1 + beta) if scaled.

        Parameters
        ----------
        dimension : int
            Number of entries d of the vector.

        Returns
        -------
        float
            omega in (0, 1].

        Raises
        ------
        SettingsError
            If not scaled and beta >= 1: Q_s is then no compression operator.
        """
        beta = self.beta(dimension)
        if self.scaled:
            return 1 / (1 + beta)
        if beta >= 1:
            raise SettingsError(
                f"qsgd with levels={self.levels} is no contraction on {dimension} "
                f"entries: take levels above {math.isqrt(dimension)}, or scaled=True"
            )
        return 1 - beta

    @property
    def _bits(self) -> int:
        return self.levels.bit_length() + 1

    def _encode(self, x: Floats, generator: np.random.Generator) -> bytes:
        exact = math.sqrt(_squared_l2(x))
        if exact > _LARGEST:
            raise ValueError(f"the norm {exact:.3g} of the vector is no float32 number")
        norm = np.float32(exact)
        # Dividing first keeps the quotient at most 1, and so the level at most s.
        level = np.abs(x) / (norm or np.float32(1)) * np.float32(self.levels)
        low = np.floor(level)
        up = generator.random(len(x), dtype=np.float32) < level - low
        code = (low.astype(np.uint16) + up) << 1
        # A level of zero has no sign: one vector, one message.
        code |= (x < 0) & (code > 0)
        return _FLOAT.pack(norm) + _pack(code, self._bits)

    def _decode(self, data: memoryview, dimension: int) -> Floats:
        norm = _read_norm(data)
        code = _unpack(data[_FLOAT.size :], dimension, self._bits)
        level = code >> 1
        if level.max() > self.levels:
            raise ValueError(f"a level is {level.max()}, above {self.levels}")
        entries = level.astype(np.float32) / np.float32(self.levels) * norm
        np.negative(entries, out=entries, where=(code & 1).astype(np.bool_))
        if self.scaled:
            entries /= np.float32(1 + self.beta(dimension))
        return entries


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
        indices = _packed_bytes(k, _index_bits(dimension))
        return indices + self._entries.num_bytes(k)

    def omega(self, dimension: int) -> float:
        """Give k / d times the omega of the code of the kept entries."""
        k = _count(self.k, dimension)
        return k / dimension * self._entries.omega(k)

    @property
    def _entries(self) -> Compressor:
        """The operator that the kept entries, a vector of R^k, go through."""
        return Identity()

    def _omega_at(self, x: Floats) -> float:
        # ||x - C(x)||^2 = ||x - Top_k(x)||^2 + ||Top_k(x) - C(x)||^2, as their
        # supports are disjoint; the second is (1 - omega(Top_k(x))) ||Top_k(x)||^2.
        kept = x[_largest(x, _count(self.k, len(x)))]
        share = _squared_l2(kept) / _squared_l2(x)
        return share * self._entries._omega_at(kept)

    def _encode(self, x: Floats, generator: np.random.Generator) -> bytes:
        indices = _largest(x, _count(self.k, len(x)))
        packed = _pack(indices, _index_bits(len(x)))
        return packed + self._entries._encode(x[indices], generator)

    def _decode(self, data: memoryview, dimension: int) -> Floats:
        k, bits = _count(self.k, dimension), _index_bits(dimension)
        split = _packed_bytes(k, bits)
        indices = _unpack(data[:split], k, bits)
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
    indices, the norm, the levels.

    Parameters
    ----------
    k : int or float, default 0.01
        As for ``TopK``.
    levels : int, default 15
        As for ``QSGD``.

    Raises
    ------
    SettingsError
        If one of them is out of range.
    """

    levels: int = 15

    def __post_init__(self) -> None:
        """Check k and the number of levels."""
        _check_k(self.k)
        _check_levels(self.levels)

    @property
    def _entries(self) -> Compressor:
        return QSGD(self.levels, scaled=True)


@dataclass(frozen=True)
class RandK(Compressor):
    """k entries drawn uniformly without replacement, the others set to zero.

    omega = k / d (Singh 2024, section 2.4): entries are not scaled up by d / k. The
    draw follows from a seed, which is sent in place of the indices.

    8 + 4 k bytes: the seed as a little-endian integer, then the entries in the order
    of their indices.

    Parameters
    ----------
    k : int or float, default 0.01
        As for ``TopK``.

    Raises
    ------
    SettingsError
        If `k` is out of range.
    """

    k: int | float = 0.01

    def __post_init__(self) -> None:
        """Check k."""
        _check_k(self.k)

    def num_bytes(self, dimension: int) -> int:
        """Give 8 + 4 k."""
        return _SEED.size + 4 * _count(self.k, dimension)

    def omega(self, dimension: int) -> float:
        """Give k / d."""
        return _count(self.k, dimension) / dimension

    def _encode(self, x: Floats, generator: np.random.Generator) -> bytes:
        seed = int(generator.integers(2**64, dtype=np.uint64))
        kept = x[_drawn(seed, _count(self.k, len(x)), len(x))]
        return _SEED.pack(seed) + Identity()._encode(kept, generator)

    def _decode(self, data: memoryview, dimension: int) -> Floats:
        k = _count(self.k, dimension)
        (seed,) = _SEED.unpack_from(data)
        entries = Identity()._decode(data[_SEED.size :], k)
        x = np.zeros(dimension, np.float32)
        x[_drawn(seed, k, dimension)] = entries
        return x


@dataclass(frozen=True)
class PerTensor(Compressor):
    """One operator applied to each tensor of a model on its own.

    The vector is the tensors' entries one tensor after another; a fractional k is then
    a fraction of each tensor, as in the dissertation's deep models (sections 3.5.1 and
    3.5.2). Messages follow each other. omega is the least one over the tensors.

    Parameters
    ----------
    compressor : Compressor
        The operator.
    sizes : tuple of int
        Number of entries of each tensor, each at least 1.

    Raises
    ------
    SettingsError
        If `sizes` is empty or one of them is less than 1.
    ValueError
        Later, if a vector does not have sum(sizes) entries.
    """

    compressor: Compressor
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check the sizes."""
        valid = bool(self.sizes) and min(self.sizes) >= 1
        require(valid, "sizes", self.sizes, "one or more numbers >= 1")

    def num_bytes(self, dimension: int) -> int:
        """Give the sum over the tensors.

        Parameters
        ----------
        dimension : int
            sum(sizes).

        Returns
        -------
        int
            Length of every message in bytes.

        Raises
        ------
        ValueError
            If `dimension` is anything else.
        """
        self._check_dimension(dimension)
        return sum(self.compressor.num_bytes(size) for size in self.sizes)

    def omega(self, dimension: int) -> float:
        """Give the least omega of a tensor.

        Parameters
        ----------
        dimension : int
            sum(sizes).

        Returns
        -------
        float
            omega in (0, 1].

        Raises
        ------
        ValueError
            If `dimension` is anything else.
        """
        self._check_dimension(dimension)
        return min(self.compressor.omega(size) for size in self.sizes)

    def _check_dimension(self, dimension: int) -> None:
        if dimension != sum(self.sizes):
            raise ValueError(
                f"a vector of {dimension} entries can not be split into tensors of "
                f"{sum(self.sizes)} in all"
            )

    def _split(self, x: Floats) -> list[Floats]:
        self._check_dimension(len(x))
        return np.split(x, np.cumsum(self.sizes)[:-1])

    def _omega_at(self, x: Floats) -> float:
        kept = sum(
            _squared_l2(tensor) * self.compressor._omega_at(tensor)
            for tensor in self._split(x)
            if tensor.any()
        )
        return kept / _squared_l2(x)

    def _encode(self, x: Floats, generator: np.random.Generator) -> bytes:
        encode = self.compressor._encode
        return b"".join(encode(tensor, generator) for tensor in self._split(x))

    def _decode(self, data: memoryview, dimension: int) -> Floats:
        tensors, start = [], 0
        for size in self.sizes:
            end = start + self.compressor.num_bytes(size)
            tensors.append(self.compressor._decode(data[start:end], size))
            start = end
        return np.concatenate(tensors)


COMPRESSORS: dict[str, type[Compressor]] = {
    "identity": Identity,
    "top-k": TopK,
    "rand-k": RandK,
    "qsgd": QSGD,
    "sign": Sign,
    "sign-top-k": SignTopK,
    "qsgd-top-k": QSGDTopK,
}


def create(name: str, **settings: int | float) -> Compressor:
    """Build a compressor by name.

    Parameters
    ----------
    name : str
        A key of ``COMPRESSORS``.
    **settings : int or float
        The operator's own settings: ``k``, ``levels``, ``scaled``.

    Returns
    -------
    Compressor
        The operator.

    Raises
    ------
    SettingsError
        If the name, a setting's name or its value is not one of those allowed.
    """
    if name not in COMPRESSORS:
        raise unknown("compressor", name, COMPRESSORS)
    kind = COMPRESSORS[name]
    allowed = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for setting in settings:
        if setting not in allowed:
            raise unknown(f"setting of {name}", setting, allowed or ["none"])
    return kind(**settings)


def from_settings(settings: Settings, sizes: tuple[int, ...]) -> Compressor:
    """Build the compressor that the settings name.

    Parameters
    ----------
    settings : mapping
        ``compressor``; ``compressor-k``, below 1 a fraction, else a count;
        ``compressor-levels`` of QSGD; ``per-tensor``.
    sizes : tuple of int
        Number of entries of each tensor of the vector.

    Returns
    -------
    Compressor
        The operator.

    Raises
    ------
    SettingsError
        If the name or a value is not one of those allowed.
    """
    name, k = str(settings["compressor"]), float(settings["compressor-k"])
    require(0 < k < 1 or k == round(k) >= 1, "compressor-k", k, "in (0, 1) or a count")
    if name not in COMPRESSORS:
        raise unknown("compressor", name, COMPRESSORS)
    names = {field.name for field in fields(COMPRESSORS[name])}  # type: ignore[arg-type]
    own: dict[str, int | float] = {}
    if "k" in names:
        own["k"] = k if k < 1 else int(k)
    if "levels" in names:
        own["levels"] = int(settings["compressor-levels"])
    compressor = create(name, **own)
    return PerTensor(compressor, sizes) if settings["per-tensor"] else compressor


def _checked(x: torch.Tensor) -> Floats:
    """Give a 1-D float32 tensor as an array, once it is known to be finite."""
    if x.dtype != torch.float32 or x.dim() != 1 or not 1 <= len(x) <= 2**32:
        raise ValueError(
            f"a vector is {x.dtype} of shape {tuple(x.shape)}: "
            "allowed is float32 of shape (d,), 1 <= d <= 2^32"
        )
    array: Floats = x.detach().cpu().numpy()
    if not np.isfinite(array).all():
        raise ValueError("the vector has an entry that is not finite")
    return array


def _check_k(k: int | float) -> None:
    valid = k >= 1 if isinstance(k, int) else isinstance(k, float) and 0 < k <= 1
    require(valid, "k", k, "a count (an int >= 1) or a fraction (a float in (0, 1])")


def _check_levels(levels: int) -> None:
    # 16 bits hold a level and its sign; float32 itself is hardly longer beyond that.
    valid = isinstance(levels, int) and 1 <= levels < 2**15
    require(valid, "levels", levels, "an int from 1 to 32767")


def _count(k: int | float, dimension: int) -> int:
    """Turn the setting k into a number of entries from 1 to d."""
    return min(k if isinstance(k, int) else max(1, round(k * dimension)), dimension)


def _l1(x: Floats) -> float:
    return float(np.abs(x).sum(dtype=np.float64))


def _squared_l2(x: Floats) -> float:
    return float(np.square(x, dtype=np.float64).sum())


def _largest(x: Floats, k: int) -> NDArray[np.int64]:
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
    mask = np.uint64((1 << _index_bits(dimension)) - 1)
    keys = np.random.Philox(key=seed).random_raw(dimension) & ~mask
    keys |= np.arange(dimension, dtype=np.uint64)
    return np.sort(np.partition(keys, k - 1)[:k] & mask)


def _read_norm(data: memoryview) -> np.float32:
    norm = _FLOAT.unpack_from(data)[0]
    if not 0 <= norm < math.inf:
        raise ValueError(f"a norm is {norm}: allowed is a finite number >= 0")
    return np.float32(norm)


def _index_bits(dimension: int) -> int:
    """Give ceil(log2 d)."""
    return (dimension - 1).bit_length()


def _packed_bytes(count: int, bits: int) -> int:
    return (count * bits + 7) // 8


def _pack(values: NDArray[np.integer] | NDArray[np.bool_], bits: int) -> bytes:
    """Write each of the values in so many bits, the most significant first."""
    columns = np.empty((len(values), bits), np.uint8)
    for column in range(bits):
        columns[:, column] = (values >> (bits - 1 - column)) & 1
    return np.packbits(columns).tobytes()


def _unpack(data: memoryview, count: int, bits: int) -> NDArray[np.unsignedinteger]:
    """Read values written by ``_pack``, in the smallest unsigned type they fit in."""
    raw = np.frombuffer(data, np.uint8)
    padding = 8 * len(raw) - count * bits
    if padding and raw[-1] & ((1 << padding) - 1):
        raise ValueError("the bits that fill up the last byte are not all zero")
    columns = np.unpackbits(raw, count=count * bits).reshape(count, bits)
    values = np.zeros(count, np.min_scalar_type((1 << bits) - 1))
    for column in range(bits):
        values <<= 1
        values |= columns[:, column]
    return values
