"""Declaration, validation and defaults of settings.

A setting is an annotated field of a client, a strategy or a dataclass::

    head_epochs: int = setting(10, ge=0)

or an argument of a task's function or constructor::

    head_epochs: Annotated[int, setting(ge=0)] = 10

pydantic checks the values; its errors become one-line messages here.

Its name is that of the field or argument, in kebab-case: ``learning-rate``. Flower
needs a flat list of all settings; it is ``[tool.flwr.app.config]`` of
``pyproject.toml`` and equals the union of the settings that this package declares.
Third-party classes declare additional ones. This module imports neither torch nor flwr,
because servers use it.
"""

import dataclasses
import difflib
import inspect
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, make_dataclass
from functools import cache, cached_property
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from traceback import walk_tb
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from flwr_frl.common.errors import SettingsError, error_line, require, unknown
from flwr_frl.common.run_cache import run_cache

Setting = bool | int | float | str
Settings = Mapping[str, Setting]
MayDiffer = Literal["never", "on resume", "always"]

# Attribute of a dataclass with its fields by name, inherited ones among them.
FIELDS = "__dataclass_fields__"
# Key of a declaration in the metadata of a dataclass's field.
KEY = "setting"
STRICT = ConfigDict(strict=True, allow_inf_nan=False)

# Types of settings, and limits of numbers, in words that follow "expected".
TYPES = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
# Smallest noise multiplier. Below it, ε exceeds 500,000 per step, which guarantees
# nothing, and its computation soon overflows.
MIN_NOISE = 0.001


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
    values = noise, clip, delta
    valid = noise >= MIN_NOISE and all(values) if noise else not any(values)
    allowed = f"at least {MIN_NOISE} with {prefix}-clip and {prefix}-delta above 0, or "
    require(valid, f"{prefix}-noise", noise, f"{allowed}0 like these")


# Declarations


def is_possible(path: str) -> bool:
    """Return whether a path, which need not exist, is valid.

    Paths that are too long, have a null byte or begin with ``~`` and an unknown user
    are not.
    """
    try:
        Path(path).expanduser().exists()
    except (OSError, RuntimeError):
        return False
    return "\0" not in path


def checked_by(check: Callable[[Any], object]) -> AfterValidator:
    """Return a validator, for the annotation of a setting, from a test of its value.

    The test returns False or raises `ValueError` for values that are not allowed.
    """

    def validated(value: Any) -> Any:
        if check(value) is False:
            raise ValueError
        return value

    return AfterValidator(validated)


def number_or(names: Sequence[str], valid: Callable[[float], bool]) -> AfterValidator:
    """Return a validator of one of some names or a number, also one in a string."""
    return checked_by(lambda value: value in names or valid(float(value)))


# The annotation of a path of a file or a folder.
PathText = Annotated[str, checked_by(is_possible)]


@dataclass(frozen=True)
class Declared:
    """A setting as a class or function declares it.

    Parameters
    ----------
    limits, form, safe, code, may_differ, per_device, unused_if
        As of `setting`.
    argument : str
        Name of the argument. The setting's name has ``-`` in place of ``_``, and no
        ``_`` at the end.
    default : bool, int, float or str
        Default, whose type is the type of the setting.
    annotation : type
        A type, a ``Literal``, or either with validators.
    """

    limits: Mapping[str, float]
    form: str
    safe: bool
    code: bool
    may_differ: MayDiffer
    per_device: bool
    unused_if: Mapping[str, tuple[Setting, ...]]
    # Set by `declared`, which finds the declaration
    argument: str = ""
    default: Setting = ""
    annotation: Any = str

    @property
    def kind(self) -> Any:
        """The annotation without validators."""
        annotated = get_origin(self.annotation) is Annotated
        return self.annotation.__origin__ if annotated else self.annotation

    @property
    def allowed(self) -> str:
        """The allowed values in words that follow "expected"."""
        if self.form:
            return self.form
        if get_origin(self.kind) is Literal:
            return ", ".join(str(value) or "empty" for value in get_args(self.kind))
        limits = [f"{LIMITS[n]} {limit:,}" for n, limit in self.limits.items()]
        kind = TYPES[type(self.default)]
        return f"{kind}, {' and '.join(limits)}" if limits else kind

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        limits: Any = Field(**dict[str, Any](self.limits))
        annotation: Any = Annotated[self.annotation, limits]
        return TypeAdapter(annotation, config=STRICT)

    def check(self, name: str, value: Any) -> None:
        """Raise `SettingsError` unless a value is allowed."""
        try:
            self._adapter.validate_python(value)
        except ValidationError:
            require(False, name, value, self.allowed)


def setting(
    default: Any = ...,
    *,
    form: str = "",
    safe: bool = False,
    code: bool = False,
    may_differ: MayDiffer = "never",
    per_device: bool = False,
    unused_if: Mapping[str, tuple[Setting, ...]] | None = None,
    **limits: float,
) -> Any:
    """Declare a setting: pydantic's `Field`, with what else is to be known of it.

    ``head_epochs: int = setting(10, ge=0)`` in a client, a strategy or a dataclass
    declares the setting ``head-epochs``; so does the argument of a function
    ``head_epochs: Annotated[int, setting(ge=0)] = 10``.

    Parameters
    ----------
    default : bool, int, float or str, optional
        The default of a field. It is annotated with its type, with a ``Literal`` of the
        allowed strings, or with `PathText`. Of an argument, it stands in the signature.
    form : str, default ""
        Expected form of a string, for messages and the documentation.
    safe : bool, default False
        True if a checkpoint or model of a stranger may set this string, as it names
        nothing outside the process. Numbers, booleans and literals always may.
    code : bool, default False
        True if the string is a built-in name or an import path, whose code is run.
    may_differ : {"never", "on resume", "always"}, default "never"
        Whether the value may change when a run is resumed, and whether runs with
        different values are compared, too.
    per_device : bool, default False
        True if a device may override the value in its node config.
    unused_if : mapping of str to tuple, optional
        Values of other settings with which this one has no effect.
    **limits : float
        Limits of a number: ``ge`` (at least), ``gt`` (above), ``le`` (at most) and
        ``lt`` (below). All numbers are finite.

    Notes
    -----
    ``safe``, ``code`` and ``may_differ`` have an effect for settings of flwr-frl only,
    as those who need them cannot import the task; `facts` lists them. The first
    declaration in ``docs/settings.md`` counts.
    """
    for name in limits.keys() - LIMITS.keys():
        raise unknown("argument of setting", name, LIMITS, code="settings")
    unused = unused_if or {}
    made = Declared(limits, form, safe, code, may_differ, per_device, unused)
    if default is ...:
        return made
    return dataclasses.field(default=default, metadata={KEY: made})


Maker = Callable[..., Any]
T = TypeVar("T")


def made_by(maker: Maker) -> Any:
    """Return the class or function behind a partial."""
    return getattr(maker, "func", maker)


@run_cache(maxsize=None)
def declared(maker: Maker) -> dict[str, Declared]:
    """Return the settings that a class or function declares.

    Parameters
    ----------
    maker : callable
        Class, dataclass, function or partial. If it has an attribute
        ``_settings_type``, the fields of that dataclass are its settings.

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
    if _settings_type := getattr(function, "_settings_type", None):
        return declared(_settings_type)
    fields = getattr(function, FIELDS, {})
    settings: dict[str, Declared] = {}
    for name, parameter in inspect.signature(maker, eval_str=True).parameters.items():
        annotation, default = parameter.annotation, parameter.default
        extras = [*getattr(annotation, "__metadata__", ())]
        if name in fields:
            extras.append(fields[name].metadata.get(KEY))
        found = next((extra for extra in extras if isinstance(extra, Declared)), None)
        if found is None:
            continue
        # A trailing underscore distinguishes a field from a method of the same name.
        setting = name.rstrip("_").replace("_", "-")
        place = f"the default of {name!r} in {function.__qualname__}"
        valid = isinstance(default, bool | int | float | str)
        require(valid, place, default, "a bool, an int, a float or a str", setting)
        about = {"argument": name, "annotation": annotation, "default": default}
        made = dataclasses.replace(found, **about)
        if made.kind is float:
            made = dataclasses.replace(made, default=float(default))
        settings[setting] = made
    return settings


def refuse_misspelt(kind: type, hooks: Iterable[str]) -> None:
    """Raise `SettingsError` for a new public method named nearly like a hook."""
    inherited = {name for base in kind.__bases__ for name in dir(base)}
    for name in vars(kind).keys() - inherited - {*hooks}:
        near = difflib.get_close_matches(name, hooks, 3, cutoff=0.83)
        # A longer name is a helper, such as `statistics_of`.
        if near and abs(len(near[0]) - len(name)) <= 1 and not name.startswith("_"):
            raise SettingsError(
                f"{kind.__qualname__} defines {name!r}, which nothing calls; did you "
                f"mean {' or '.join(map(repr, near))}? A helper needs another name",
                "unknown-hook",
            )


def settings_of(kind: type[Any]) -> type[Any]:
    """Return a frozen dataclass of the settings that a class declares or inherits.

    Parameters
    ----------
    kind : type
        The class, whose settings are removed from its attributes. Its docstring
        describes them. Its static method ``check_settings``, if any, raises
        `SettingsError` for values that do not fit each other. It may name another
        dataclass to extend, as ``_settings_type``.

    Raises
    ------
    SettingsError
        If a field has no annotation, or if a setting is replaced by a plain value.
    """
    own = vars(kind).get("_settings_type")
    of_bases = (getattr(base, "_settings_type", None) for base in kind.__bases__)
    types = list(dict.fromkeys(filter(None, [own] if own else of_bases)))
    # Types that others extend are contained in these.
    bases = [t for t in types if sum(issubclass(other, t) for other in types) == 1]
    inherited = {n for each in bases for n in getattr(each, FIELDS, {})}
    fields, annotations = [], inspect.get_annotations(kind)
    for name, value in list(vars(kind).items()):
        is_field = isinstance(value, dataclasses.Field)
        if is_field and name in annotations:
            delattr(kind, name)
            evaluated = inspect.get_annotations(kind, eval_str=True)
            fields.append((name, evaluated[name], value))
        elif is_field or (name in inherited and isinstance(value, Setting)):
            line = f"{kind.__qualname__}.{name} is no setting; write {name}: TYPE = "
            raise SettingsError(f"{line}setting(...)", name.replace("_", "-"))
    if not fields and len(bases) == 1:
        only: type[Any] = bases[0]
        return only
    namespace = {"__doc__": kind.__doc__, "__module__": kind.__module__}
    if check := vars(kind).get("check_settings"):
        namespace["check_settings"] = check
    name = f"{kind.__qualname__}._settings_type"
    return make_dataclass(
        name, fields, bases=tuple(bases), namespace=namespace, frozen=True
    )


def with_traits(traits: T, changes: Mapping[str, Any]) -> T:
    """Return a class's inherited traits, a dataclass, with its class keywords.

    Raises `SettingsError` if a keyword is unknown.
    """
    known = [each.name for each in dataclasses.fields(cast(Any, traits))]
    for name in changes.keys() - known:
        raise unknown("class keyword", name, known, code="traits")
    return cast(T, dataclasses.replace(cast(Any, traits), **changes))


class Checked:
    """Base class of dataclasses of settings that are validated on construction."""

    def __post_init__(self) -> None:
        """Validate all fields, and how their values fit each other."""
        for name, setting in declared(type(self)).items():
            setting.check(name, getattr(self, setting.argument))
        for kind in type(self).__mro__:
            if check := vars(kind).get("check_settings"):
                check.__func__(self)


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
        If a value is not allowed.
    """
    if kind := getattr(made_by(maker), "_settings_type", None):
        return maker(settings=build(kind, settings), **others)
    arguments = {}
    for name, setting in declared(maker).items():
        if name in settings:
            setting.check(name, settings[name])
            arguments[setting.argument] = settings[name]
    return maker(**arguments, **others)


class Resolved(dict[str, Setting]):
    """All settings of a run with valid names and types, which nobody changes.

    `resolve` makes it where settings enter a process, and returns it unchanged: a
    process resolves once. It is hashable, for caches, and sent to workers whole.
    """

    def __hash__(self) -> int:  # type: ignore[override]
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(self.items()))

    def __reduce__(self) -> Any:
        # Hashes of strings differ between processes.
        return Resolved, (dict(self),)


@cache
def pyproject() -> Mapping[str, Any]:
    """Return the content of ``pyproject.toml``, of which a wheel contains a copy."""
    package, root = Path(__file__).resolve().parents[1:3]
    path = package / "pyproject.toml"
    path = path if path.exists() else root / "pyproject.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


def version() -> str:
    """Return the version of this package."""
    return str(pyproject()["project"]["version"])


def defaults() -> Settings:
    """Return the default of every setting that this package declares."""
    settings: Settings = pyproject()["tool"]["flwr"]["app"]["config"]
    return settings


@cache
def facts(name: str) -> frozenset[str]:
    """Return the settings of this package with a fact, also if torch is not loaded.

    Parameters
    ----------
    name : {"safe", "code", "per-device", "on-resume", "always"}
        Arguments of `setting`, or values of its argument ``may_differ``: ``on-resume``
        are all that may differ then, ``always`` those of them that always may.
    """
    return frozenset(pyproject()["tool"]["flwr-frl"][name])


def resolve(
    given: Settings,
    owners: Callable[[Settings], Iterable[Maker]] = lambda settings: (),
    strict: bool = True,
) -> Resolved:
    """Merge settings with the defaults, and check names and types.

    Every process does so once, where the settings enter it: on the command line or in
    `simulate`, in the ServerApp, in the ClientApp, and from a file of a trained model.

    Parameters
    ----------
    given : mapping of str to bool, int, float or str
        Settings in kebab-case, or `Resolved` ones. An int is converted to float if the
        default is a float, and a number to str if the default is ``"auto"`` or ``"0"``.
        A leading ``~`` of the folders of results is expanded, as a shell does not
        expand it after ``=``.
    owners : callable, optional
        Returns, for settings that name an algorithm and a task, the classes and
        functions that declare settings.
    strict : bool, default True
        If False, undeclared names are kept, as they may belong to code that this
        process does not load.

    Returns
    -------
    Resolved
        All settings.

    Raises
    ------
    SettingsError
        If a name is unknown, or a value's type differs from its default's.
    """
    if isinstance(given, Resolved):
        return given
    known = dict(defaults())
    named = {n: converted(n, v, known[n]) for n, v in given.items() if n in known}
    for maker in owners({**known, **named}):
        for name, setting in declared(maker).items():
            default = setting.default
            existing = known.setdefault(name, default)
            if (type(default), default) != (type(existing), existing):
                where = f"the default of {name} in {made_by(maker).__qualname__}"
                allowed = f"{existing!r}, its default elsewhere, or another name"
                require(False, where, default, allowed, name)
    values = dict(known)
    for name, value in given.items():
        if name not in known and strict:
            others = "one that your code declares (docs/your-algorithm.md)"
            raise unknown("setting", name, known, others=others)
        values[name] = converted(name, value, known.get(name, value))
    for name in ("output", "resume"):
        values[name] = os.path.expanduser(str(values[name]))
    return Resolved(values)


def converted(name: str, value: Setting, default: Setting) -> Setting:
    """Return a value with the type of its setting's default.

    Raises `SettingsError` if it has another one.
    """
    kind = type(default)
    if kind is float and type(value) is int:
        value = float(value)
    if default in ("auto", "0", "1") and type(value) in (int, float):
        value = str(value)
    require(type(value) is kind, name, value, TYPES.get(kind, kind.__name__))
    # Flower's config records hold integers of 64 bits.
    fits = not isinstance(value, int) or abs(value) < 2**63
    require(fits, name, value, "an integer of 64 bits")
    return value


def is_path(name: object) -> bool:
    """Return whether a name is an import path, ``package.module:name``.

    The tasks ``hf:NAME`` and ``hf-text:NAME`` and files of Windows, such as
    ``C:/parts.json``, are not import paths.
    """
    return ":" in str(name) and not re.match(r"hf:|hf-text:|\w:[/\\]", str(name))


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
        return attrgetter(name)(import_module(module))
    # Third-party modules may raise any exception.
    except (Exception, SystemExit) as error:
        place = ""
        for frame, number in walk_tb(error.__traceback__):
            if frame.f_globals.get("__name__") == module:
                place = f" ({frame.f_code.co_filename}:{number})"
        line = f"{kind} {path!r} cannot be imported: {error_line(error)}{place}"
        raise SettingsError(line, kind) from error
