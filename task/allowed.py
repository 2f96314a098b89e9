"""What a setting may be, and the one line that says so where it is not."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Setting = bool | int | float | str
Settings = Mapping[str, Setting]

MAX_LISTED = 60
# Characters of a value, other than a text, that an error shows.
LONGEST = 300


class SettingsError(ValueError):
    """Bad input: the message is one line with the value and what is allowed."""


class ResourceError(SettingsError):
    """The machine has not what a run needs; no other client would fare better."""


def require(condition: bool, name: str, value: object, allowed: str) -> None:
    """Raise a one-line error about a value unless a condition holds.

    ``name`` is the setting as a user spells it; ``allowed`` follows "must be".

    Raises
    ------
    SettingsError
        If ``condition`` is false.
    """
    if not condition:
        shown = repr(value)
        if "\n" in shown:
            shown = " ".join(shown.split())
        if len(shown) > LONGEST and not isinstance(value, str):
            shown = f"a {type(value).__name__}, {shown[:LONGEST]}…"
        raise SettingsError(f"{name} is {shown}; it must be {allowed}")


# Numbers that are drawn at once, 1 GiB of them.
MOST_DRAWN = 2**27


def require_drawable(count: int, what: str) -> None:
    """Raise `SettingsError` if so many numbers are more than are drawn at once.

    ``what`` says, as a product of settings, why they are so many.
    """
    allowed = f"at most {MOST_DRAWN:,}, all numbers that are drawn at once"
    require(count <= MOST_DRAWN, what, count, allowed)


def reason_of(error: BaseException) -> str:
    """Return the first line of what an exception says; its type where it says none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def need(package: str, extra: str, what: str) -> None:
    """Raise a one-line error unless a package of one of the extras can be imported.

    ``what`` needs it.

    Raises
    ------
    SettingsError
        If it is missing.
    """
    if find_spec(package) is None:
        raise SettingsError(
            f"{what} needs the package {package!r}, which is missing: "
            f"pip install 'flwr-frl[{extra}]'"
        )


# Noise multiplier. With less ε, above 500,000 a step, says nothing, and soon cannot be
# computed.
LEAST_NOISE = 0.001


def require_all_of_noise(prefix: str, noise: float, clip: float, delta: float) -> None:
    """Raise unless there is all of noise, clip and delta, or nothing.

    ``prefix`` is what the names of the three settings begin with.

    Raises
    ------
    SettingsError
        If one of them is missing, or noise that the others need, or if there is so
        little noise that no ε can be told.
    """
    enough = noise == 0 or noise >= LEAST_NOISE
    require(enough, f"{prefix}-noise", noise, f"0 or at least {LEAST_NOISE}")
    for name, value in (("delta", delta), ("clip", clip)):
        if noise:
            allowed = f"above 0 with {prefix}-noise"
        else:
            allowed = f"0 without {prefix}-noise: there is no ε without noise"
        require((value > 0) == (noise > 0), f"{prefix}-{name}", value, allowed)


def unknown(
    kind: str, name: object, known: Iterable[str], listed: str = "docs/settings.md"
) -> SettingsError:
    """Return the error for a name that is not one of ``known``, with the nearest one.

    ``kind`` is what the name was meant to be, e.g. ``"algorithm"``; ``listed`` is where
    to look them up where they are many.
    """
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    # More than anybody would read.
    all_ = ", ".join(names) if len(names) <= MAX_LISTED else f"see {listed}"
    return SettingsError(f"unknown {kind} {name!r}; {hint}known: {all_}")


# What is allowed.


class Allowed:
    """The values that a setting may have; an annotation with one declares a setting."""

    def permits(self, value: Any) -> bool:
        """Return whether a value is allowed."""
        raise NotImplementedError

    def __str__(self) -> str:
        """Return the words that follow "must be"."""
        raise NotImplementedError


@dataclass(frozen=True)
class Range(Allowed):
    """An interval of finite numbers.

    Parameters
    ----------
    interval : str
        As in mathematics: ``"(0, 1]"``, ``"[1, inf)"``.
    """

    interval: str

    def __post_init__(self) -> None:
        """Refuse what is no interval."""
        try:
            valid = self.interval[0] in "[(" and self.interval[-1] in ")]"
            valid = valid and self.bounds[0] <= self.bounds[1]
        except (ValueError, IndexError):
            valid = False
        require(valid, "an interval", self.interval, "like '(0, 1]' or '[1, inf)'")

    @property
    def bounds(self) -> tuple[float, float]:
        """The lower and the upper bound."""
        low, high = self.interval[1:-1].split(",")
        return float(low), float(high)

    def permits(self, value: Any) -> bool:
        """Return whether a number lies in the interval; NaN and infinity never do."""
        low, high = self.bounds
        above = low < value or (low == value and self.interval[0] == "[")
        below = value < high or (value == high and self.interval[-1] == "]")
        return above and below and abs(value) != float("inf")

    def __str__(self) -> str:
        low, high = self.bounds
        if low == -float("inf") and high == float("inf"):
            return "finite"
        if high != float("inf"):
            return f"in {self.interval}"
        return f"{'at least' if self.interval[0] == '[' else 'above'} {low:g}"


@dataclass(frozen=True)
class Choice(Allowed):
    """One of some names.

    Parameters
    ----------
    *names : str
        The names.
    """

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)

    def permits(self, value: Any) -> bool:
        """Return whether a value is one of the names."""
        return value in self.names

    def __str__(self) -> str:
        *first, last = (name or "empty" for name in self.names)
        return f"{', '.join(first)} or {last}" if first else last


@dataclass(frozen=True)
class Free(Allowed):
    """Any value; what makes sense is checked where it is used.

    Parameters
    ----------
    form : str, default ""
        What is expected, for the documentation.
    """

    form: str = ""

    def permits(self, value: Any) -> bool:
        """Return True."""
        return True

    def __str__(self) -> str:
        return self.form


class Place(Free):
    """A file or a folder, which need not be there."""

    def permits(self, value: Any) -> bool:
        """Return whether one can look: not too long, no unknown ~ and no zero byte."""
        try:
            Path(value).expanduser().exists()
        except (OSError, RuntimeError):
            return False
        return "\0" not in value


Seed = Range("[0, inf)")
