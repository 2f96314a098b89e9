"""Flower's Array with values in memory, serialised only if it leaves the process.

Flower's own Array always holds the bytes of an .npy file. A simulation in one process
would write and parse these bytes for each client, although no other process reads them.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord
from flwr.common.constant import SType

from flwr_frl.common.flower_messages import fill
from flwr_frl.common.npy import decode, dtype_name, encode, header, is_finite

NDArray = npt.NDArray[Any]


class MemoryArray(Array):
    """An Array that is serialised when its ``data`` is read.

    Its dtype, shape, bytes and digest equal those of ``Array(values)``. It cannot be
    changed.

    Parameters
    ----------
    values : ndarray
        The values, which must not be changed afterwards: they are not copied if they
        are in C order.
    """

    values: NDArray

    def __init__(self, values: NDArray) -> None:
        shape = values.shape
        values = np.asarray(values, order="C").view()
        values.flags.writeable = False
        self.__dict__.update(
            dtype=dtype_name(values.dtype),
            shape=shape,
            stype=SType.NUMPY,
            values=values,
        )

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """The bytes of an .npy file, written when they are first read.

        From then on the values are a view of the bytes.
        """
        if "_encoded" not in self.__dict__:
            encoded = self.__dict__["_encoded"] = encode(self.values)
            self.__dict__["values"] = decode(encoded)
        written: bytes = self.__dict__["_encoded"]
        return written

    def numpy(self) -> NDArray:
        """Return a copy of the values."""
        return self.values.copy()

    def deflate(self) -> bytes:
        """Return the bytes that Flower transfers, equal to those of an Array."""
        array = Array(self.dtype, self.shape, self.stype, self.data)
        # Chunks are reused, because computing their digests takes time.
        array.__dict__["_chunks"] = self.slice_array()
        return array.deflate()

    @cached_property
    def all_finite(self) -> bool:
        """True if no value is NaN or infinite."""
        return is_finite(self.values)


def values_of(array: Array) -> NDArray:
    """Return the values of an Array, read-only and if possible without a copy.

    Raises `ValueError`, or another exception of NumPy, if its bytes cannot be read
    without unpickling.
    """
    if isinstance(array, MemoryArray):
        return array.values
    if array.stype != SType.NUMPY:
        raise ValueError(f"it is serialised as {array.stype!r}, not {SType.NUMPY!r}")
    values = decode(array.data)
    values.flags.writeable = False
    return values


def num_bytes(array: Array) -> int:
    """Return the number of an Array's bytes, without serialising it."""
    if not isinstance(array, MemoryArray):
        return len(array.data)
    return len(header(array.values.shape, array.values.dtype)) + array.values.nbytes


def memory_record(arrays: Mapping[str, NDArray]) -> ArrayRecord:
    """Return an ArrayRecord of `MemoryArray`.

    Arrays in C order are not copied, so they must not be changed afterwards.
    """
    return fill(ArrayRecord(), {n: MemoryArray(v) for n, v in arrays.items()})
