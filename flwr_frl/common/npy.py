"""Fast encoding and decoding of arrays in the .npy format.

NumPy formats and parses the header of every array, which takes a hundred times as long
as copying a small array's values. Here, headers are cached by shape and dtype.
"""

import io
from functools import lru_cache

import numpy as np
import numpy.typing as npt

NDArray = npt.NDArray[np.generic]
# Up to this many values, testing each is faster than the sum of their squares.
SMALL = 2**13


@lru_cache(maxsize=1024)
def header(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> bytes:
    """Return the .npy header of a C-contiguous array.

    Raises `ValueError` for arrays of objects, which would have to be pickled.
    """
    if dtype.hasobject:
        raise ValueError("arrays of objects are not supported")
    stream = io.BytesIO()
    like = np.lib.format.header_data_from_array_1_0(np.empty((0,), dtype))
    np.lib.format.write_array_header_1_0(stream, {**like, "shape": shape})
    return stream.getvalue()


@lru_cache(maxsize=64)
def dtype_name(dtype: np.dtype[np.generic]) -> str:
    """Return ``str(dtype)``, cached because it is slow."""
    return str(dtype)


def encode(array: NDArray) -> bytes:
    """Return an array in the .npy format, in C order."""
    start = header(array.shape, array.dtype)
    return b"".join((start, raw(array)))


def raw(array: NDArray) -> memoryview:
    """Return the bytes of an array's values in C order; copied only if necessary."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def is_finite(array: NDArray) -> bool:
    """Return True if no value of an array of numbers is NaN or infinite."""
    if array.size <= SMALL:
        return bool(np.logical_and.reduce(np.isfinite(array), axis=None))
    if array.dtype in (np.float32, np.float64) and array.flags.c_contiguous:
        # One pass without a temporary array. If the sum of squares overflows, each
        # value is tested.
        flat = array.reshape(-1)
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(np.dot(flat, flat)):
                return True
    return bool(np.isfinite(array).all())


def decode(data: bytes) -> NDArray:
    """Return the array in the bytes of an .npy file, without unpickling.

    The array is a read-only view of ``data`` if its header is as `encode` writes it.
    Invalid bytes raise `ValueError` or another exception of NumPy.
    """
    # Version 1.0 stores the header's length in bytes 8 and 9.
    header_length = 10 + int.from_bytes(data[8:10], "little")
    parsed = _parse(data[:header_length])
    if parsed is None:
        array: NDArray = np.load(io.BytesIO(data), allow_pickle=False)
        return array
    shape, dtype, start = parsed
    return np.frombuffer(data, dtype, offset=start).reshape(shape)


@lru_cache(maxsize=1024)
def _parse(
    data: bytes,
) -> tuple[tuple[int, ...], np.dtype[np.generic], int] | None:
    """Return shape, dtype and length of a header; None if `header` writes another."""
    stream = io.BytesIO(data)
    try:
        if np.lib.format.read_magic(stream) != (1, 0):
            return None
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    except ValueError:
        return None
    # The cache of `header` treats True as 1, and `reshape` infers a length of -1.
    valid = all(type(n) is int and n >= 0 for n in shape) and not dtype.hasobject
    usual = valid and header(shape, dtype) == data
    return (shape, dtype, len(data)) if usual else None
