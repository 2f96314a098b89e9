"""Declaration, validation and defaults of settings.

A setting is an annotated field of a client, a strategy or a dataclass::

    head_epochs: int = setting(10, ge=0)

or an argument of a task's function or constructor::

    head_epochs: Annotated[int, setting(ge=0)] = 10

pydantic checks the values; messages are made here.

Its name is that of the field or argument, in kebab-case: ``learning-rate``. Flower
needs a flat list of all settings; it is ``[tool.flwr.app.config]`` of
``pyproject.toml`` and equals the union of the settings that this package declares.
Third-party classes declare additional ones. This module imports neither torch nor flwr,
because servers use it.
"""

import dataclasses
import difflib
import inspect
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, make_dataclass
from functools import cache, cached_property
from importlib import import_module
from importlib.util import find_spec
from logging import getLogger
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from flwr_frl.common.run_cache import run_cache

Setting = bool | int | float | str
Settings = Mapping[str, Setting]
MayDiffer = Literal["never", "on resume", "always"]

# Attribute of a dataclass with its fields by name, inherited ones among them.
FIELDS = "__dataclass_fields__"
# Key of a setting's facts in the metadata of a dataclass's field.
KEY = "setting"
STRICT = ConfigDict(strict=True, allow_inf_nan=False)

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
    choices = ", ".join(names) if len(names) <= MAX_LISTED else f"see {listed}"
    also = f"; or {others}" if others else ""
    message = f"unknown {kind} {name!r}; {hint}known: {choices}{also}"
    return SettingsError(message, code or kind)


# Facts and limits of a setting


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


def only_if(valid: Callable[[str], bool]) -> AfterValidator:
    """Return a validator, for the annotation of a setting, from a test of its value."""

    def validated(value: str) -> str:
        if not valid(value):
            raise ValueError
        return value

    return AfterValidator(validated)


def checked_by(check: Callable[[Any], object]) -> AfterValidator:
    """Return a validator from a function that raises `ValueError` for bad values."""

    def validated(value: Any) -> Any:
        check(value)
        return value

    return AfterValidator(validated)


def number_or(names: Sequence[str], valid: Callable[[float], bool]) -> AfterValidator:
    """Return a validator of one of some names or a number, also one in a string."""

    def check(value: float | str) -> None:
        if value not in names and not valid(float(value)):
            raise ValueError

    return checked_by(check)


# The annotation of a path of a file or a folder.
PathText = Annotated[str, only_if(is_possible)]


@dataclass(frozen=True)
class Facts:
    """Everything that `setting` declares of a setting, except its default."""

    limits: Mapping[str, float]
    form: str
    safe: bool
    code: bool
    fallback: Setting | None
    may_differ: MayDiffer
    per_device: bool
    unused_if: Mapping[str, tuple[Setting, ...]]


def setting(
    default: Any = ...,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    form: str = "",
    safe: bool = False,
    code: bool = False,
    fallback: Setting | None = None,
    may_differ: MayDiffer = "never",
    per_device: bool = False,
    unused_if: Mapping[str, tuple[Setting, ...]] | None = None,
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
    ge, gt, le, lt : float, optional
        Limits of a number: at least, above, at most, below. All numbers are finite.
    form : str, default ""
        Expected form of a string, for messages and the documentation.
    safe : bool, default False
        True if a checkpoint or model of a stranger may set this string, as it names
        nothing outside the process. Numbers, booleans and literals always may.
    code : bool, default False
        True if the string is a built-in name or an import path, whose code is run.
    fallback : bool, int, float or str, optional
        Value with which a trained model can be used if that of a stranger's file is
        not; by default users must name the value.
    may_differ : {"never", "on resume", "always"}, default "never"
        Whether the value may change when a run is resumed, and whether runs with
        different values are compared, too.
    per_device : bool, default False
        True if a device may override the value in its node config.
    unused_if : mapping of str to tuple, optional
        Values of other settings with which this one has no effect.

    Notes
    -----
    ``safe``, ``code``, ``fallback`` and ``may_differ`` have an effect for settings of
    flwr-frl only, as those who need them cannot import the task; `facts` lists them.
    The first declaration in ``docs/settings.md`` counts.
    """
    limits = {"ge": ge, "gt": gt, "le": le, "lt": lt}
    facts = Facts(
        {name: limit for name, limit in limits.items() if limit is not None},
        *(form, safe, code, fallback, may_differ, per_device, unused_if or {}),
    )
    if default is ...:
        return facts
    return dataclasses.field(default=default, metadata={KEY: facts})


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
    annotation : type
        A type, a ``Literal``, or either with validators.
    facts : Facts
        Limits and other facts.
    """

    argument: str
    default: Setting
    annotation: Any
    facts: Facts

    @property
    def kind(self) -> Any:
        """The annotation without validators."""
        annotated = get_origin(self.annotation) is Annotated
        return self.annotation.__origin__ if annotated else self.annotation

    @property
    def is_safe(self) -> bool:
        """True if a stranger's file may set a string."""
        return self.facts.safe or get_origin(self.kind) is Literal

    @cached_property
    def allowed(self) -> str:
        """The allowed values in words that follow "expected"."""
        if self.kind is bool or self.facts.form:
            return self.facts.form or TYPES[bool]
        if get_origin(self.kind) is Literal:
            *first, last = (name or "empty" for name in get_args(self.kind))
            return f"{', '.join(first)} or {last}" if first else last
        if self.kind not in (int, float) or not self.facts.limits:
            return ""
        limits = self.facts.limits
        low = limits.get("ge", limits.get("gt", -math.inf))
        high = limits.get("le", limits.get("lt"))
        if high is None:
            return f"{'at least' if 'ge' in limits else 'above'} {low:g}"
        ends = "[" if "ge" in limits else "(", "]" if "le" in limits else ")"
        return f"in {ends[0]}{low}, {high}{ends[1]}"

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        limits: Any = Field(**dict[str, Any](self.facts.limits))
        annotation: Any = Annotated[self.annotation, limits]
        return TypeAdapter(annotation, config=STRICT)

    def check(self, name: str, value: Any) -> None:
        """Raise `SettingsError` unless a value is allowed."""
        try:
            self._adapter.validate_python(value)
        except ValidationError:
            allowed = self.allowed or TYPES[type(self.default)]
            if self.kind is int and not isinstance(value, int):
                allowed = f"{TYPES[int]}, {allowed}"
            elif value == math.inf:
                allowed = f"{allowed} and finite"
            require(False, name, value, allowed)


Maker = Callable[..., Any]
T = TypeVar("T")


def made_by(maker: Maker) -> Any:
    """Return the class or function behind a partial."""
    return getattr(maker, "func", maker)


def _parameters(maker: Maker) -> Mapping[str, inspect.Parameter]:
    """Return a maker's parameters by name, with evaluated annotations."""
    function = made_by(maker)
    if FIELDS in getattr(function, "__dict__", {}):
        # Fields may be inherited from a dataclass of another module.
        hints = get_type_hints(function, include_extras=True)
        fields = inspect.signature(maker).parameters
        return {n: p.replace(annotation=hints[n]) for n, p in fields.items()}
    return inspect.signature(maker, eval_str=True).parameters


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
    try:
        parameters = _parameters(maker)
    except NameError as error:
        # Names that are imported only for type checkers are undefined.
        line = f"an annotation of {function.__module__}:{function.__qualname__}"
        raise SettingsError(f"{line} cannot be evaluated: {error}") from None
    fields = getattr(function, FIELDS, {})
    settings: dict[str, Declared] = {}
    for name, parameter in parameters.items():
        annotation, default = parameter.annotation, parameter.default
        extras = [*getattr(annotation, "__metadata__", ())]
        if name in fields:
            extras.append(fields[name].metadata.get(KEY))
        facts = next((extra for extra in extras if isinstance(extra, Facts)), None)
        if facts is None:
            continue
        # A trailing underscore distinguishes a field from a method of the same name.
        setting = name.rstrip("_").replace("_", "-")
        place = f"the default of {name!r} in {function.__qualname__}"
        valid = isinstance(default, bool | int | float | str)
        require(valid, place, default, "a bool, an int, a float or a str", setting)
        settings[setting] = Declared(name, default, annotation, facts)
        if settings[setting].kind is float and type(default) is int:
            settings[setting] = Declared(name, float(default), annotation, facts)
    return settings


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
        If a field has no annotation or the name of an attribute, or if a setting is
        replaced by a plain value.
    """
    types: list[type[Any]]
    if "_settings_type" in vars(kind):
        types = [kind._settings_type]
    else:
        of_bases = (getattr(base, "_settings_type", None) for base in kind.__bases__)
        types = list(dict.fromkeys(filter(None, of_bases)))
    # Types that others extend are contained in these.
    bases = [t for t in types if sum(issubclass(other, t) for other in types) == 1]
    inherited = {n for each in bases for n in vars(each).get(FIELDS, {})}
    fields, annotations = [], inspect.get_annotations(kind)
    for name, value in list(vars(kind).items()):
        is_field = isinstance(value, dataclasses.Field)
        if not is_field and not (name in inherited and isinstance(value, Setting)):
            continue
        delattr(kind, name)
        is_attribute = hasattr(kind, name) or any(
            callable(getattr(each, name, None)) for each in bases
        )
        if not is_field or name not in annotations or is_attribute:
            default = value.default if is_field else value
            kind_of_value = type(default).__name__
            field = f"{name}{'_' * is_attribute}: {kind_of_value} = setting(...)"
            line = f"{kind.__qualname__}.{name} is no setting; write {field}, with the "
            line += "type of its values and a name that no attribute has"
            raise SettingsError(line, name.replace("_", "-"))
        evaluated = inspect.get_annotations(kind, eval_str=True)
        fields.append((name, evaluated[name], value))
    if not fields and len(bases) == 1:
        return bases[0]
    namespace = {"__doc__": kind.__doc__, "__module__": kind.__module__}
    if check := vars(kind).get("check_settings"):
        namespace["check_settings"] = check
    name = f"{kind.__qualname__}._settings_type"
    return make_dataclass(
        name, fields, bases=tuple(bases), namespace=namespace, frozen=True
    )


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
        If a value is not allowed, or if ``maker`` has a required argument that is
        neither a setting nor among ``others``.
    """
    function = made_by(maker)
    if kind := getattr(function, "_settings_type", None):
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
def pyproject() -> Mapping[str, Any]:
    """Return the content of ``pyproject.toml``, of which a wheel contains a copy."""
    package, root = Path(__file__).resolve().parents[1:3]
    path = package / "pyproject.toml"
    path = path if path.exists() else root / "pyproject.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


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


def fallbacks() -> Settings:
    """Return the settings of this package with a ``fallback``, and its value."""
    settings: Settings = pyproject()["tool"]["flwr-frl"]["fallbacks"]
    return settings


def resolve(
    given: Settings,
    owners: Callable[[Settings], Iterable[Maker]] = lambda settings: (),
    strict: bool = True,
) -> Settings:
    """Merge settings with the defaults, and check names and types.

    Every process does so once, where the settings enter it: on the command line or in
    `simulate`, in the ServerApp, in the ClientApp, and from a file of a trained model.

    Parameters
    ----------
    given : mapping of str to bool, int, float or str
        Settings in kebab-case. An int is converted to float if the default is a float,
        and a number to str if the default is ``"auto"`` or ``"0"``. A leading ``~`` of
        the folders of results is expanded, as a shell does not expand it after ``=``.
    owners : callable, optional
        Returns, for settings that name an algorithm and a task, the classes and
        functions that declare settings.
    strict : bool, default True
        If False, undeclared names are kept, as they may belong to code that this
        process does not load.

    Returns
    -------
    mapping of str to bool, int, float or str
        All settings, read-only.

    Raises
    ------
    SettingsError
        If a name is unknown, or a value's type differs from its default's.
    """
    known = dict(defaults())
    named = {n: converted(n, v, known[n]) for n, v in given.items() if n in known}
    for maker in owners({**known, **named}):
        for name, setting in declared(maker).items():
            default = setting.default
            existing = known.setdefault(name, default)
            if (type(default), default) != (type(existing), existing):
                raise SettingsError(
                    f"{made_by(maker).__qualname__} declares {name} with the default "
                    f"{default!r}, but elsewhere it is {existing!r}; rename the "
                    "setting, or keep the default and set it in the run config",
                    name,
                )
    values = dict(known)
    for name, value in given.items():
        if name not in known and strict:
            others = "one that your code declares (docs/your-algorithm.md)"
            raise unknown("setting", name, known, others=others)
        values[name] = converted(name, value, known.get(name, value))
    for name in ("output", "resume"):
        values[name] = os.path.expanduser(str(values[name]))
    return MappingProxyType(values)


def converted(name: str, value: Setting, default: Setting) -> Setting:
    """Return a value with the type of its setting's default.

    Raises `SettingsError` if it has another one.
    """
    kind = type(default)
    if kind is float and type(value) is int:
        value = float(value)
    if default in ("auto", "0") and type(value) in (int, float):
        value = str(value)
    require(type(value) is kind, name, value, TYPES.get(kind, kind.__name__))
    # Flower's config records hold integers of 64 bits.
    fits = not isinstance(value, int) or abs(value) < 2**63
    require(fits, name, value, "an integer of 64 bits")
    return value


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
        return attrgetter(name)(import_module(module))
    # Third-party modules may raise any exception.
    except (Exception, SystemExit) as error:
        line = f"{kind} {path!r} cannot be imported: {error_line(error)}"
        raise SettingsError(line, kind) from error
