"""Errors that users read as one line. Imports neither torch, flwr nor pydantic."""

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

# Messages that begin with the name of a setting.
ABOUT = re.compile("(?!there |it )([a-z][a-z0-9-]*)(?: is |: )")
# Longer lists of names are replaced by a reference to the documentation.
MAX_LISTED = 60
# Characters shown of the repr of a value that is not a string.
MAX_SHOWN = 300


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
    """A mistake that all clients of a simulation would make; it ends the run.

    A resource of this machine is missing or not the run's, or the code is wrong.
    """


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
        The allowed values, in words that follow "expected".
    code : str, optional
        Code of the error; by default that of `SettingsError`.

    Raises
    ------
    SettingsError
        If ``condition`` is false.
    """
    if condition:
        return
    shown = " ".join(repr(value).split())
    if len(shown) > MAX_SHOWN and not isinstance(value, str):
        shown = f"a {type(value).__name__}, {shown[:MAX_SHOWN]}…"
    raise SettingsError(f"{name} is {shown}; expected {allowed}", code)


def reason_of(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type if there is none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def printable(text: str) -> str:
    """Return a text with its unprintable characters, such as line breaks, escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def error_line(error: BaseException) -> str:
    """Return an exception's type and message on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


@contextmanager
def reading(
    file: Path | str, code: str = "settings", allowed: str = ""
) -> Iterator[None]:
    """Report in one line that a file cannot be read.

    Damaged files raise exceptions of nearly any type.

    Parameters
    ----------
    file : Path or str
        The file.
    code : str, default "settings"
        Code of the error.
    allowed : str, default ""
        Description of valid contents, for the error message.
    """
    try:
        yield
    except SettingsError:
        raise
    except Exception as error:
        line = f"{str(file)!r} cannot be read: {error_line(error)}"
        line += f"; expected {allowed}" if allowed else ""
        raise SettingsError(line, code) from error


def need(package: str, extra: str, feature: str) -> None:
    """Raise a one-line error unless an optional dependency is installed.

    Parameters
    ----------
    package : str
        Name of the package as it is imported.
    extra : str
        Extra of ``flwr-frl`` that installs it.
    feature : str
        Feature that requires the package, for the error message.

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


def unknown(
    kind: str,
    name: object,
    known: Iterable[str],
    listed: str = "docs/settings.md",
    others: str = "",
    code: str = "",
) -> SettingsError:
    """Return the error for an unknown name; it suggests the most similar known one.

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
    by_key = {n.lower().replace("_", "-"): n for n in reversed(names)}
    key = str(name).lower().replace("_", "-")
    near = difflib.get_close_matches(key, by_key, n=1)
    hint = f"did you mean {by_key[near[0]]!r}? " if near else ""
    choices = ", ".join(names) if len(names) <= MAX_LISTED else f"see {listed}"
    also = f"; or {others}" if others else ""
    # Names may contain line breaks.
    message = printable(f"unknown {kind} {name!r}; {hint}known: {choices}{also}")
    return SettingsError(message, code or kind)
