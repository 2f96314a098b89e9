"""Conversion to and from Flower's arrays: the same bytes, ten times as fast."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord
from flwr.common.constant import SType

from flwr_frl.task.npy import decode, dtype_name, encode

NDArray = npt.NDArray[np.generic]


def from_array(array: Array) -> NDArray:
    """Convert as ``array.numpy()``; the result may be a read-only view.

    Raises `ValueError` if the bytes cannot be read without unpickling.
    """
    if array.stype != SType.NUMPY:
        raise ValueError(f"it is serialised as {array.stype!r}, not {SType.NUMPY!r}")
    return decode(array.data)


def to_record(arrays: Mapping[str, NDArray]) -> ArrayRecord:
    """Convert arrays to an ArrayRecord, in C order, as ``Array(value)`` does."""
    record = ArrayRecord()
    # Given a dictionary, Flower would copy each Array.
    for name, value in arrays.items():
        # The constructor is slow: it has three signatures to tell apart.
        array = Array.__new__(Array)
        array.__dict__.update(
            dtype=dtype_name(value.dtype),
            shape=value.shape,
            stype=SType.NUMPY,
            data=encode(value),
        )
        record[name] = array
    return record
