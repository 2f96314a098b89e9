"""Ranges of settings, and one-line errors for values outside them."""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Setting = bool | int | float | str
Settings = Mapping[str, Setting]

# Beginnings of allowed values that need a noun in messages.
INEQUALITIES = ("above ", "below ", "in [", "in (")
# Settings by the names that other libraries and our flags use.
OTHER_NAMES = {
    "local-epochs": ("head-epochs", "representation-epochs"),
    "epochs": ("head-epochs", "representation-epochs"),
    "lr": ("learning-rate",),
    "mu": ("proximal-mu",),
    "round": ("num-server-rounds",),
    "rounds": ("num-server-rounds",),
    "num-rounds": ("num-server-rounds",),
    "clients": ("num-clients",),
    "fraction": ("fraction-train",),
    "fraction-fit": ("fraction-train",),
}
# Messages that begin with the name of a setting.
ABOUT = re.compile("(?!there |it )([a-z][a-z0-9-]*)(?: is |: )")
# Types of settings in words that follow "expected".
TYPES = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
# Longer lists of names are replaced by a reference to the documentation.
MAX_LISTED = 60
# Characters shown of the repr of a value that is not a string.
MAX_SHOWN = 300
# Numbers drawn at once: 1 GiB of float64.
MAX_DRAWN = 2**27
# Smallest noise multiplier. Below it, ε exceeds 500,000 per step, which guarantees
# nothing, and its computation soon overflows.
MIN_NOISE = 0.001


class SettingsError(ValueError):
    """Invalid input. The message is one line with the value and the allowed values.

    Parameters
    ----------
    message : str
        The line shown to the user.
    code : str, optional
        Identifier in kebab-case that stays the same when the message is reworded:
        the name of the invalid setting, or a short description of the error. By default
        it is the setting with which the message begins, or ``"settings"``.
    """

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        about = ABOUT.match(message)
        self.code = code or (about[1] if about else "settings")


class ResourceError(SettingsError):
    """A resource of this machine is missing, or not the run's; it ends a simulation."""


class TrainingDivergedError(ArithmeticError):
    """The loss is NaN or infinite."""


def require(
    condition: bool, name: str, value: object, allowed: str, code: str = ""
) -> None:
    """Raise a one-line error about a value unless a condition holds.

    Parameters
    ----------
    condition : bool
        Whether the value is allowed.
    name : str
        Name of the setting as users write it, or a short description of the value.
    value : object
        The value. The message shows its repr, shortened and on one line.
    allowed : str
        The allowed values, in words that follow "expected". Those that begin like
        "above 0" or "in (0, 1]" are preceded by "a number".
    code : str, optional
        Code of the error; by default that of `SettingsError`.

    Raises
    ------
    SettingsError
        If ``condition`` is false.
    """
    if condition:
        return
    shown = repr(value)
    if "\n" in shown:
        shown = " ".join(shown.split())
    if len(shown) > MAX_SHOWN and not isinstance(value, str):
        shown = f"a {type(value).__name__}, {shown[:MAX_SHOWN]}…"
    # "at least 0" is clear after a number, but not after another value.
    is_number = isinstance(value, int | float)
    starts = INEQUALITIES if is_number else (*INEQUALITIES, "at least ")
    number = "a number " if allowed.startswith(starts) else ""
    raise SettingsError(f"{name} is {shown}; expected {number}{allowed}", code)


def require_drawable(count: int, product: str) -> None:
    """Raise `SettingsError` if too many random numbers would be drawn at once.

    ``product`` names the settings whose product is ``count``.
    """
    allowed = f"at most {MAX_DRAWN:,}, the most numbers that are drawn at once"
    require(count <= MAX_DRAWN, product, count, allowed, "too-many-numbers")


def require_all_of_noise(prefix: str, noise: float, clip: float, delta: float) -> None:
    """Raise unless noise, clip and delta are all positive or all zero.

    Parameters
    ----------
    prefix : str
        First part of the settings' names: ``dp`` or ``server-dp``.
    noise, clip, delta : float
        Noise multiplier, clipping norm and δ of differential privacy.

    Raises
    ------
    SettingsError
        If only some are positive, or if the noise is below `MIN_NOISE`.
    """
    enough = noise == 0 or noise >= MIN_NOISE
    require(enough, f"{prefix}-noise", noise, f"0 or at least {MIN_NOISE}")
    for name, value in (("delta", delta), ("clip", clip)):
        if noise:
            allowed = f"above 0 with {prefix}-noise"
        else:
            allowed = f"0 without {prefix}-noise: there is no ε without noise"
        require((value > 0) == (noise > 0), f"{prefix}-{name}", value, allowed)


def reason_of(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type if there is none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def printable(text: str) -> str:
    """Return a text with its unprintable characters, such as line breaks, escaped."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "replace").decode()
        for c in text
    )


def error_line(error: BaseException) -> str:
    """Return an exception's type and message on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def need(package: str, extra: str, feature: str) -> None:
    """Raise a one-line error unless an optional dependency is installed.

    Parameters
    ----------
    package : str
        Name of the package as it is imported.
    extra : str
        Extra of ``flwr-frl`` that installs it.
    feature : str
        What requires the package.

    Raises
    ------
    SettingsError
        If the package is missing.
    """
    if find_spec(package) is None:
        raise SettingsError(
            f"{feature} needs the package {package!r}, which is missing: "
            f"pip install 'flwr-frl[{extra}]'",
            "missing-package",
        )


def similar(name: object, known: Iterable[str]) -> list[str]:
    """Return the known names that an unknown one most likely stands for, or none.

    These are its equivalents in `OTHER_NAMES`, the most similar name in any case, or
    the shortest name that contains it as a word, such as ``proximal-mu`` for ``mu``.
    """
    by_key = {n.lower().replace("_", "-"): n for n in sorted(known, reverse=True)}
    key = str(name).lower().replace("_", "-")
    if equivalents := [by_key[n] for n in OTHER_NAMES.get(key, ()) if n in by_key]:
        return equivalents
    near = difflib.get_close_matches(key, by_key, n=1)
    words = sorted((n for n in by_key if key and key in n.split("-")), key=len)
    return [by_key[n] for n in (near or words)[:1]]


def unknown(
    kind: str,
    name: object,
    known: Iterable[str],
    listed: str = "docs/settings.md",
    others: str = "",
    code: str = "",
) -> SettingsError:
    """Return the error for an unknown name; it suggests similar known ones.

    Parameters
    ----------
    kind : str
        Kind of object that is named, such as ``"algorithm"``.
    name : object
        The unknown name.
    known : iterable of str
        The known names.
    listed : str, default "docs/settings.md"
        Where they are documented, for lists that are too long for a message.
    others : str, default ""
        A second kind of value that is allowed, such as ``package.module:Class``.
    code : str, default ""
        The error's code, by default ``kind``.
    """
    names = sorted(known)
    near = " or ".join(map(repr, similar(name, names)))
    hint = f"did you mean {near}? " if near else ""
    parts = str(name).removeprefix("./").removesuffix(".py").split("/")
    if others and str(name).endswith(".py") and all(map(str.isidentifier, parts)):
        hint = f"for an object of a file, write {'.'.join(parts)}:NAME; "
    choices = ", ".join(names) if len(names) <= MAX_LISTED else f"see {listed}"
    also = f"; or {others}" if others else ""
    message = f"unknown {kind} {name!r}; {hint}known: {choices}{also}"
    return SettingsError(message, code or kind)


class Allowed:
    """Base class of the annotations that declare a setting and its allowed values."""

    def permits(self, value: Any) -> bool:
        """Return whether a value is allowed."""
        raise NotImplementedError

    def __str__(self) -> str:
        """Return the allowed values in words that follow "expected"."""
        raise NotImplementedError


@dataclass(frozen=True)
class Range(Allowed):
    """An interval of finite numbers.

    Parameters
    ----------
    interval : str
        In mathematical notation, such as ``"(0, 1]"`` or ``"[1, inf)"``.
    """

    interval: str

    def __post_init__(self) -> None:
        """Check the notation."""
        try:
            valid = self.interval[0] in "[(" and self.interval[-1] in ")]"
            valid = valid and self.bounds[0] <= self.bounds[1]
        except (ValueError, IndexError):
            valid = False
        require(valid, "interval", self.interval, "like '(0, 1]' or '[1, inf)'")

    @property
    def bounds(self) -> tuple[float, float]:
        """The lower and the upper bound."""
        low, high = self.interval[1:-1].split(",")
        return float(low), float(high)

    def permits(self, value: Any) -> bool:
        """Return whether a number is finite and in the interval."""
        low, high = self.bounds
        try:
            above = low < value or (low == value and self.interval[0] == "[")
            below = value < high or (value == high and self.interval[-1] == "]")
            return above and below and abs(value) != float("inf")
        except TypeError:
            return False

    def __str__(self) -> str:
        low, high = self.bounds
        if low == -float("inf") and high == float("inf"):
            return "finite"
        if high != float("inf"):
            return f"in {self.interval}"
        return f"{'at least' if self.interval[0] == '[' else 'above'} {low:g}"


@dataclass(frozen=True)
class Choice(Allowed):
    """One of several names.

    Parameters
    ----------
    *names : str
        The allowed values.
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
    """Any value. Code that reads the setting may restrict it further.

    Parameters
    ----------
    form : str, default ""
        Expected form, for the documentation.
    """

    form: str = ""

    def permits(self, value: Any) -> bool:
        """Return True."""
        return True

    def __str__(self) -> str:
        return self.form


class Place(Free):
    """A path of a file or a folder, which need not exist."""

    def permits(self, value: Any) -> bool:
        """Return whether a path is valid.

        Paths that are too long, have a null byte or begin with ``~`` and an unknown
        user are not.
        """
        try:
            Path(value).expanduser().exists()
        except (OSError, RuntimeError):
            return False
        return "\0" not in value


Seed = Range("[0, inf)")
