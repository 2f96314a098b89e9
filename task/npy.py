"""Arrays as the bytes of an .npy file, as ``numpy.save`` and ``load`` have them.

NumPy writes and parses the header anew for each array, which for a small one takes a
hundred times as long as its values. Headers of the same shape and type are the same.
"""

import io
from functools import lru_cache

import numpy as np
import numpy.typing as npt

NDArray = npt.NDArray[np.generic]


@lru_cache(maxsize=1024)
def header(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> bytes:
    """Return all that comes before the values of an array that goes by row.

    Raises `ValueError` for objects, which would have to be pickled.
    """
    if dtype.hasobject:
        raise ValueError("arrays of objects are not written")
    stream = io.BytesIO()
    like = np.lib.format.header_data_from_array_1_0(np.empty((0,), dtype))
    np.lib.format.write_array_header_1_0(stream, {**like, "shape": shape})
    return stream.getvalue()


@lru_cache(maxsize=64)
def dtype_name(dtype: np.dtype[np.generic]) -> str:
    """Return ``str(dtype)``, which takes longer than an array's values."""
    return str(dtype)


def encode(array: NDArray) -> bytes:
    """Return the bytes of an array, by row however it lies in memory."""
    return header(array.shape, array.dtype) + array.tobytes()


def decode(data: bytes) -> NDArray:
    """Return the values of an .npy file's bytes; nothing is unpickled.

    It is a view that cannot be written to where the header is a usual one; `ValueError`
    and what else NumPy raises where the bytes are no .npy file, or more than one.
    """
    found = _parse(data[: _header_length(data)])
    if found is None:
        loaded: NDArray = np.load(io.BytesIO(data), allow_pickle=False)
        return loaded
    shape, dtype, start = found
    return np.frombuffer(data, dtype, offset=start).reshape(shape)


def _header_length(data: bytes) -> int:
    """Return how long the header of version 1.0 says it is."""
    return 10 + int.from_bytes(data[8:10], "little")


@lru_cache(maxsize=1024)
def _parse(
    head: bytes,
) -> tuple[tuple[int, ...], np.dtype[np.generic], int] | None:
    """Return shape, dtype and length of a header; None if it is no usual one."""
    stream = io.BytesIO(head)
    try:
        if np.lib.format.read_magic(stream) != (1, 0):
            return None
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    except ValueError:
        return None
    # True is 1 to a cache, and -1 is any length to `reshape`.
    sizes = all(type(n) is int and n >= 0 for n in shape)
    usual = sizes and not dtype.hasobject and header(shape, dtype) == head
    return (shape, dtype, len(head)) if usual else None
