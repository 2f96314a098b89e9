"""Checks of the values that clients report."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import Message

from flwr_frl.common.messages import (
    CLASS_COUNTS,
    CLASSES_DIGEST,
    CLIENT,
    FROZEN_DIGEST,
    HELD_CLASSES,
    INPUTS,
    NUM_CLASSES,
    NUM_EXAMPLES,
    NUM_TEST_EXAMPLES,
    REFUSAL,
    STRUCTURE,
)
from flwr_frl.common.settings import printable
from flwr_frl.common.text import one_line

# Largest number of examples; floats represent it exactly.
MOST_EXAMPLES = 2**53
# Largest valid number, so that sums stay finite: float32's limit, which only float64
# can exceed.
LARGEST = 3.4028235e38
# Largest number of values that a client may report, and largest length of their names.
MOST_VALUES, LONGEST_NAME = 100, 100
# Largest length of a value; a mask of classes has one character per class.
LONGEST_VALUE = 100_000
# Properties that describe the model. Clients with the same `STRUCTURE`, a digest, have
# the same model; the others explain a difference.
COMPARED = (*INPUTS, CLASSES_DIGEST, NUM_CLASSES, FROZEN_DIGEST, STRUCTURE)


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


def check_name(name: object) -> str:
    """Return a client's name; raise `InvalidReplyError` if it is not a valid one."""
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
        raise InvalidReplyError(
            f"has the name {one_line(repr(name))}; it must have 1 to {LONGEST_NAME} "
            "characters"
        )
    if not name.isprintable():
        raise InvalidReplyError(f"has a name that cannot be printed: {name!r}")
    return name


def distinct_labels(reported: Mapping[str, str]) -> dict[str, str]:
    """Return the labels in use, by client.

    A label is not used if an earlier client has it, or if it is the name of a client
    that has no label itself.

    Parameters
    ----------
    reported : mapping of str to str
        Labels of all clients, by name; empty for none.
    """
    first: dict[str, str] = {}
    for name, label in reported.items():
        first.setdefault(label, name)
    labels = {name: label for label, name in first.items() if label}
    # Without its label, a client has its name, which may be the label of another.
    while taken := (reported.keys() - labels.keys()) & set(labels.values()):
        labels = {name: label for name, label in labels.items() if label not in taken}
    return labels


def class_counts(properties: Mapping[str, object]) -> dict[str, int]:
    """Return a client's number of examples by class; empty if absent or invalid."""
    names, counts = properties.get(HELD_CLASSES), properties.get(CLASS_COUNTS)
    if not isinstance(names, list) or not isinstance(counts, list):
        return {}
    pairs = [(n, c) for n, c in zip(names, counts, strict=False)]
    if any(type(n) is not str or type(c) is not int or c < 0 for n, c in pairs):
        return {}
    # Names of classes may differ in whitespace only, such as those of characters.
    return {printable(name): count for name, count in pairs}


def check_properties(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return a client's properties.

    Raises `InvalidReplyError` unless there are at most 100 values of limited length and
    size, names are printable, texts are strings, and numbers of examples are integers,
    at least 0.
    """
    _check_names(properties)
    for name, value in properties.items():
        for single in value if isinstance(value, list) else (value,):
            if isinstance(single, float) and not abs(single) <= LARGEST:
                raise InvalidReplyError(f"has {name!r} = {single}")
        if _length(value) > LONGEST_VALUE:
            raise InvalidReplyError(f"has too long a value of {name!r}")
    for name in (CLIENT, STRUCTURE, REFUSAL):
        if not isinstance(properties.get(name, ""), str):
            raise InvalidReplyError(f"has no text as {name!r}")
    for name in (NUM_EXAMPLES, NUM_TEST_EXAMPLES):
        _check_count(name, properties.get(name, 0))
    if CLIENT in properties:
        check_name(properties[CLIENT])
    return dict(properties)


def _length(value: object) -> int:
    """Return the approximate size of a value in bytes."""
    if isinstance(value, list):
        return sum(map(_length, value))
    return len(value) if isinstance(value, str | bytes) else 8


def check_values(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the single numbers among a reply's metrics.

    Raises `InvalidReplyError` if there are more than 100 values, a number is not finite
    or too large, ``accuracy`` or ``accuracy-global`` is not in [0, 1], or
    ``num-examples`` is not a valid number.
    """
    _check_names(values)
    metrics = {n: v for n, v in values.items() if isinstance(v, (int, float))}
    for name, value in metrics.items():
        if not abs(value) <= LARGEST:
            raise InvalidReplyError(f"metric {name!r} is {value}")
        if name in ("accuracy", "accuracy-global") and not 0 <= value <= 1:
            raise InvalidReplyError(f"metric {name!r} is {value}, not in [0, 1]")
    if NUM_EXAMPLES in metrics:
        _check_count(NUM_EXAMPLES, metrics[NUM_EXAMPLES])
    return metrics


def _check_names(values: Mapping[str, Any]) -> None:
    if len(values) > MOST_VALUES:
        raise InvalidReplyError(f"has {len(values):,} values, more than {MOST_VALUES}")
    for name in values:
        if len(name) > LONGEST_NAME or not name.isprintable():
            raise InvalidReplyError(f"has a value called {one_line(repr(name), 120)}")


def _check_count(name: str, value: object) -> None:
    # Flower's templates report floats.
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # NaN fails the first comparison.
    if number and 0 <= value <= MOST_EXAMPLES and value == int(value):  # type: ignore[operator,call-overload]
        return
    raise InvalidReplyError(f"{name} is {one_line(repr(value))}")


def vote(reported: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the description of the model that most clients report."""
    structures = [(p.get(STRUCTURE, ""), p) for p in reported]
    votes = Counter(structure for structure, _ in structures)
    # Ties go to the smaller digest, so that a restart decides the same.
    usual = min(votes, key=lambda structure: (-votes[structure], structure))
    properties = dict(structures)[usual]
    described = {name: properties[name] for name in COMPARED if name in properties}
    return {**described, STRUCTURE: usual}


def difference(its: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    """Return why a client whose structure differs from the usual one is refused."""
    size, usual_size = (
        " x ".join(str(properties.get(name, "?")) for name in INPUTS)
        for properties in (its, usual)
    )
    if size != usual_size:
        return (
            f"its inputs are {size} and those of the other clients are {usual_size} "
            f"({', '.join(INPUTS)})"
        )
    if its.get(CLASSES_DIGEST) != usual.get(CLASSES_DIGEST):
        return (
            f"its {its.get(NUM_CLASSES, '?')} classes are not those of the other "
            f"clients, who have {usual.get(NUM_CLASSES, '?')}: names and their order "
            "must be the same"
        )
    if its.get(FROZEN_DIGEST) != usual.get(FROZEN_DIGEST):
        return (
            "the frozen part of its model (parameters that require no gradient, and "
            "buffers with persistent=False) is not that of the other clients, which "
            "begin with the same model and weights"
        )
    return (
        "its shared arrays are not of the names and shapes that the other clients "
        "have, or the model that it begins with is another one"
    )
