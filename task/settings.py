"""Settings: names, defaults and the one-line errors of everything that can be set.

The defaults in ``[tool.flwr.app.config]`` of ``pyproject.toml`` are the only list of
settings. This module needs neither torch nor flwr, so that a server can use it.
"""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

Setting = bool | int | float | str
Settings = Mapping[str, Setting]


class SettingsError(ValueError):
    """Bad input: the message is one line with the value and what is allowed."""


def require(condition: bool, name: str, value: object, allowed: str) -> None:
    """Raise a one-line error about a value unless a condition holds.

    Parameters
    ----------
    condition : bool
        What must hold.
    name : str
        The setting, as a user spells it.
    value : object
        The value given.
    allowed : str
        What is allowed, to follow the words "must be".

    Raises
    ------
    SettingsError
        If ``condition`` is false.
    """
    if not condition:
        raise SettingsError(f"{name} is {value!r}; it must be {allowed}")


def unknown(kind: str, name: object, known: Iterable[str]) -> SettingsError:
    """Return the error for a name that is not known, with the nearest ones.

    Parameters
    ----------
    kind : str
        What the name was meant to be, e.g. ``"algorithm"``.
    name : object
        The name given.
    known : iterable of str
        All names that are allowed.

    Returns
    -------
    SettingsError
        To be raised by the caller.
    """
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return SettingsError(f"unknown {kind} {name!r}; {hint}known: {', '.join(names)}")


@cache
def defaults() -> Settings:
    """Return every setting with its default.

    Returns
    -------
    mapping of str to bool, int, float or str
        ``[tool.flwr.app.config]`` of ``pyproject.toml``: the one beside this package
        in a checkout, the copy inside this package in an installed wheel.
    """
    here = Path(__file__).resolve().parent
    installed = here / "pyproject.toml"
    path = installed if installed.exists() else here.parent / "pyproject.toml"
    config = tomllib.loads(path.read_text(encoding="utf-8"))
    settings: Settings = config["tool"]["flwr"]["app"]["config"]
    return settings


def resolve(overrides: Settings) -> dict[str, Setting]:
    """Merge given settings with the defaults and check names and types.

    Parameters
    ----------
    overrides : mapping of str to bool, int, float or str
        Settings in kebab-case. An int is accepted where the default is a float.

    Returns
    -------
    dict of str to bool, int, float or str
        All settings.

    Raises
    ------
    SettingsError
        If a name is unknown or a value has another type than its default.
    """
    settings = dict(defaults())
    for name, value in overrides.items():
        if name not in settings:
            raise unknown("setting", name, settings)
        kind = type(settings[name])
        if kind is float and type(value) is int:
            value = float(value)
        require(type(value) is kind, name, value, f"of type {kind.__name__}")
        # What Flower can send.
        fits = not isinstance(value, int) or abs(value) < 2**63
        require(fits, name, value, "an integer of 64 bits")
        settings[name] = value
    return settings
