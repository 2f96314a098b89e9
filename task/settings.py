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

import inspect
import math
import os
import sys
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, is_dataclass, make_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin

from flwr_frl.task.allowed import TYPES as TYPES
from flwr_frl.task.allowed import Allowed as Allowed
from flwr_frl.task.allowed import Choice as Choice
from flwr_frl.task.allowed import Free as Free
from flwr_frl.task.allowed import Place as Place
from flwr_frl.task.allowed import Range as Range
from flwr_frl.task.allowed import ResourceError as ResourceError
from flwr_frl.task.allowed import Seed as Seed
from flwr_frl.task.allowed import Setting as Setting
from flwr_frl.task.allowed import Settings as Settings
from flwr_frl.task.allowed import SettingsError as SettingsError
from flwr_frl.task.allowed import TrainingDivergedError as TrainingDivergedError
from flwr_frl.task.allowed import error_line as error_line
from flwr_frl.task.allowed import need as need
from flwr_frl.task.allowed import printable as printable
from flwr_frl.task.allowed import reason_of as reason_of
from flwr_frl.task.allowed import require as require
from flwr_frl.task.allowed import require_all_of_noise as require_all_of_noise
from flwr_frl.task.allowed import require_drawable as require_drawable
from flwr_frl.task.allowed import similar as similar
from flwr_frl.task.allowed import unknown as unknown
from flwr_frl.task.run_cache import run_cache

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
    path = Path(__file__).resolve().parents[1] / "pyproject.toml"
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
        What the object should be, such as ``"algorithm"``, for error messages.

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
