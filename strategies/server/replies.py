"""Decode, check and average the arrays and metrics of replies."""

import io
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.constant import SType

from flwr_frl.common.flower_messages import entries_of
from flwr_frl.common.memory_array import (
    MemoryArray,
    memory_record,
    num_bytes,
    values_of,
)
from flwr_frl.common.messages import EXAMPLES, NUM_EXAMPLES, PROPERTIES, UNUSED_STATE
from flwr_frl.common.npy import header
from flwr_frl.common.npy import is_finite as all_finite
from flwr_frl.common.text import one_line
from flwr_frl.strategies.server.checks import LARGEST, InvalidReplyError, check_values

NDArray = npt.NDArray[np.generic]
Arrays = dict[str, NDArray]
RecordType = ArrayRecord | MetricRecord | ConfigRecord

# Limit of a reply's size: a multiple of the expected bytes, plus an allowance for
# headers, names, metrics and attachments.
REPLY_FACTOR, REPLY_ALLOWANCE = 2, 2**24
# Number of entries that are scaled at a time, so that they stay in the cache.
CHUNK = 2**16
# Upper bound of an .npy header.
MAX_HEADER = 4096


def decode(array: Array, like: Array) -> NDArray:
    """Return an untrusted array's values as a read-only view.

    ``like`` is the array that was sent. Raises `InvalidReplyError` if serialisation
    type, shape, dtype or length differ, in the declared fields or in the bytes
    themselves, or a value is not finite or too large. Nothing is unpickled, and a size
    that a reply declares never determines how much memory is allocated.
    """
    shape, dtype = tuple(like.shape), np.dtype(like.dtype)
    if array.stype != like.stype:
        raise InvalidReplyError(f"serialised as {array.stype!r}, not {like.stype!r}")
    if tuple(array.shape) != shape or array.dtype != like.dtype:
        raise InvalidReplyError(
            f"is {array.dtype}{list(array.shape)}, not {like.dtype}{list(shape)}"
        )
    if isinstance(array, MemoryArray):
        values, finite = array.values, array.all_finite
        if values.shape != shape or values.dtype != dtype:
            raise InvalidReplyError(f"holds {values.dtype}{list(values.shape)}")
    else:
        values = _parsed(array, shape, dtype)
        finite = all_finite(values)
    if not finite:
        raise InvalidReplyError("has values that are not finite")
    if dtype == np.float64 and values.size and np.abs(values).max() > LARGEST:
        raise InvalidReplyError(f"has values above {LARGEST:.2g}")
    return values


def _parsed(
    array: Array, shape: tuple[int, ...], dtype: np.dtype[np.generic]
) -> NDArray:
    """Return the values in the bytes of an untrusted array."""
    size = int(np.prod(shape)) * dtype.itemsize
    if len(array.data) > size + MAX_HEADER:
        raise InvalidReplyError(f"has {len(array.data):,} bytes, not about {size:,}")
    start, fortran = _read_header(array.data, shape, dtype)
    if len(array.data) - start != size:
        raise InvalidReplyError(f"has {len(array.data) - start} bytes of data")
    values = np.frombuffer(array.data, dtype, offset=start)
    return values.reshape(shape, order="F" if fortran else "C")


def _read_header(
    data: bytes, shape: tuple[int, ...], dtype: np.dtype[np.generic]
) -> tuple[int, bool]:
    """Return the offset of an .npy file's values, and True for Fortran order."""
    usual = header(shape, dtype)
    if data.startswith(usual):
        return len(usual), False
    stream = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        held_shape, fortran, held_dtype = read(stream)
    except Exception as error:  # TokenError, RecursionError, …
        raise InvalidReplyError(f"has no valid .npy header: {error}") from None
    if held_shape != shape or held_dtype != dtype:
        raise InvalidReplyError(f"holds {held_dtype}{list(held_shape)}")
    return stream.tell(), fortran


def check_arrays(reply: Message, key: str, expected: ArrayRecord) -> Arrays:
    """Return the arrays of a reply, in the order of the expected ones.

    Raises `InvalidReplyError` if there is no record of this key, it has missing or
    extra names, or an array that `decode` refuses.
    """
    record = entries_of(reply.content).get(key)
    if not isinstance(record, ArrayRecord):
        raise InvalidReplyError(f"has no arrays under {key!r}")
    if record.keys() != expected.keys():
        missing, extra = set(expected) - set(record), set(record) - set(expected)
        raise InvalidReplyError(
            f"lacks arrays {sorted(missing)} and has unknown arrays {sorted(extra)}"
        )
    arrays = {}
    for name, like in expected.items():
        try:
            arrays[name] = decode(record[name], like)
        except InvalidReplyError as error:
            raise InvalidReplyError(f"array {name!r} {error}") from None
    return arrays


def reply_arrays(reply: Message, key: str) -> ArrayRecord:
    """Return the arrays of a reply without expected arrays to compare them with.

    Raises `InvalidReplyError` if there is no record of this key, or an array differs
    from its declared fields.
    """
    record = reply.content.get(key)
    if not isinstance(record, ArrayRecord):
        raise InvalidReplyError(f"has no arrays under {key!r}")
    for name, array in record.items():
        try:
            if np.dtype(array.dtype).kind not in "biuf":
                raise InvalidReplyError(f"is of {array.dtype}, which are no numbers")
            decode(array, Array(array.dtype, array.shape, SType.NUMPY, b""))
        except Exception as error:  # Also NumPy's, and SyntaxError.
            raise InvalidReplyError(f"array {name!r} {error}") from None
    return record


def reply_metrics(reply: Message) -> dict[str, float]:
    """Return all single-valued metrics of a reply.

    Raises `InvalidReplyError` if there is more than one MetricRecord, or `check_values`
    rejects one.
    """
    records = _metric_records(reply)
    if len(records) > 1:
        raise InvalidReplyError(f"has {len(records)} metric records, not 1")
    return check_values(records[0] if records else {})


def evaluation_metrics(reply: Message) -> dict[str, float]:
    """Return an evaluation's metrics, as `reply_metrics`; {} without test examples.

    Without examples the loss may be NaN, which is not an error.
    """
    if any(record.get(NUM_EXAMPLES) == 0 for record in _metric_records(reply)):
        return {}
    return reply_metrics(reply)


def _metric_records(reply: Message) -> list[MetricRecord]:
    # Flower's `metric_records` copies the dictionary.
    records = entries_of(reply.content).values()
    return [record for record in records if isinstance(record, MetricRecord)]


def reply_properties(reply: Message) -> Mapping[str, Any]:
    """Return the properties in a reply; empty if there are none."""
    # Flower's `config_records` copies the dictionary.
    record = entries_of(reply.content).get(PROPERTIES)
    return entries_of(record) if isinstance(record, ConfigRecord) else {}


def unused_state(reply: Message) -> str:
    """Return why a client could not use its saved state; empty if it could."""
    reason = reply_properties(reply).get(UNUSED_STATE, "")
    return one_line(reason) if isinstance(reason, str) else ""


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
    return all(map(_is_finite_in_float32, arrays.values()))


def _is_finite_in_float32(values: NDArray) -> bool:
    if values.dtype != np.float64:
        return all_finite(values)
    # NaN compares as False.
    return values.size == 0 or bool(np.abs(values).max() <= LARGEST)


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


def count_bytes(message: Message, known: dict[int, int] | None = None) -> int:
    """Return the bytes of a message's content: serialised arrays, values and names.

    Flower's envelope is not counted. ``known`` caches the bytes of records by their id,
    for several messages that share records.
    """
    if not message.has_content():
        return 0
    total, known = 0, {} if known is None else known
    for key, record in entries_of(message.content).items():
        size = known.get(id(record))
        if size is None:
            size = known[id(record)] = record_bytes(record)
        total += len(key) + size
    return total


def largest_reply(expected: float) -> float:
    """Return the limit of a reply's size, given the expected bytes."""
    return REPLY_FACTOR * expected + REPLY_ALLOWANCE


def record_bytes(record: RecordType) -> int:
    """Return the bytes of a record: serialised arrays, values and names."""
    # Flower's own count fails on empty strings and lists.
    entries = entries_of(record)
    if EXAMPLES in entries:
        # Messages to devices have no fingerprint, and simulations count the same bytes.
        entries = {name: value for name, value in entries.items() if name != EXAMPLES}
    total = sum(map(len, entries))
    if isinstance(record, ArrayRecord):
        return total + sum(map(num_bytes, entries.values()))
    for value in entries.values():
        # Before the general case, for speed: most values are single numbers.
        if type(value) in (int, float):
            total += 8
        elif isinstance(value, list):
            # All entries of a list have the same type.
            if value and isinstance(value[0], str | bytes):
                total += sum(map(len, cast(list[str], value)))
            else:
                is_flag = bool(value) and isinstance(value[0], bool)
                total += len(value) if is_flag else 8 * len(value)
        elif isinstance(value, str | bytes):
            total += len(value)
        else:
            total += 1 if isinstance(value, bool) else 8
    return total


def single_metrics(metrics: Mapping[str, Any]) -> MetricRecord:
    """Return metrics as a MetricRecord of plain ints and floats, or lists of them."""
    return MetricRecord(
        {n: v if type(v) in (int, list) else float(v) for n, v in metrics.items()}
    )
