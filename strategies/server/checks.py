"""What clients say of themselves and of a round, checked before it counts."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from flwr_frl.task.messages import (
    CLASS_COUNTS,
    CLIENT,
    HELD_CLASSES,
    NUM_EXAMPLES,
    NUM_TEST_EXAMPLES,
    REFUSAL,
    STRUCTURE,
)

# Nobody counts more examples; a float holds it exactly.
MOST_EXAMPLES = 2**53
# Above it no number means anything, and sums of it are not finite for long. It is
# float32's own limit, so only float64 can exceed it.
LARGEST = 3.4028235e38
# How many values a client may report, and how long their names may be.
MOST_VALUES, LONGEST_NAME = 100, 100
# Of a value; a mask of classes has a character for each.
LONGEST_VALUE = 100_000
# Of what a log line says in a client's words.
LONGEST_LINE = 300


class InvalidReplyError(ValueError):
    """A reply that must not count; the message says why."""


def one_line(text: object, longest: int = LONGEST_LINE) -> str:
    """Return a client's words as one line: escaped, and cut at 300 characters."""
    # Far more than is kept is not even looked at.
    words = " ".join(str(text)[: 20 * longest].split())
    escaped = "".join(
        c if c.isprintable() else c.encode("unicode_escape", "replace").decode()
        for c in words
    )
    return escaped if len(escaped) <= longest else escaped[: longest - 1] + "…"


def several(names: Sequence[str], most: int = 5) -> str:
    """Return names as part of a line, no more of them than that."""
    more = len(names) - most
    listed = ", ".join(names[:most])
    return f"{listed} and {more:,} other{'s' * (more > 1)}" if more > 0 else listed


def check_name(name: object) -> str:
    """Return what a client is called; `InvalidReplyError` unless it can be a name."""
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
        raise InvalidReplyError(
            f"has the name {one_line(repr(name))}; it must have 1 to {LONGEST_NAME} "
            "characters"
        )
    if not name.isprintable():
        raise InvalidReplyError(f"has a name that cannot be printed: {name!r}")
    return name


def class_counts(said: Mapping[str, object]) -> dict[str, int]:
    """Return a client's examples by class; empty where it says none, or nonsense."""
    names, counts = said.get(HELD_CLASSES), said.get(CLASS_COUNTS)
    if not isinstance(names, list) or not isinstance(counts, list):
        return {}
    pairs = [(n, c) for n, c in zip(names, counts, strict=False)]
    if any(type(n) is not str or type(c) is not int or c < 0 for n, c in pairs):
        return {}
    return {one_line(name): count for name, count in pairs}


def check_properties(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a client says of itself.

    Raises `InvalidReplyError` unless there are at most 100 values of reasonable length
    and size, names are words, and numbers of examples are integers, at least 0.
    """
    _check_names(said)
    for name, value in said.items():
        values = value if isinstance(value, list) else [value]
        if sum(len(v) if isinstance(v, str | bytes) else 8 for v in values) > (
            LONGEST_VALUE
        ):
            raise InvalidReplyError(f"has too long a value of {name!r}")
        for single in values:
            if isinstance(single, float) and not abs(single) <= LARGEST:
                raise InvalidReplyError(f"has {name!r} = {single}")
    for name in (CLIENT, STRUCTURE, REFUSAL):
        if not isinstance(said.get(name, ""), str):
            raise InvalidReplyError(f"has no text as {name!r}")
    for name in (NUM_EXAMPLES, NUM_TEST_EXAMPLES):
        _check_count(name, said.get(name, 0))
    if CLIENT in said:
        check_name(said[CLIENT])
    return dict(said)


def check_values(said: Mapping[str, Any]) -> dict[str, float]:
    """Return the single numbers among a reply's metrics.

    Raises `InvalidReplyError` if there are more than 100, one is not finite or too
    large, an accuracy is not in [0, 1], or ``num-examples`` is no number of examples.
    """
    _check_names(said)
    metrics = {n: v for n, v in said.items() if isinstance(v, (int, float))}
    for name, value in metrics.items():
        if not abs(value) <= LARGEST:
            raise InvalidReplyError(f"metric {name!r} is {value}")
        if name.startswith("accuracy") and not 0 <= value <= 1:
            raise InvalidReplyError(f"metric {name!r} is {value}, not in [0, 1]")
    if NUM_EXAMPLES in metrics:
        _check_count(NUM_EXAMPLES, metrics[NUM_EXAMPLES])
    return metrics


def _check_names(said: Mapping[str, Any]) -> None:
    if len(said) > MOST_VALUES:
        raise InvalidReplyError(f"has {len(said):,} values, more than {MOST_VALUES}")
    for name in said:
        if len(name) > LONGEST_NAME or not name.isprintable():
            raise InvalidReplyError(f"has a value called {one_line(repr(name), 120)}")


def _check_count(name: str, value: object) -> None:
    # Flower's templates count in floats, too.
    whole = (
        isinstance(value, int | float) and math.isfinite(value) and value == int(value)
    )
    if not whole or isinstance(value, bool) or not 0 <= value <= MOST_EXAMPLES:  # type: ignore[operator]
        raise InvalidReplyError(f"{name} is {one_line(repr(value))}")
