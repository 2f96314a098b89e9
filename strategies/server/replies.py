"""Arithmetic on the arrays of replies: means, precisions and ranges."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, MetricRecord

from flwr_frl.common.memory_array import MemoryArray, memory_record, values_of
from flwr_frl.common.npy import is_finite as all_finite

NDArray = npt.NDArray[np.generic]
Arrays = dict[str, NDArray]

# Largest valid number, so that sums stay finite: float32's limit, which only float64
# can exceed.
LARGEST = 3.4028235e38
# Number of entries that are scaled at a time, so that they stay in the cache.
CHUNK = 2**16


class RunningMean:
    """The weighted mean of arrays that are added one after the other.

    Only the sums are in memory, in float64.
    """

    def __init__(self) -> None:
        self._total = 0.0
        self._sums: dict[str, npt.NDArray[np.float64]] = {}
        self._dtypes: dict[str, np.dtype[np.generic]] = {}

    def add(self, weight: float, arrays: Mapping[str, NDArray]) -> None:
        """Add arrays with a weight, at least 0."""
        self._total += weight
        for name, value in arrays.items():
            if name not in self._sums:
                # Arrays without dimensions stay arrays.
                scaled = np.asarray(np.multiply(value, weight, dtype=np.float64))
                self._sums[name], self._dtypes[name] = scaled, value.dtype
            elif weight == 1:
                self._sums[name] += value  # type: ignore[arg-type]
            else:
                add_scaled(self._sums[name], value, weight)

    def result(self) -> Arrays | None:
        """Return the mean, only once; None if the weights sum to 0.

        The mean has the dtypes of the first arrays; integers are rounded.
        """
        if self._total == 0:
            return None
        means: Arrays = {}
        for name in list(self._sums):
            means[name] = divided(self._sums.pop(name), self._total, self._dtypes[name])
        return means


def add_scaled(total: npt.NDArray[np.float64], value: NDArray, weight: float) -> None:
    """Add a multiple of an array to a float64 array in place, without a large copy."""
    if value.size <= CHUNK or not (
        total.flags.c_contiguous and value.flags.c_contiguous
    ):
        total += np.multiply(value, weight, dtype=np.float64)
        return
    sums, values, scaled = total.reshape(-1), value.reshape(-1), np.empty(CHUNK)
    for start in range(0, len(sums), CHUNK):
        part = values[start : start + CHUNK]
        out = scaled[: len(part)]
        np.multiply(part, weight, out=out, dtype=np.float64)
        sums[start : start + CHUNK] += out


def mean(replies: Iterable[tuple[float, Mapping[str, NDArray]]]) -> Arrays | None:
    """Return the weighted mean of arrays, summed in the given order.

    Pairs of a weight, at least 0, and arrays are consumed one at a time, so that only a
    running sum (in float64) is in memory. The mean has the dtypes of the first arrays;
    integers are rounded. None if the weights sum to 0.
    """
    running = RunningMean()
    for weight, arrays in replies:
        running.add(weight, arrays)
    return running.result()


def divided(
    total: npt.NDArray[np.float64], number: float, dtype: np.dtype[Any]
) -> NDArray:
    """Return the quotient in another dtype, rounded for integers."""
    if np.issubdtype(dtype, np.floating):
        # The quotient is float64 as well, but no array holds all of it.
        quotient = np.empty(total.shape, dtype)
        return np.divide(
            total, number, out=quotient, dtype=np.float64, casting="same_kind"
        )
    return rounded_to(dtype, total / number)


def rounded_to(
    dtype: np.dtype[Any], values: npt.NDArray[np.float64]
) -> npt.NDArray[Any]:
    """Return float64 numbers in another dtype, rounded for integers."""
    is_integer = np.issubdtype(dtype, np.integer)
    # Arrays without dimensions stay arrays.
    return np.asarray(np.rint(values) if is_integer else values).astype(dtype)


def is_finite(arrays: Mapping[str, NDArray]) -> bool:
    """Return whether all values are finite and within float32's range."""
    for values in arrays.values():
        if values.dtype != np.float64:
            finite = all_finite(values)
        else:
            # NaN compares as False.
            finite = values.size == 0 or bool(np.abs(values).max() <= LARGEST)
        if not finite:
            return False
    return True


def to_record(arrays: Mapping[str, NDArray]) -> ArrayRecord:
    """Return copies of arrays as an ArrayRecord, equal to ``Array(value)`` of each."""
    return memory_record({n: np.array(v, order="C") for n, v in arrays.items()})


def as_float16(arrays: ArrayRecord) -> ArrayRecord:
    """Return float32 arrays as float16, for sending; others unchanged."""
    limit = np.finfo(np.float16)
    record = ArrayRecord()
    for name, array in arrays.items():
        if array.dtype == "float32":
            # Values beyond float16's range become its largest number, not infinity.
            values = np.clip(values_of(array), limit.min, limit.max)
            array = MemoryArray(np.asarray(values, np.float16))
        record[name] = array
    return record


def as_float32(arrays: Arrays, before: ArrayRecord) -> Arrays:
    """Return float16 arrays as float32, the reverse of `as_float16`.

    Arrays that were float16 before, as those of a half-precision model, stay float16.
    """
    short = {name for name, array in before.items() if array.dtype == "float16"}
    return {
        n: a.astype(np.float32) if a.dtype == np.float16 and n not in short else a
        for n, a in arrays.items()
    }


def single_metrics(metrics: Mapping[str, Any]) -> MetricRecord:
    """Return metrics as a MetricRecord of plain ints and floats, or lists of them."""
    return MetricRecord(
        {n: v if type(v) in (int, list) else float(v) for n, v in metrics.items()}
    )
