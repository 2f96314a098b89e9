"""Numbers as bytes: floats, norms, and integers of a few bits."""

import math
import struct

import numpy as np
from numpy.typing import NDArray

Float32s = NDArray[np.float32]

FLOAT = struct.Struct("<f")
SEED = struct.Struct("<Q")
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


def l1(x: Float32s) -> float:
    """Return the sum of magnitudes, in float64."""
    return float(np.abs(x).sum(dtype=np.float64))


def squared_l2(x: Float32s) -> float:
    """Return the sum of squares, in float64."""
    return float(np.square(x, dtype=np.float64).sum())


def read_norm(data: memoryview) -> np.float32:
    """Read a float32 that must be finite and at least 0, or raise ValueError."""
    norm = FLOAT.unpack_from(data)[0]
    if not 0 <= norm < math.inf:
        raise ValueError(f"a norm is {norm}: allowed is a finite number >= 0")
    return np.float32(norm)


def index_bits(dimension: int) -> int:
    """Give ceil(log2 d)."""
    return (dimension - 1).bit_length()


def packed_bytes(count: int, bits: int) -> int:
    """Return how many bytes so many values of so many bits take."""
    return (count * bits + 7) // 8


def pack(values: NDArray[np.integer] | NDArray[np.bool_], bits: int) -> bytes:
    """Write each of the values in so many bits, the most significant first."""
    columns = np.empty((len(values), bits), np.uint8)
    for column in range(bits):
        columns[:, column] = (values >> (bits - 1 - column)) & 1
    return np.packbits(columns).tobytes()


def unpack(data: memoryview, count: int, bits: int) -> NDArray[np.unsignedinteger]:
    """Read values written by ``pack``, in the smallest unsigned type they fit in."""
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
