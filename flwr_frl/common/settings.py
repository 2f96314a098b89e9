"""Declaration, validation and defaults of settings.

A setting is an annotated field of a client or a strategy::

    head_epochs: int = setting(10, ge=0)

or an argument, or a field of a dataclass, annotated with its allowed values::

    learning_rate: Annotated[float, Range("(0, inf)")] = 0.01

Its name is that of the field or argument, in kebab-case: ``learning-rate``. Flower
needs a flat list of all settings; it is ``[tool.flwr.app.config]`` of
``pyproject.toml`` and equals the union of the settings that this package declares.
Third-party classes declare additional ones. This module imports neither torch nor flwr,
because servers use it.
"""

import difflib
import inspect
import math
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, is_dataclass, make_dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from logging import getLogger
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin

from flwr_frl.common.run_cache import run_cache

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

T = TypeVar("T")

Maker = Callable[..., Any]


@dataclass(frozen=True)
class Declared:
    """A setting as a class or function declares it.

    Parameters
    ----------
    argument : str
        Name of the argument. The setting's name has ``-`` in place of ``_``, and no
        ``_`` at the end.
    default : bool, int, float or str
        Default, whose type is the type of the setting.
    allowed : Allowed
        Allowed values.
    """

    argument: str
    default: Setting
    allowed: Allowed

    def check(self, name: str, value: Any) -> None:
        """Raise `SettingsError` unless a value is allowed."""
        allowed = str(self.allowed)
        if isinstance(value, float) and not math.isfinite(value):
            # The text of a bounded interval excludes infinity, but "above 0" does not.
            allowed = allowed if "in" in allowed else f"{allowed} and finite"
        require(self.allowed.permits(value), name, value, allowed)


def made_by(maker: Maker) -> Any:
    """Return the class or function behind a partial."""
    return getattr(maker, "func", maker)


def _parameters(maker: Maker) -> dict[str, tuple[inspect.Parameter, str]]:
    """Return a maker's parameters by name, each with the module that annotates it."""
    function = made_by(maker)
    parameters: dict[str, tuple[inspect.Parameter, str]] = {}
    if not inspect.isclass(maker) or is_dataclass(maker):
        # Fields may be inherited from a dataclass of another module.
        modules: dict[str, str] = {}
        for base in reversed(getattr(function, "__mro__", ())):
            modules |= dict.fromkeys(inspect.get_annotations(base), base.__module__)
        for name, parameter in inspect.signature(maker).parameters.items():
            parameters[name] = parameter, modules.get(name, function.__module__)
        return parameters
    for base in maker.__mro__[:-1]:
        if "__init__" not in base.__dict__:
            continue
        signature = inspect.signature(base.__dict__["__init__"]).parameters
        of_base = {name: (p, base.__module__) for name, p in signature.items()}
        # Subclasses override their bases and are listed after them.
        parameters = {**of_base, **parameters}
        # Only a class that passes on **kwargs accepts the arguments of its bases.
        if all(p.kind is not p.VAR_KEYWORD for p in signature.values()):
            break
    return parameters


def _allowed(annotation: Any, module: str) -> tuple[Any, Allowed | None]:
    """Return the type in an annotation, and the allowed values if it is a setting."""
    if isinstance(annotation, str):
        # Postponed evaluation. Names imported only for type checkers are undefined.
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
        Class (including its bases), dataclass, function or partial. If it has an
        attribute ``settings_type``, the fields of that dataclass are its settings.

    Returns
    -------
    dict of str to Declared
        Declarations by the setting's name.

    Raises
    ------
    SettingsError
        If a setting has no default, or one of an unsupported type.
    """
    function = made_by(maker)
    if kind := getattr(function, "settings_type", None):
        return declared(kind)
    settings: dict[str, Declared] = {}
    for name, (parameter, module) in _parameters(maker).items():
        kind, allowed = _allowed(parameter.annotation, module)
        if allowed is None:
            continue
        # A trailing underscore distinguishes a field from a method of the same name.
        default, setting = parameter.default, name.rstrip("_").replace("_", "-")
        if default is parameter.empty:
            raise SettingsError(
                f"{function.__qualname__} declares the setting {name!r} without a "
                "default; it must have one",
                setting,
            )
        place = f"the default of {name!r} in {function.__qualname__}"
        valid = isinstance(default, bool | int | float | str)
        require(valid, place, default, "a bool, an int, a float or a str", setting)
        if kind is float and type(default) is int:
            default = float(default)
        settings[setting] = Declared(name, default, allowed)
    return settings


@dataclass(frozen=True)
class _Field:
    """The default and the limits of a setting that a class declares as a field."""

    default: Setting
    limits: tuple[float | None, ...]
    form: str

    def annotation(self, kind: Any) -> Any:
        """Return the field's type with its allowed values."""
        if get_origin(kind) is Literal:
            return Annotated[str, Choice(*get_args(kind))]
        if kind not in (int, float):
            return Annotated[kind, Free(self.form)]
        ge, gt, le, lt = self.limits
        low = f"({gt}" if gt is not None else f"[{-math.inf if ge is None else ge}"
        high = f"{lt})" if lt is not None else "inf)" if le is None else f"{le}]"
        return Annotated[kind, Range(f"{low}, {high}")]


def setting(
    default: Setting,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    form: str = "",
) -> Any:
    """Declare a setting as an annotated field of a client or a strategy.

    ``head_epochs: int = setting(10, ge=0)`` declares the setting ``head-epochs``.

    Parameters
    ----------
    default : bool, int, float or str
        The default. The field is annotated with its type, or with a ``Literal`` of the
        allowed strings.
    ge, gt, le, lt : float, optional
        Limits of a number: at least, above, at most, below.
    form : str, default ""
        Expected form of a string, for the documentation.
    """
    return _Field(default, (ge, gt, le, lt), form)


def take_fields(kind: type) -> dict[str, tuple[Any, Setting]]:
    """Remove the settings that a class declares as fields, and return them.

    Returns
    -------
    dict of str to (annotation, default)
        By the field's name.

    Raises
    ------
    SettingsError
        If a field has no annotation.
    """
    for base in kind.__bases__:
        for name, value in vars(base).items():
            if isinstance(value, _Field):
                raise SettingsError(
                    f"{base.__qualname__}.{name} is no setting; {base.__qualname__} "
                    "must be a subclass of Client or Strategy",
                    name.replace("_", "-"),
                )
    fields, annotations = {}, inspect.get_annotations(kind)
    for name, field in list(vars(kind).items()):
        if not isinstance(field, _Field):
            continue
        if name not in annotations:
            raise SettingsError(
                f"{kind.__qualname__}.{name} has no annotation; write "
                f"{name}: {type(field.default).__name__} = setting(...)",
                name.replace("_", "-"),
            )
        annotation = annotations[name]
        if isinstance(annotation, str):  # Postponed evaluation
            annotation = eval(annotation, vars(sys.modules[kind.__module__]))
        fields[name] = field.annotation(annotation), field.default
        delattr(kind, name)
    return fields


def warn_about_similar(kind: type, hooks: Iterable[str]) -> None:
    """Warn of methods that a class adds and whose names resemble those of hooks."""
    for name, value in vars(kind).items():
        known = any(hasattr(base, name) for base in kind.__bases__)
        if known or name in hooks or name.startswith("_") or not callable(value):
            continue
        near = difflib.get_close_matches(name, hooks, 1, cutoff=0.83)
        # A longer name is a helper, such as `statistics_of`.
        if near and abs(len(near[0]) - len(name)) <= 1:
            text = "%s.%s overrides nothing; did you mean %r?"
            getLogger("flwr").warning(text, kind.__qualname__, name, near[0])


def extended(base: type, kind: type) -> type:
    """Return a frozen dataclass of settings with the fields that a class declares.

    Parameters
    ----------
    base : type
        The dataclass to extend, which is returned if the class declares no settings.
    kind : type
        The class. Its docstring describes the settings. Its static method
        ``check_settings``, if any, raises `SettingsError` for values that do not fit
        each other.
    """
    if not (fields := take_fields(kind)):
        return base
    listed = [(name, *field) for name, field in fields.items()]
    name = f"{kind.__name__}.settings_type"
    check = vars(kind).get("check_settings")

    def validated(settings: Any) -> None:
        base.__post_init__(settings)  # type: ignore[attr-defined]
        if check:
            check.__func__(settings)

    made = make_dataclass(
        "settings_type",
        listed,
        bases=(base,),
        namespace={"__post_init__": validated},
        frozen=True,
    )
    made.__doc__, made.__module__ = kind.__doc__, kind.__module__
    made.__qualname__, made.__name__ = f"{kind.__qualname__}.settings_type", name
    return made


def validate(instance: object) -> None:
    """Check an instance's attributes that are named like its declared settings.

    Attributes that are not set yet are skipped.

    Raises
    ------
    SettingsError
        If a value is not allowed.
    """
    values, kind = vars(instance), cast(Maker, type(instance))
    for name, setting in declared(kind).items():
        if setting.argument in values:
            setting.check(name, values[setting.argument])


class Checked:
    """Base class of dataclasses of settings that are validated on construction."""

    def __post_init__(self) -> None:
        """Validate all fields."""
        validate(self)


def build(maker: Callable[..., T], settings: Settings, **others: Any) -> T:
    """Call a class or function with the settings that it declares.

    Parameters
    ----------
    maker : callable
        Class or function to call.
    settings : mapping
        Settings by name. Missing ones keep their defaults; undeclared ones are ignored.
    **others : Any
        Arguments that are not settings.

    Raises
    ------
    SettingsError
        If a value is not allowed, or if ``maker`` has a required argument that is
        neither a setting nor among ``others``.
    """
    function = made_by(maker)
    if kind := getattr(function, "settings_type", None):
        return maker(settings=build(kind, settings), **others)
    arguments = {}
    for name, setting in declared(maker).items():
        if name in settings:
            setting.check(name, settings[name])
            arguments[setting.argument] = settings[name]
    try:
        inspect.signature(maker).bind(**arguments, **others)
    except TypeError as error:
        raise SettingsError(
            f"{function.__qualname__} cannot be called with its settings: {error}; "
            "every required argument must be declared as a setting",
            "undeclared-argument",
        ) from None
    return maker(**arguments, **others)


@cache
def defaults() -> Settings:
    """Return the default of every setting that this package declares.

    They are read from ``pyproject.toml``, of which a wheel contains a copy.
    """
    package, root = Path(__file__).resolve().parents[1:3]
    path = package / "pyproject.toml"
    path = path if path.exists() else root / "pyproject.toml"
    config = tomllib.loads(path.read_text(encoding="utf-8"))
    settings: Settings = config["tool"]["flwr"]["app"]["config"]
    return settings


def expand_home(settings: Settings) -> Settings:
    """Return settings with a leading ``~`` of the folders of results expanded.

    A shell does not expand it after ``=``.
    """
    given = {name: settings.get(name) for name in ("output", "resume")}
    folders = {n: os.path.expanduser(v) for n, v in given.items() if type(v) is str}
    return {**settings, **folders}


def resolve(
    overrides: Settings, guests: Iterable[Maker] = (), strict: bool = True
) -> dict[str, Setting]:
    """Merge settings with the defaults, and check names and types.

    Parameters
    ----------
    overrides : mapping of str to bool, int, float or str
        Settings in kebab-case. An int is converted to float if the default is a float,
        and a number to str if the default is ``"auto"`` or a number in quotes.
    guests : iterable of callable
        Third-party classes and functions, which declare additional settings.
    strict : bool, default True
        Whether unknown names raise an error; otherwise they are passed through.

    Returns
    -------
    dict of str to bool, int, float or str
        All settings.

    Raises
    ------
    SettingsError
        If a name is unknown, or a value's type differs from its default's.
    """
    settings, guests = dict(defaults()), tuple(guests)
    for guest in guests:
        for name, setting in declared(guest).items():
            default = setting.default
            existing = settings.setdefault(name, default)
            if (type(default), default) != (type(existing), existing):
                raise SettingsError(
                    f"{made_by(guest).__qualname__} declares {name} with the default "
                    f"{default!r}, but elsewhere it is {existing!r}; rename the "
                    "setting, or keep the default and set it in the run config",
                    name,
                )
    for name, value in overrides.items():
        if name in settings:
            kind = type(settings[name])
            if kind is float and type(value) is int:
                value = float(value)
            if _takes_numbers(settings[name]) and type(value) in (int, float):
                value = str(value)
            require(type(value) is kind, name, value, TYPES[kind])
        elif strict:
            raise _undeclared(name, guests) or unknown("setting", name, settings)
        # Flower's config records hold integers of 64 bits.
        fits = not isinstance(value, int) or abs(value) < 2**63
        require(fits, name, value, "an integer of 64 bits")
        settings[name] = value
    return settings


def _undeclared(name: str, guests: Iterable[Maker]) -> SettingsError | None:
    """Return the error for a name of a third-party argument without a declaration."""
    for guest in guests:
        maker = made_by(getattr(made_by(guest), "settings_type", None) or guest)
        theirs = not maker.__module__.startswith("flwr_frl.")
        if theirs and name.replace("-", "_") in _parameters(maker):
            line = f"{name} is an argument of {maker.__qualname__}, but no setting"
            return SettingsError(f"{line}; see docs/your-algorithm.md", name)
    return None


def _takes_numbers(default: Setting) -> bool:
    """Return True if a default is text in which numbers are allowed."""
    if default == "auto" or type(default) is not str:
        return default == "auto"
    try:
        return math.isfinite(float(default))
    except ValueError:
        return False


def is_path(name: object) -> bool:
    """Return whether a name is an import path, ``package.module:name``.

    The tasks ``hf:NAME`` and ``hf-text:NAME`` are not import paths.
    """
    return ":" in str(name) and not str(name).startswith(("hf:", "hf-text:"))


def load(path: str, kind: str) -> Any:
    """Return the object at an import path, ``package.module:name``.

    Parameters
    ----------
    path : str
        The import path.
    kind : str
        Kind of object, such as ``"algorithm"``, for error messages.

    Raises
    ------
    SettingsError
        If the module cannot be imported or has no such name.
    """
    module, _, name = path.partition(":")
    try:
        loaded: Any = import_module(module)
    # Third-party modules may raise any exception.
    except (Exception, SystemExit) as error:
        hint, missing = "", isinstance(error, ModuleNotFoundError)
        if missing and getattr(error, "name", "") == module.partition(".")[0]:
            hint = "; install it, or run the command in the folder that contains it"
        raise SettingsError(
            f"{kind} {path!r} cannot be imported: {error_line(error)}{hint}", kind
        ) from error
    for part in name.split("."):
        if not hasattr(loaded, part):
            public = [n for n in dir(loaded) if not n.startswith("_")]
            near = "".join(f"; did you mean {n!r}?" for n in similar(part, public))
            message = f"{kind} {path!r} cannot be imported: module {module!r} has no"
            raise SettingsError(f"{message} {name!r}{near}", kind)
        loaded = getattr(loaded, part)
    return loaded
