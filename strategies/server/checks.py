"""Checks of what clients send: each reply is checked once, by `Round.check`.

Nothing is unpickled, and a size that a reply declares never determines how much memory
is allocated.
"""

import io
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.constant import SType

from flwr_frl.common import messages as keys
from flwr_frl.common.flower_messages import entries_of
from flwr_frl.common.memory_array import MemoryArray, num_bytes
from flwr_frl.common.npy import header, is_finite
from flwr_frl.common.text import one_line
from flwr_frl.strategies.server.replies import LARGEST, Arrays, NDArray

# Largest number of examples; floats represent it exactly.
MOST_EXAMPLES = 2**53
# Largest number of values that a client may report, and largest length of their names.
MOST_VALUES, LONGEST_NAME = 100, 100
# Largest length of a value; a mask of classes has one character per class.
LONGEST_VALUE = 100_000
# Values that must be texts, numbers of examples, or in [0, 1].
TEXTS = (keys.CLIENT, keys.STRUCTURE, keys.REFUSAL)
COUNTS = (keys.NUM_EXAMPLES, keys.NUM_TEST_EXAMPLES)
SHARES = ("accuracy", "accuracy-global")
# Limit of a reply's size: a multiple of the expected bytes, plus an allowance for
# headers, names, metrics and attachments.
REPLY_FACTOR, REPLY_ALLOWANCE = 2, 2**24
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
        valid = len(name) <= LONGEST_NAME and name.isprintable()
        if isinstance(value, (int, float)):
            valid = valid and abs(value) <= LARGEST
        elif isinstance(value, list):
            valid = valid and sum(map(_length, value)) <= LONGEST_VALUE
            numbers = (v for v in value if isinstance(v, float))
            valid = valid and all(abs(number) <= LARGEST for number in numbers)
        else:
            valid = valid and _length(value) <= LONGEST_VALUE
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


def _length(value: object) -> int:
    """Return the approximate size of a value in bytes."""
    return len(value) if isinstance(value, str | bytes) else 8


def reply_metrics(reply: Message, tests: bool = False) -> dict[str, float]:
    """Return all single-valued metrics of a reply.

    Without test examples an evaluation has none: its loss may be NaN.

    Raises `InvalidReplyError` if there is more than one MetricRecord, or `check_values`
    rejects one.
    """
    # Flower's `metric_records` copies the dictionary.
    every = entries_of(reply.content).values()
    records = [record for record in every if isinstance(record, MetricRecord)]
    if tests and any(record.get(keys.NUM_EXAMPLES) == 0 for record in records):
        return {}
    if len(records) > 1:
        raise InvalidReplyError(f"has {len(records)} metric records, not 1")
    values = check_values(entries_of(records[0])) if records else {}
    return {n: v for n, v in values.items() if isinstance(v, (int, float))}


def reply_properties(reply: Message) -> Mapping[str, Any]:
    """Return the properties in a reply; empty if there are none."""
    # Flower's `config_records` copies the dictionary.
    record = entries_of(reply.content).get(keys.PROPERTIES)
    return entries_of(record) if isinstance(record, ConfigRecord) else {}


# Arrays


def decode(array: Array, like: Array) -> NDArray:
    """Return an untrusted array's values as a read-only view.

    ``like`` is the array that was sent. Raises `InvalidReplyError` if serialisation
    type, shape, dtype or length differ, in the declared fields or in the bytes
    themselves, or a value is not finite or too large.
    """
    shape, dtype = tuple(like.shape), np.dtype(like.dtype)
    declared = array.stype, array.dtype, tuple(array.shape)
    if declared != (like.stype, like.dtype, shape):
        raise InvalidReplyError(
            f"is {array.stype!r} {array.dtype}{list(array.shape)}, not "
            f"{like.stype!r} {like.dtype}{list(shape)}"
        )
    if isinstance(array, MemoryArray):
        values, finite = array.values, array.all_finite
    else:
        size = int(np.prod(shape)) * dtype.itemsize
        if len(array.data) > size + MAX_HEADER:
            text = f"has {len(array.data):,} bytes, not about {size:,}"
            raise InvalidReplyError(text)
        try:
            values = _parsed(array.data, shape, dtype)
            finite = is_finite(values)
        except Exception as error:  # TokenError, RecursionError, …
            raise InvalidReplyError(f"is no valid .npy file: {error}") from None
    if values.shape != shape or values.dtype != dtype:
        raise InvalidReplyError(f"holds {values.dtype}{list(values.shape)}")
    if not finite:
        raise InvalidReplyError("has values that are not finite")
    if dtype == np.float64 and values.size and np.abs(values).max() > LARGEST:
        raise InvalidReplyError(f"has values above {LARGEST:.2g}")
    return values


def _parsed(
    data: bytes, shape: tuple[int, ...], dtype: np.dtype[np.generic]
) -> NDArray:
    """Return the array in the bytes of an .npy file; another header is an error."""
    usual = header(shape, dtype)
    start, fortran = len(usual), False
    if not data.startswith(usual):
        stream = io.BytesIO(data)
        version = np.lib.format.read_magic(stream)
        held, fortran, of = np.lib.format.read_array_header_1_0(stream)
        if (version, held, of) != ((1, 0), shape, dtype):
            raise ValueError(f"it holds {of}{list(held)}")
        start = stream.tell()
    values = np.frombuffer(data, dtype, offset=start)
    return values.reshape(shape, order="F" if fortran else "C")


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
    """Return arrays of numbers in a reply, as they are declared there.

    Raises `InvalidReplyError` if there are none, or one differs from its declaration.
    """
    record = entries_of(reply.content).get(key)
    if not isinstance(record, ArrayRecord):
        raise InvalidReplyError(f"has no arrays under {key!r}")
    for name, array in record.items():
        try:
            valid = np.dtype(array.dtype).kind in "biuf" and array.stype == SType.NUMPY
        except (TypeError, ValueError, SyntaxError):
            valid = False
        if not valid:
            text = f"array {name!r} is of {array.dtype}, which are no numbers"
            raise InvalidReplyError(text)
    check_arrays(reply, key, record)
    return record


# Sizes


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


def record_bytes(record: ArrayRecord | MetricRecord | ConfigRecord) -> int:
    """Return the bytes of a record: serialised arrays, values and names."""
    # Flower's own count fails on empty strings and lists.
    entries = entries_of(record)
    if isinstance(record, ArrayRecord):
        return sum(map(len, entries)) + sum(map(num_bytes, entries.values()))
    total = 0
    for name, value in entries.items():
        # Messages to devices have no fingerprint, and simulations count the same bytes.
        if name != keys.EXAMPLES:
            # Most values are single numbers.
            total += len(name) + (8 if type(value) in (int, float) else _size(value))
    return total


def _size(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(_size, value))
    if isinstance(value, str | bytes):
        return len(value)
    return 1 if isinstance(value, bool) else 8
