"""Replies: checks of what clients send, and arithmetic on their arrays.

`Round.accept` checks each reply before it counts. Nothing is unpickled, and a size
that a reply declares never determines how much memory is allocated.
"""

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord

from flwr_frl.common import messages as keys
from flwr_frl.common.arrays import (
    LARGEST,
    NPY,
    Layout,
    RowArrays,
    RowReply,
    entries_of,
    finite_rows,
    is_finite,
    is_parameter,
    memory_record,
    size_of,
    values_of,
)
from flwr_frl.common.compression import UploadSettings, from_settings
from flwr_frl.common.text import one_line

NDArray = npt.NDArray[np.generic]
Floats = npt.NDArray[np.float64]
Arrays = dict[str, NDArray]

# Largest number of examples; floats represent it exactly.
MOST_EXAMPLES = 2**53
# Largest number of values that a client may report, and largest length of their names.
MOST_VALUES, LONGEST_NAME = 100, 100
# Largest length of a value; a mask of classes has one character per class.
LONGEST_VALUE = 100_000
# Values that must be texts, integers from 0, or in [0, 1].
TEXTS = (keys.CLIENT, keys.STRUCTURE, keys.REFUSAL)
COUNTS = keys.NUM_EXAMPLES, keys.NUM_TEST_EXAMPLES
SHARES = ("accuracy", "accuracy-global")
# Limit of a reply's size: a multiple of the expected bytes, plus an allowance for
# headers, names, metrics and attachments.
REPLY_FACTOR, REPLY_ALLOWANCE = 2, 2**24
# Number of values that are scaled at a time, so that they stay in the cache.
SLICE = 2**15
# Upper bound of an .npy header.
MAX_HEADER = 4096


class InvalidReplyError(ValueError):
    """An invalid reply; the message gives the reason."""


def error_reason(reply: Message) -> str:
    """Return the reason of an error as one line; of a traceback, its exception."""
    lines = (reply.error.reason or "unknown").splitlines()
    frames = [i for i, line in enumerate(lines) if line.lstrip().startswith('File "')]
    # The exception follows the last frame, whose lines of code are indented.
    rest = lines[frames[-1] + 1 :] if frames else lines
    ends = [i for i, line in enumerate(rest) if line and not line[0].isspace()]
    return one_line("\n".join(rest[ends[0] :] if ends else lines))


# Names and numbers


def check_name(name: object) -> str:
    """Return a client's name; raise `InvalidReplyError` if it is not a valid one."""
    text = isinstance(name, str) and name.isprintable()
    if not text or not 0 < len(cast(str, name)) <= LONGEST_NAME:
        raise InvalidReplyError(
            f"has the name {one_line(repr(name))}; it must have 1 to {LONGEST_NAME} "
            "printable characters"
        )
    return cast(str, name)


def check_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a client's metrics or properties.

    Raises `InvalidReplyError` unless there are at most 100 values of limited length,
    names are printable, numbers are finite and within float32's range, texts are
    strings, numbers of examples are integers, at least 0, and accuracies in [0, 1].
    """
    if len(values) > MOST_VALUES:
        raise InvalidReplyError(f"has {len(values):,} values, more than {MOST_VALUES}")
    for name, value in values.items():
        each = value if isinstance(value, list) else [value]
        valid = (
            len(name) <= LONGEST_NAME
            and name.isprintable()
            and isinstance(value, (int, float, str, bytes, list))
            and size_of(value) <= LONGEST_VALUE
            and all(abs(v) <= LARGEST for v in each if isinstance(v, (int, float)))
        )
        if valid and name in TEXTS:
            valid = isinstance(value, str)
        elif valid and name in COUNTS:
            # Flower's templates report floats.
            valid = type(value) in (int, float) and 0 <= value <= MOST_EXAMPLES
            valid = valid and value == int(value)
        elif valid and name in SHARES:
            valid = isinstance(value, (int, float)) and 0 <= value <= 1
        if not valid:
            about = one_line(repr(name), 120), one_line(repr(value), 120)
            raise InvalidReplyError("has the value {} = {}".format(*about))
    return values


def reply_properties(reply: Message) -> Mapping[str, Any]:
    """Return the properties in a reply; empty if there are none."""
    # Flower's `config_records` copies the dictionary.
    record = entries_of(reply.content).get(keys.PROPERTIES)
    return entries_of(record) if isinstance(record, ConfigRecord) else {}


# Arrays


def checked_arrays(reply: Message, key: str, expected: ArrayRecord) -> Arrays:
    """Return the untrusted arrays of a reply as read-only views, in expected order.

    Raises `InvalidReplyError` if there is no record of this key, it has missing or
    extra names, or serialisation type, shape, dtype or length of an array differ, in
    the declared fields or in the bytes themselves, or a value is not finite or too
    large.
    """
    record = entries_of(reply.content).get(key)
    if not isinstance(record, ArrayRecord):
        raise InvalidReplyError(f"has no arrays under {key!r}")
    entries, likes = entries_of(record), entries_of(expected)
    if entries.keys() != likes.keys():
        missing, extra = set(expected) - set(record), set(record) - set(expected)
        raise InvalidReplyError(
            f"lacks arrays {sorted(missing)} and has unknown arrays {sorted(extra)}"
        )
    arrays: Arrays = {}
    for name, like in likes.items():
        try:
            arrays[name] = _checked(entries[name], like)
        except Exception as error:  # TokenError, RecursionError, … of a header
            raise InvalidReplyError(f"array {name!r}: {error}") from None
    return arrays


def _checked(array: Array, like: Array) -> NDArray:
    """Return an array's values; raise unless it has the shape and type of another."""
    declared = array.stype, array.dtype, tuple(array.shape)
    expected = like.stype, like.dtype, tuple(like.shape)
    if declared != expected:
        raise ValueError(f"it is declared as {declared}, not {expected}")
    if (size := size_of(array)) > (most := size_of(like) + MAX_HEADER):
        raise ValueError(f"it has {size:,} bytes, more than {most:,}")
    values = values_of(array)
    if not is_finite(values):
        raise ValueError("its values are not finite, or too large")
    return values


def decompressed(
    reply: Message, data: Any, like: ArrayRecord, sent: Arrays, uploads: UploadSettings
) -> Arrays:
    """Return the untrusted arrays of a reply, some of them as a compressed change.

    Raises `InvalidReplyError` if the change cannot be decoded or is not finite, or as
    `checked_arrays` for the other arrays.

    Parameters
    ----------
    reply : Message
        The reply.
    data : bytes
        The compressed change of all parameters, in the order of their names.
    like : ArrayRecord
        Arrays whose names, shapes and dtypes the result has.
    sent : dict of str to ndarray
        The arrays to which the change is added.
    uploads : UploadSettings
        The operator.
    """
    names = sorted(n for n in sent if n in like and is_parameter(n, sent[n]))
    changed = {name: sent[name] for name in names}
    others = ArrayRecord({n: a for n, a in like.items() if n not in changed})
    arrays = checked_arrays(reply, keys.ARRAYS, others)
    if not changed:
        return arrays
    sizes = tuple(array.size for array in changed.values())
    try:
        vector = from_settings(uploads, sizes).decompress(data, sum(sizes))
    except (TypeError, ValueError) as error:
        raise InvalidReplyError(f"has no valid compressed change: {error}") from None
    parts = np.split(vector, np.cumsum(sizes)[:-1])
    for (name, array), part in zip(changed.items(), parts, strict=True):
        with np.errstate(over="ignore"):
            moved = np.add(array, part.reshape(array.shape))
            arrays[name] = np.asarray(moved, array.dtype)
    if not is_finite(*arrays.values()):
        raise InvalidReplyError("has a compressed change that is not finite")
    return {name: arrays[name] for name in like}


def reply_arrays(reply: Message) -> ArrayRecord:
    """Return arrays of numbers in a reply, as they are declared there.

    Raises `InvalidReplyError` if there are none, or one differs from its declaration.
    """
    record = entries_of(reply.content).get(keys.ARRAYS)
    record = record if isinstance(record, ArrayRecord) else ArrayRecord()
    for name, array in checked_arrays(reply, keys.ARRAYS, record).items():
        if array.dtype.kind not in "biuf" or record[name].stype != NPY:
            text = f"array {name!r} is of {array.dtype}, which are no numbers"
            raise InvalidReplyError(text)
    return record


# Rows


def is_valid_row(reply: RowReply, layout: Layout | None) -> bool:
    """Return whether a reply is an unread row that needs no further checks.

    Its arrays have the expected ``layout``, all of its values are finite, and its
    metrics are those that `check_values` allows.
    """
    if not reply.is_unread or reply.arrays.rows.matrix.layout is not layout:
        return False
    rows = reply.arrays.rows
    if rows.valid is None:
        rows.valid = finite_rows(rows.matrix.rows)
        # All values lie between these, and NumPy's are NaN if one is.
        are_many = len(rows.matrix.rows) > 1
        extremes = (np.min, np.max) if are_many else (operator.itemgetter(0),)
        try:
            for extreme in extremes:
                check_values({n: float(extreme(c)) for n, c in rows.metrics.items()})
        except InvalidReplyError:
            rows.valid = [False] * len(rows.valid)
    return rows.valid[reply.arrays.row]


# Arithmetic


@dataclass
class RunningMean:
    """The weighted mean of arrays that are added one after the other.

    Only the sums are in memory, in float64.
    """

    _total: float = 0.0
    _sums: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    _dtypes: dict[str, np.dtype[np.generic]] = field(default_factory=dict)
    # The sums of rows with this layout are views of a row.
    _layout: Layout | None = None
    _row: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0))

    def add(self, weight: float, arrays: Mapping[str, NDArray]) -> None:
        """Add arrays with a weight, at least 0."""
        self._total += weight
        if isinstance(arrays, RowArrays):
            rows, layout = arrays.rows.matrix
            row = rows[arrays.row]
            if layout is self._layout:
                _add_scaled(self._row, weight, row)
                return
            if not self._sums:
                self._layout, self._row = layout, np.multiply(row, weight, dtype=float)
                self._sums = layout.views(self._row)
                self._dtypes = dict.fromkeys(layout.places, row.dtype)
                return
        for name, value in arrays.items():
            if name in self._sums:
                _add_scaled(self._sums[name], weight, value)
            else:
                scaled = np.multiply(value, weight, dtype=np.float64, order="C")
                # Arrays without dimensions stay arrays.
                self._sums[name], self._dtypes[name] = np.asarray(scaled), value.dtype

    def result(self) -> Arrays | None:
        """Return the mean, only once; None if the weights sum to 0.

        The mean has the dtypes of the first arrays; integers are rounded.
        """
        if self._total == 0:
            return None
        means: Arrays = {}
        for name, dtype in self._dtypes.items():
            total = self._sums.pop(name)
            # Floats are divided and converted in one pass.
            mean = np.empty(total.shape, dtype if dtype.kind == "f" else np.float64)
            np.divide(total, self._total, out=mean, casting="same_kind")
            means[name] = mean if dtype.kind == "f" else rounded_to(dtype, mean)
        return means


def _add_scaled(total: npt.NDArray[np.float64], weight: float, values: NDArray) -> None:
    """Add the product of a weight and values to their sum, in place."""
    if weight == 1:
        np.add(total, values, out=total)
        return
    total, values = total.reshape(-1), values.reshape(-1)
    for start in range(0, values.size, SLICE):
        part = slice(start, start + SLICE)
        total[part] += np.multiply(values[part], weight, dtype=np.float64)


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


def rounded_to(
    dtype: np.dtype[Any], values: npt.NDArray[np.float64]
) -> npt.NDArray[Any]:
    """Return float64 numbers in another dtype, rounded for integers."""
    is_integer = np.issubdtype(dtype, np.integer)
    # Arrays without dimensions stay arrays.
    values = np.rint(values) if is_integer and values.dtype != dtype else values
    return np.asarray(values).astype(dtype, copy=False)


def to_record(arrays: Mapping[str, NDArray]) -> ArrayRecord:
    """Return copies of arrays as an ArrayRecord, equal to ``Array(value)`` of each."""
    return memory_record({n: np.array(v, order="C") for n, v in arrays.items()})


def metric_record(metrics: Mapping[str, Any]) -> MetricRecord:
    """Return metrics as a MetricRecord of plain ints and floats, or lists of them."""
    return MetricRecord(
        {n: v if type(v) in (int, list) else float(v) for n, v in metrics.items()}
    )
