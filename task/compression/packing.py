"""Encoding of floats, norms and small integers as bytes."""

import math
import struct

import numpy as np
from numpy.typing import NDArray

Float32s = NDArray[np.float32]

FLOAT = struct.Struct("<f")
SEED = struct.Struct("<Q")
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


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
    columns = np.empty((len(values), bits), np.uint8)
    for column in range(bits):
        columns[:, column] = (values >> (bits - 1 - column)) & 1
    return np.packbits(columns).tobytes()


def unpack(data: memoryview, count: int, bits: int) -> NDArray[np.unsignedinteger]:
    """Read the values written by ``pack``, in the smallest unsigned dtype."""
    raw = np.frombuffer(data, np.uint8)
    padding = 8 * len(raw) - count * bits
    if padding and raw[-1] & ((1 << padding) - 1):
        raise ValueError("the padding bits of the last byte are not all zero")
    columns = np.unpackbits(raw, count=count * bits).reshape(count, bits)
    values = np.zeros(count, np.min_scalar_type((1 << bits) - 1))
    for column in range(bits):
        values <<= 1
        values |= columns[:, column]
    return values
