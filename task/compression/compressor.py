"""Base class of compression operators C, each with its encoding and its ω.

An operator with parameter ω in (0, 1] satisfies, for every x in R^d,

    E ‖C(x) − x‖² ≤ (1 − ω) ‖x‖²

(Singh, UCLA 2024, section 2.4, Definition 1, equation 2.5). ``compress`` encodes C(x)
as bytes and ``decompress`` decodes it. C(x) is defined as the output of ``decompress``,
so the sender and the receivers hold identical floats.

Every encoding has a fixed size: ``num_bytes(d)`` depends only on the dimension and the
operator's settings, and is the length of every message. Fields are concatenated, and
each is padded with zero bits to a whole byte.

=========  ==================================================================
float      IEEE binary32, little-endian
index      ⌈log2 d⌉ bits, most significant first, strictly increasing
sign       1 bit, 1 for +1; sign(0) = +1
level      of QSGD: 0 to s in ⌈log2(s + 1)⌉ bits, followed by a bit that is
           1 for a negative entry
=========  ==================================================================

Messages are untrusted input. ``decompress`` first compares the message's length with
``num_bytes(dimension)``, and allocates no array of ``dimension`` floats before norms,
indices and levels have passed their range checks.

NumPy computes the sums that enter a message, in float64. Sums in torch or BLAS depend
on the number of threads, and so would the messages.
"""

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

Float32s = NDArray[np.float32]

FLOAT = struct.Struct("<f")
SEED = struct.Struct("<Q")
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


class Compressor(ABC):
    """An operator C of Definition 1 together with its encoding.

    Subclasses implement ``num_bytes``, ``omega``, ``_encode`` and ``_decode``. The
    last two receive only arguments that passed the checks of this class.
    """

    @property
    def is_random(self) -> bool:
        """True if ``compress`` draws random numbers."""
        return False

    @property
    def is_exact(self) -> bool:
        """True if C(x) = x."""
        return False

    @abstractmethod
    def num_bytes(self, dimension: int) -> int:
        """Return the length in bytes of ``compress(x)`` for every x in R^d.

        Parameters
        ----------
        dimension : int
            Number of entries d of the vector.
        """

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

    def typical_omega(self, dimension: int) -> float:
        """Return ω(x) in (0, 1] at a fixed vector x of independent Gaussian entries.

        For many operators the worst case, ``omega(d)``, occurs at vectors with one
        non-zero entry, which differences between models do not resemble.

        Parameters
        ----------
        dimension : int
            Number of entries d of the vector.
        """
        return _typical_omega(self, dimension)

    def compress(self, x: torch.Tensor, generator: np.random.Generator) -> bytes:
        """Encode C(x).

        Parameters
        ----------
        x : torch.Tensor
            Shape (d,), float32, d ≥ 1, every entry finite; on any device.
        generator : numpy.random.Generator
            Source of randomness. Deterministic operators draw nothing from it.

        Returns
        -------
        bytes
            ``num_bytes(d)`` bytes.

        Raises
        ------
        ValueError
            If `x` is not such a tensor, or if its norm is part of the message and
            exceeds the range of float32.
        """
        return self._encode(_checked(x[None])[0], generator)

    def compress_rows(
        self, rows: torch.Tensor, generators: Iterable[np.random.Generator]
    ) -> list[bytes]:
        """Encode C(x) for each row x of a matrix, with one generator per row."""
        pairs = zip(_checked(rows), generators, strict=True)
        return [self._encode(row, generator) for row, generator in pairs]

    def decompress(self, data: bytes, dimension: int) -> torch.Tensor:
        """Decode C(x).

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
            If ``compress`` cannot produce `data` for this dimension.
        """
        expected = self.num_bytes(dimension)
        if len(data) != expected:
            raise ValueError(
                f"a {type(self).__name__} message of {dimension} entries has "
                f"{expected} bytes, not {len(data)}"
            )
        return torch.from_numpy(self._decode(memoryview(data), dimension))

    @abstractmethod
    def _encode(self, x: Float32s, generator: np.random.Generator) -> bytes: ...

    @abstractmethod
    def _decode(self, data: memoryview, dimension: int) -> Float32s: ...


@lru_cache(maxsize=4)
def _typical_omega(compressor: Compressor, dimension: int) -> float:
    generator = np.random.default_rng(0)
    vector = generator.standard_normal(dimension, np.float32)
    # Rounding can lift the ratio slightly above 1.
    return min(1.0, float(compressor.omega_at(vector)))


def _checked(rows: torch.Tensor) -> Float32s:
    """Return a finite float32 matrix as an array; raise ValueError for others."""
    if (
        rows.dtype != torch.float32
        or rows.dim() != 2
        or not 1 <= rows.shape[1] <= 2**32
    ):
        raise ValueError(
            f"the vector is {rows.dtype} of shape {tuple(rows.shape[1:])}; "
            "expected float32 of shape (d,), 1 <= d <= 2^32"
        )
    array: Float32s = rows.detach().cpu().numpy()
    if not np.isfinite(array).all():
        raise ValueError("the vector has an entry that is not finite")
    return array


def l1(x: Float32s) -> float:
    """Return ‖x‖₁, summed in float64."""
    return float(np.abs(x).sum(dtype=np.float64))


def squared_l2(x: Float32s) -> float:
    """Return ‖x‖₂², summed in float64."""
    return float(np.square(x, dtype=np.float64).sum())


def read_norm(data: memoryview) -> np.float32:
    """Read a finite, non-negative float32; raise ValueError for other values."""
    norm = FLOAT.unpack_from(data)[0]
    if not 0 <= norm < math.inf:
        raise ValueError(f"the norm is {norm}; expected a finite number >= 0")
    return np.float32(norm)


def index_bits(dimension: int) -> int:
    """Return ⌈log2 d⌉, the bits of an index below d."""
    return (dimension - 1).bit_length()


def packed_bytes(count: int, bits: int) -> int:
    """Return the number of bytes of ``count`` values of ``bits`` bits each."""
    return (count * bits + 7) // 8


def pack(values: NDArray[np.integer] | NDArray[np.bool_], bits: int) -> bytes:
    """Write every value in ``bits`` bits, the most significant first."""
    if bits == 1:
        return np.packbits(values.astype(np.bool_)).tobytes()
    wide = values.astype(_integer(bits).newbyteorder(">")).view(np.uint8)
    columns = np.unpackbits(wide.reshape(len(values), -1), axis=1)
    columns = columns[:, columns.shape[1] - bits :]
    return np.packbits(columns).tobytes()


def unpack(data: memoryview, count: int, bits: int) -> NDArray[np.unsignedinteger]:
    """Read the values written by ``pack``, in the smallest unsigned dtype."""
    raw = np.frombuffer(data, np.uint8)
    padding = 8 * len(raw) - count * bits
    if padding and raw[-1] & ((1 << padding) - 1):
        raise ValueError("the padding bits of the last byte are not all zero")
    columns = np.unpackbits(raw, count=count * bits)
    if bits == 1:
        return columns
    kind = _integer(bits)
    wide = np.zeros((count, 8 * kind.itemsize), np.uint8)
    wide[:, wide.shape[1] - bits :] = columns.reshape(count, bits)
    values = np.packbits(wide, axis=1).view(kind.newbyteorder(">"))
    return values.reshape(count).astype(kind)


def _integer(bits: int) -> np.dtype[np.unsignedinteger]:
    """Return the smallest unsigned dtype of at least this many bits."""
    return np.dtype(np.min_scalar_type((1 << bits) - 1))
