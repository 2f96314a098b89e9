"""Seeded random corruptions of records, arrays and message contents."""

import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

Rng = np.random.Generator
NUMBERS = (
    0, -1, 1, 2**31, 2**53, 2**62, -(2**62), 0.0, -0.5, 1e-320, 1e30, -1e30, 1.7e308,
    math.nan, math.inf, -math.inf, 1.5,
)  # fmt: skip
WORDS = (
    "", "a", "../../x", "/etc/passwd", "a\nb", "\x1b[2J", "\u202eabc", "é" * 300,
    "x" * 10_000, "a\x00b", "000001", "%s%n", "{0}", "NaN",
)  # fmt: skip
DTYPES = (
    "float64", "float16", "int32", "complex64", "object", "<U5", "O", "", "x" * 50,
)  # fmt: skip
SHAPES: tuple[Any, ...] = (
    (), (0,), (1.5, 2.5), (-1,), (-1, 64), (10**9, 10**9), (2**63,), ("a",), (3, 3, 3),
)  # fmt: skip


def pick(rng: Rng, values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def scalar(rng: Rng) -> Any:
    """Return a random value of any type that a ConfigRecord can hold."""
    kinds: list[Callable[[], Any]] = [
        lambda: pick(rng, WORDS),
        lambda: rng.bytes(int(rng.integers(0, 200))),
        lambda: bool(rng.integers(2)),
        lambda: [number(rng) for _ in range(int(rng.integers(0, 5)))],
        lambda: [pick(rng, WORDS) for _ in range(int(rng.integers(0, 5)))],
        lambda: [rng.bytes(5) for _ in range(int(rng.integers(0, 5)))],
        lambda: number(rng),
    ]
    return pick(rng, kinds)()


def number(rng: Rng) -> float:
    value = pick(rng, NUMBERS)
    # Flower's integers have 64 bits, and its lists have a single type.
    return float(value)


def bytes_of(rng: Rng, data: bytes) -> bytes:
    """Return corrupted bytes."""
    changed = bytearray(data)
    kind = rng.integers(8)
    if kind == 0:
        return b""
    if kind == 1:
        return bytes(changed[: int(rng.integers(len(changed) + 1))])
    if kind == 2:
        return bytes(changed) + rng.bytes(int(rng.integers(1, 9000)))
    if kind == 3:
        return pickle.dumps({"a": 1})
    if kind == 4:
        return rng.bytes(len(data))
    if kind == 5:
        for _ in range(int(rng.integers(1, 5))):
            changed[int(rng.integers(min(128, len(changed))))] = int(rng.integers(256))
        return bytes(changed)
    if kind == 6:
        return data.replace(b"'fortran_order': False", b"'fortran_order': True ")
    return data.replace(b"'<f", b"'>f").replace(b"'|", b"'O")


def values_of(rng: Rng, array: Array) -> np.ndarray:
    """Return other values, of the same shape or of another."""
    value = np.array(array.numpy())
    kind = rng.integers(8)
    with np.errstate(all="ignore"):
        if kind == 0:
            return np.full_like(value, pick(rng, (0, 1, -1)))
        if kind == 1 and value.dtype.kind == "f":
            return np.full_like(value, pick(rng, (np.nan, np.inf, 3e38, -3e38, 1e30)))
        if kind == 2:
            return value.ravel()
        if kind == 3:
            return value[None]
        if kind == 4:
            return value.astype(pick(rng, ("float64", "float16", "int8", "complex128")))
        if kind == 5 and value.size and value.dtype.kind == "f":
            value.flat[int(rng.integers(value.size))] = pick(rng, (np.nan, np.inf))
            return value
        if kind == 6:
            return np.asfortranarray(value) * -1
        return (value * pick(rng, (100, -100, 1e10))).astype(value.dtype)


def array_of(rng: Rng, array: Array) -> Array:
    """Return an array with other bytes, other metadata or other values."""
    kind = rng.integers(3)
    if kind == 0:
        changed = Array(array.dtype, array.shape, array.stype, array.data)
        changed.data = bytes_of(rng, array.data)
        return changed
    if kind == 1:
        changed = Array(array.dtype, array.shape, array.stype, array.data)
        what = rng.integers(3)
        if what == 0:
            changed.shape = pick(rng, SHAPES)
        elif what == 1:
            changed.dtype = pick(rng, DTYPES)
        else:
            changed.stype = pick(rng, ("", "pickle", "numpy.ndarray ", "torch"))
        return changed
    return Array(np.asarray(values_of(rng, array)))


def arrays_of(rng: Rng, record: ArrayRecord) -> ArrayRecord:
    """Return an ArrayRecord with one array or one name changed."""
    names = list(record)
    changed = ArrayRecord(dict(record.items()))
    kind = rng.integers(6)
    if not names or kind == 0:
        changed[pick(rng, (*WORDS[1:], "head.weight"))] = Array(np.zeros(3, np.float32))
    elif kind == 1:
        del changed[pick(rng, names)]
    elif kind == 2:
        name = pick(rng, names)
        changed[pick(rng, WORDS[1:])] = changed.pop(name)
    elif kind == 3:
        return ArrayRecord()
    else:
        name = pick(rng, names)
        changed[name] = array_of(rng, record[name])
    return changed


def metrics_of(rng: Rng, record: MetricRecord) -> MetricRecord:
    """Return a MetricRecord with other values or names."""
    changed = MetricRecord(dict(record.items()))
    kind = rng.integers(5)
    names = list(changed) or ["x"]
    if kind == 0:
        for i in range(int(pick(rng, (1, 50, 101, 5000)))):
            changed[f"invented-{i}"] = number(rng)
    elif kind == 1:
        changed[pick(rng, WORDS[1:])] = number(rng)
    elif kind == 2:
        changed.pop(pick(rng, names), None)
    elif kind == 3:
        changed[pick(rng, names)] = [number(rng), number(rng)]
    else:
        changed[pick(rng, names)] = number(rng)
    return changed


def config_of(rng: Rng, record: ConfigRecord) -> ConfigRecord:
    """Return a ConfigRecord with other values or names."""
    changed = ConfigRecord(dict(record.items()))
    names = list(changed) or ["x"]
    kind = rng.integers(4)
    if kind == 0:
        changed[pick(rng, WORDS[1:])] = scalar(rng)
    elif kind == 1:
        changed.pop(pick(rng, names), None)
    elif kind == 2:
        value = changed.get(pick(rng, names))
        if isinstance(value, bytes) and value:
            changed[pick(rng, names)] = bytes_of(rng, value)
    else:
        changed[pick(rng, names)] = scalar(rng)
    return changed


CHANGES: dict[type, Callable[[Rng, Any], Any]] = {
    ArrayRecord: arrays_of,
    MetricRecord: metrics_of,
    ConfigRecord: config_of,
}


def content_of(rng: Rng, content: RecordDict) -> RecordDict:
    """Return a message's content with one to three corruptions."""
    changed = RecordDict(dict(content.items()))
    for _ in range(int(rng.integers(1, 4))):
        keys = list(changed)
        kind = rng.integers(8)
        if not keys or kind == 0:
            changed[pick(rng, WORDS[1:8])] = MetricRecord({"x": number(rng)})
        elif kind == 1:
            del changed[pick(rng, keys)]
        elif kind == 2:
            changed[pick(rng, WORDS[1:8])] = changed[pick(rng, keys)]
        else:
            key = pick(rng, keys)
            record = changed[key]
            changed[key] = CHANGES[type(record)](rng, record)
    return changed
