"""Settings: declared beside what reads them, checked in one place, one-line errors.

A setting is an argument or a dataclass field whose annotation says what is allowed::

    learning_rate: Annotated[float, Range("(0, inf)")] = 0.01

is the setting ``learning-rate``. The flat list in ``[tool.flwr.app.config]`` of
``pyproject.toml``, which Flower needs, is the union of what the package itself
declares; an outsider's class brings its own. This module needs neither torch nor flwr,
so that a server can use it.
"""

import inspect
import math
import sys
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, is_dataclass
from functools import cache
from importlib import import_module
from logging import getLogger
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from flwr_frl.task.allowed import (
    Allowed,
    Choice,
    Free,
    Place,
    Range,
    ResourceError,
    Seed,
    Setting,
    Settings,
    SettingsError,
    need,
    reason_of,
    require,
    require_all_of_noise,
    require_drawable,
    unknown,
)
from flwr_frl.task.run_cache import run_cache

T = TypeVar("T")
log = getLogger("task")
# Names of earlier releases, which still work.
RENAMED = {"liar-share": "byzantine-fraction"}
# Packages that earlier releases installed by these names.
FORMER_PACKAGES = ("clients", "strategies", "task")

__all__ = [
    "Allowed",
    "Checked",
    "Choice",
    "Declared",
    "Free",
    "Maker",
    "Place",
    "Range",
    "ResourceError",
    "Seed",
    "Setting",
    "Settings",
    "SettingsError",
    "build",
    "declared",
    "defaults",
    "is_path",
    "load",
    "made_by",
    "need",
    "reason_of",
    "renamed",
    "require",
    "require_all_of_noise",
    "require_drawable",
    "resolve",
    "unknown",
    "validate",
]


# What is declared.


@dataclass(frozen=True)
class Declared:
    """A setting as a class or function declares it.

    Parameters
    ----------
    argument : str
        Name of the argument; the setting's has ``-`` for ``_``.
    default : bool, int, float or str
        Its default, which also gives its type.
    allowed : Allowed
        Its range.
    """

    argument: str
    default: Setting
    allowed: Allowed

    def check(self, name: str, value: Any) -> None:
        """Raise `SettingsError` unless a value is allowed."""
        allowed = str(self.allowed)
        if isinstance(value, float) and not math.isfinite(value):
            # NaN and infinity are in no range.
            allowed = allowed if "in" in allowed else f"{allowed} and finite"
        require(self.allowed.permits(value), name, value, allowed)


Maker = Callable[..., Any]


def made_by(maker: Maker) -> Any:
    """Return the class or function behind a partial."""
    return getattr(maker, "func", maker)


def _parameters(maker: Maker) -> dict[str, tuple[inspect.Parameter, str]]:
    """Return a maker's parameters by name, with the modules that annotate them."""
    function = made_by(maker)
    found: dict[str, tuple[inspect.Parameter, str]] = {}
    if not inspect.isclass(maker) or is_dataclass(maker):
        # A field may be inherited from another module's dataclass.
        homes: dict[str, str] = {}
        for base in reversed(getattr(function, "__mro__", ())):
            homes |= dict.fromkeys(inspect.get_annotations(base), base.__module__)
        for name, parameter in inspect.signature(maker).parameters.items():
            found[name] = parameter, homes.get(name, function.__module__)
        return found
    for base in maker.__mro__[:-1]:
        if "__init__" not in base.__dict__:
            continue
        parameters = inspect.signature(base.__dict__["__init__"]).parameters
        own = {name: (p, base.__module__) for name, p in parameters.items()}
        # What a class says itself counts, and it comes after what its bases say.
        found = {**own, **found}
        # A class that hands on **arguments has those of its bases as well.
        if all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
            break
    return found


def _allowed(annotation: Any, module: str) -> tuple[Any, Allowed | None]:
    """Return the type of what is annotated, and its range if it is a setting."""
    if isinstance(annotation, str):
        # As under `from __future__ import annotations`; some names are for type
        # checkers only.
        try:
            annotation = eval(annotation, vars(sys.modules[module]))
        except NameError as error:
            if not annotation.startswith("Annotated"):
                return None, None
            raise SettingsError(f"{annotation} in {module}: {error}") from None
    kind, *extras = get_args(annotation) or (None,)
    return kind, next((e for e in extras if isinstance(e, Allowed)), None)


@run_cache(maxsize=None)
def declared(maker: Maker) -> dict[str, Declared]:
    """Return the settings that a class or function declares.

    Parameters
    ----------
    maker : callable
        A class (its bases count, too), dataclass, function or partial. With an
        attribute ``settings_type`` it takes all of its settings as one such dataclass.

    Returns
    -------
    dict of str to Declared
        By the setting's name.

    Raises
    ------
    SettingsError
        If a setting has no default, or one that is no setting.
    """
    function = made_by(maker)
    if kind := getattr(function, "settings_type", None):
        return declared(kind)
    found: dict[str, Declared] = {}
    for name, (parameter, module) in _parameters(maker).items():
        kind, allowed = _allowed(parameter.annotation, module)
        if allowed is None:
            continue
        default = parameter.default
        if default is parameter.empty:
            raise SettingsError(
                f"{function.__qualname__} declares the setting {name!r} without a "
                "default; it must have one"
            )
        whose = f"the default of {name!r} in {function.__qualname__}"
        valid = isinstance(default, bool | int | float | str)
        require(valid, whose, default, "a bool, an int, a float or a str")
        if kind is float and type(default) is int:
            default = float(default)
        found[name.replace("_", "-")] = Declared(name, default, allowed)
    return found


def validate(instance: object) -> None:
    """Check the declared settings that an instance has set so far.

    Its attributes are named like the arguments.

    Raises
    ------
    SettingsError
        If one is out of its range.
    """
    values, kind = vars(instance), cast(Maker, type(instance))
    for name, setting in declared(kind).items():
        if setting.argument in values:
            setting.check(name, values[setting.argument])


class Checked:
    """A dataclass of settings that checks its ranges when it is made."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        validate(self)


def build(maker: Callable[..., T], settings: Settings, **given: Any) -> T:
    """Return what a class or function makes of its settings.

    Parameters
    ----------
    maker : callable
        Whose settings are taken, as `declared` finds them.
    settings : mapping
        What is set; the rest keeps its defaults.
    **given : Any
        Further arguments.

    Raises
    ------
    SettingsError
        If a setting is out of its range, or an argument is none that is known here.
    """
    function = made_by(maker)
    if kind := getattr(function, "settings_type", None):
        return maker(settings=build(kind, settings), **given)
    arguments = {}
    for name, setting in declared(maker).items():
        if name in settings:
            setting.check(name, settings[name])
            arguments[setting.argument] = settings[name]
    try:
        inspect.signature(maker).bind(**arguments, **given)
    except TypeError as error:
        raise SettingsError(
            f"{function.__qualname__} cannot be made of its settings: {error}; what it "
            "needs must be declared as a setting, or have a default"
        ) from None
    return maker(**arguments, **given)


# What is given.


@cache
def defaults() -> Settings:
    """Return every setting of this package with its default.

    They are ``[tool.flwr.app.config]`` of the ``pyproject.toml`` beside this package;
    a wheel has a copy of it there.
    """
    path = Path(__file__).resolve().parents[1] / "pyproject.toml"
    config = tomllib.loads(path.read_text(encoding="utf-8"))
    settings: Settings = config["tool"]["flwr"]["app"]["config"]
    return settings


def renamed(settings: Settings) -> Settings:
    """Return settings with the present names in place of those of earlier releases."""
    for old in settings.keys() & RENAMED.keys():
        _warn_once(f"{old} is now called {RENAMED[old]}; the old name will be removed")
    return {RENAMED.get(name, name): value for name, value in settings.items()}


@cache
def _warn_once(text: str) -> None:
    log.warning(text)


def resolve(
    overrides: Settings, guests: Iterable[Maker] = (), strict: bool = True
) -> dict[str, Setting]:
    """Merge given settings with the defaults and check names and types.

    Parameters
    ----------
    overrides : mapping of str to bool, int, float or str
        Settings in kebab-case. An int is accepted where the default is a float, and a
        number where it is ``"auto"``.
    guests : iterable of callable
        Classes and functions from outside, which declare settings of their own.
    strict : bool, default True
        Whether unknown names are refused; otherwise they are passed on as they are,
        for those to check who know them.

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
    for guest in guests:
        for name, setting in declared(guest).items():
            own, known = setting.default, settings.setdefault(name, setting.default)
            if (type(own), own) != (type(known), known):
                raise SettingsError(
                    f"{made_by(guest).__qualname__} declares {name} with the default "
                    f"{own!r}, but elsewhere it is {known!r}; it must have another "
                    "name, or the same default and be set in the run config"
                )
    for name, value in renamed(overrides).items():
        if name in settings:
            kind = type(settings[name])
            if kind is float and type(value) is int:
                value = float(value)
            if settings[name] == "auto" and type(value) in (int, float):
                value = str(value)
            require(type(value) is kind, name, value, f"of type {kind.__name__}")
        elif strict:
            raise unknown("setting", name, settings)
        # What Flower can send.
        fits = not isinstance(value, int) or abs(value) < 2**63
        require(fits, name, value, "an integer of 64 bits")
        settings[name] = value
    return settings


def is_path(name: object) -> bool:
    """Return whether a name is an import path, ``package.module:name``.

    ``hf:NAME``, a task, is none.
    """
    return ":" in str(name) and not str(name).startswith("hf:")


def load(path: str, kind: str) -> Any:
    """Return the object at an import path, ``package.module:name``.

    Parameters
    ----------
    path : str
        The import path. A path of an earlier release, such as
        ``clients.fedrep:FedRepClient``, is translated unless a module of that name can
        be imported.
    kind : str
        What the object is, for error messages.

    Raises
    ------
    SettingsError
        If the module cannot be imported or has no such name.
    """
    module, _, name = path.partition(":")
    try:
        found: Any = _import(module)
    # An outsider's module can raise anything.
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error).split())
        raise SettingsError(
            f"{kind} {path!r} cannot be imported: {type(error).__name__}: {reason}"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise SettingsError(
                f"{kind} {path!r} cannot be imported: module {module!r} has no {name!r}"
            )
        found = getattr(found, part)
    return found


def _import(module: str) -> Any:
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if package not in FORMER_PACKAGES or error.name != package:
            raise
    _warn_once(f"{module} is now called flwr_frl.{module}; use the new import path")
    return import_module(f"flwr_frl.{module}")
