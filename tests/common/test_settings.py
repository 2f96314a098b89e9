"""Settings: declarations, ranges, names, types and one-line errors."""

import math
import re
import tomllib
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Annotated, Any, ClassVar, Literal, get_args

import pytest
from declarations import PYPROJECT, RATE, MoreSteps, SGDOptimizer, function

from docs import settings as settings_page
from flwr_frl.clients.algorithms import owners
from flwr_frl.clients.base import Client
from flwr_frl.clients.device.setup import DeviceSettings
from flwr_frl.common.settings import (
    Declared,
    PathText,
    SettingsError,
    build,
    declared,
    defaults,
    is_possible,
    load,
    resolve,
    setting,
    validate,
)
from flwr_frl.strategies.algorithms import ALGORITHMS
from flwr_frl.strategies.base import Strategy
from flwr_frl.strategies.gossip.graph_strategy import MIXING, GraphStrategy
from flwr_frl.strategies.grids.speeds import SpeedSettings
from flwr_frl.strategies.server.run_settings import RunSettings
from flwr_frl.task.compression.per_tensor import COMPRESSORS, CompressionSettings
from flwr_frl.task.models.adapters import AdapterSettings
from flwr_frl.task.tasks import TASKS

INFINITY = math.inf


# Allowed values

LIMITS = [
    # Limits, what is allowed and refused, and the former in words.
    ({"gt": 0, "lt": 1}, [1e-300, 0.5], [0.0, -0.0, 1.0, -1.0], "in (0, 1)"),
    ({"gt": 0, "le": 1}, [1e-300, 1, 1.0], [0.0, 1 + 1e-15], "in (0, 1]"),
    ({"ge": 0, "lt": 1}, [0, -0.0, 0.5], [-1e-300, 1, 1.0], "in [0, 1)"),
    ({"ge": 0.5}, [0.5, 10**30, 1e308], [0.499, -5], "at least 0.5"),
    ({"gt": 0}, [5e-324, 1e308], [0, -1], "above 0"),
    ({"lt": 0}, [-1e308, -1], [0, 1], "in (-inf, 0)"),
    ({}, [-1e308, 0, 1e308], [True, "1", None], "finite"),
]


def of(kind: Any, default: Any = 0.0, **facts: Any) -> Declared:
    return Declared("x", default, kind, setting(**facts))


@pytest.mark.parametrize(("limits", "allowed", "refused", "words"), LIMITS)
def test_limits_of_finite_numbers(code_of, limits, allowed, refused, words):
    declaration = of(float, **limits)
    assert declaration.allowed == words
    for value in allowed:
        declaration.check("x", value)
    for value in [*refused, math.nan, INFINITY, -INFINITY]:
        assert code_of(lambda value=value: declaration.check("x", value)) == "x"


@pytest.mark.parametrize(
    ("declaration", "value", "line"),
    [
        (of(float, gt=0), -1.0, "x is -1.0; expected a number above 0"),
        (of(float, gt=0), "fast", "x is 'fast'; expected a number above 0"),
        (of(float, gt=0), INFINITY, "x is inf; expected a number above 0 and finite"),
        (of(int, 1, ge=1), 1.5, "x is 1.5; expected an integer, at least 1"),
        (of(int, 1, ge=1), True, "x is True; expected at least 1"),
        (of(bool, True), 1, "x is 1; expected true or false"),
        (of(Literal["a"], "a"), "b", "x is 'b'; expected a"),
        (of(Literal["", "b", "c"], ""), "d", "x is 'd'; expected empty, b or c"),
        (of(PathText, "", form="a file"), "x\0", r"x is 'x\x00'; expected a file"),
        (of(str, ""), 3, "x is 3; expected a string"),
    ],
)
def test_message_has_the_value_and_what_is_allowed(declaration, value, line):
    with pytest.raises(SettingsError) as caught:
        declaration.check("x", value)
    assert (str(caught.value), caught.value.code) == (line, "x")


def test_path_may_be_missing_but_must_be_possible(tmp_path):
    assert all(is_possible(name) for name in ("", "nothing/here", "~", str(tmp_path)))
    assert not any(map(is_possible, ("~nobody-has-it/x", "a" * 5000, "x\0y")))


# Declarations


class Parent:
    name: ClassVar[str] = "parent"

    def __init__(
        self,
        position: int = 0,
        *,
        rate: Annotated[float, RATE] = 0.5,
        kind: Annotated[Literal["a", "b"], setting()] = "a",
    ) -> None:
        self.position = position
        self.rate = rate
        self.kind = kind
        validate(self)


class Child(Parent):
    def __init__(
        self,
        *,
        rate: Annotated[float, RATE] = 0.75,
        more: Annotated[bool, setting()] = True,
        **parent: Any,
    ) -> None:
        super().__init__(rate=rate, **parent)
        self.more = more


class Alike(Child):
    """Declares no further settings."""


class Closed(Parent):
    """Takes none of its parent's arguments."""

    def __init__(self, *, more: Annotated[bool, setting()] = True) -> None:
        super().__init__(rate=1.0)
        self.more = more


class Fixed(Parent):
    """Has a rate that is an argument, but not a setting."""

    def __init__(self, *, rate: float = 1.0, **parent: Any) -> None:
        super().__init__(rate=rate, **parent)


class Whole:
    """Takes all of its settings as one object."""

    settings_type = MoreSteps

    def __init__(self, name: str, settings: MoreSteps, size: int = 0) -> None:
        self.name, self.settings, self.size = name, settings, size


def values_of(maker: Any) -> dict[str, Any]:
    return {name: setting.default for name, setting in declared(maker).items()}


def test_a_dataclass_declares_its_fields_and_those_of_its_bases():
    assert values_of(SGDOptimizer) == {"step-size": 0.5}
    assert values_of(MoreSteps) == {"step-size": 0.25, "num-steps": 7}
    assert declared(MoreSteps)["num-steps"].argument == "num_steps"


def test_class_that_forwards_arguments_declares_those_of_its_bases():
    assert values_of(Parent) == {"rate": 0.5, "kind": "a"}
    # Child overrides the default of its parent.
    assert values_of(Child) == {"rate": 0.75, "kind": "a", "more": True}
    assert values_of(Alike) == values_of(Child)


def test_arguments_that_are_not_forwarded_or_no_settings_are_not_declared():
    assert values_of(Closed) == {"more": True}
    assert values_of(Fixed) == {"kind": "a"}
    settings = {"rate": 0.1, "kind": "b", "more": False}
    closed, fixed = build(Closed, settings), build(Fixed, settings)
    assert (closed.rate, closed.kind, closed.more) == (1.0, "a", False)
    assert (fixed.rate, fixed.kind) == (1.0, "b")


def test_class_with_a_settings_type_declares_its_settings():
    assert declared(Whole) == declared(MoreSteps)
    assert declared(partial(Whole, "name")) == declared(MoreSteps)


def test_functions_and_partials():
    assert values_of(function) == {"rate": 0.5, "max-size": 8}
    assert values_of(partial(function, 3)) == values_of(function)
    # Keyword arguments of a partial are new defaults, and remain settings.
    assert values_of(partial(function, max_size=9)) == {"rate": 0.5, "max-size": 9}
    assert values_of(partial(MoreSteps, 0.5)) == {"num-steps": 7}


def test_callables_without_settings_declare_nothing():
    for maker in (object, dict.fromkeys, lambda x, *y, **z: None):
        assert declared(maker) == {}


def test_a_setting_without_a_default_is_an_error(code_of):
    def maker(rate: Annotated[float, RATE]) -> None:
        pass

    assert code_of(lambda: declared(maker)) == "rate"


@pytest.mark.parametrize("default", [None, [1]])
def test_invalid_default_is_an_error(code_of, default):
    def maker(rate: Annotated[Any, RATE] = default) -> None:
        pass

    assert code_of(lambda: declared(maker)) == "rate"


def test_integer_default_of_a_float_is_converted():
    def maker(rate: Annotated[float, RATE] = 1, count: Annotated[int, RATE] = 1):
        pass

    values = [setting.default for setting in declared(maker).values()]
    assert list(map(type, values)) == [float, int]
    assert resolve({"rate": 0.5}, lambda _: [maker])["rate"] == 0.5


POSTPONED = """
from __future__ import annotations
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated
from flwr_frl.common.settings import Checked, setting

if TYPE_CHECKING:
    from nowhere import Thing

Rate = Annotated[float, setting(gt=0, le=1)]

def function(thing: Thing | None = None, rate: Rate = 1.0):
    return rate

@dataclass
class Data(Checked):
    rate: float = setting(0.5, gt=0, le=1)

class Parent:
    def __init__(self, *, rate: Annotated[float, setting(gt=0, le=1)] = 0.5):
        self.rate = rate
"""


HEIRS = """
from dataclasses import dataclass
from postponed import Data, Parent

@dataclass
class MoreData(Data):
    other: int = 1

class Child(Parent):
    def __init__(self, **parent):
        super().__init__(**parent)
"""


def test_postponed_annotations_are_resolved_in_their_module(write_module):
    postponed = write_module("postponed", POSTPONED)
    heirs = write_module("heirs", HEIRS.replace("postponed", postponed))
    paths = [f"{postponed}:{name}" for name in ("function", "Data", "Parent")]
    # Modules that lack the names used in the annotations
    paths += [f"{heirs}:{name}" for name in ("MoreData", "Child")]
    for path in paths:
        settings = declared(load(path, "maker"))
        assert list(settings) == ["rate"], path
        assert (settings["rate"].kind, settings["rate"].facts) == (float, RATE), path


# Building


def test_build_uses_only_declared_settings():
    settings = {"rate": 0.25, "position": 9, "plain": 9, "num-clients": 9, "x": 1}
    assert build(function, settings, num_clients=2) == (2, 0.25, 8)
    assert build(partial(function, 5), {"max-size": 3}) == (5, 0.5, 3)
    assert build(partial(function, max_size=3), {}, num_clients=1) == (1, 0.5, 3)
    child = build(Child, settings, position=4)
    assert (child.position, child.rate, child.kind, child.more) == (4, 0.25, "a", True)
    assert build(SGDOptimizer, settings) == SGDOptimizer()
    assert build(MoreSteps, {"num-steps": 3, "step-size": 1.0}) == MoreSteps(
        1.0, 3, 4, 3
    )


def test_build_creates_the_settings_object_of_a_class():
    instance = build(partial(Whole, "me"), {"num-steps": 2, "size": 5}, size=6)
    assert (instance.name, instance.size) == ("me", 6)
    assert instance.settings == MoreSteps(num_steps=2)


@pytest.mark.parametrize(
    ("maker", "name", "value"),
    [
        (SGDOptimizer, "step-size", 0.0),
        (SGDOptimizer, "step-size", math.nan),
        (MoreSteps, "num-steps", 0),
        (Child, "rate", 1.5),
        (Child, "kind", "c"),
        (partial(function, 1), "max-size", 0),
        (partial(Whole, "me"), "step-size", -1.0),
    ],
)
def test_build_rejects_values_out_of_range(code_of, maker, name, value):
    assert code_of(lambda: build(maker, {name: value})) == name
    if maker in (SGDOptimizer, MoreSteps, Child):
        argument = name.replace("-", "_")
        assert code_of(lambda: maker(**{argument: value})) == name


def test_validate_checks_only_attributes_that_are_set(code_of):
    instance = object.__new__(Child)
    validate(instance)
    instance.rate = 0.5
    validate(instance)
    # Attributes that are not settings are not checked.
    instance.position = "anything"
    validate(instance)
    instance.kind = "c"
    assert code_of(lambda: validate(instance)) == "kind"


# Settings in pyproject.toml


def test_defaults_equal_those_of_pyproject():
    config = tomllib.loads(PYPROJECT.read_text())["tool"]["flwr"]["app"]["config"]
    assert dict(defaults()) == config
    assert resolve({}) == config


def everything_declared() -> list[tuple[Any, str, Declared]]:
    makers: dict[Any, None] = dict.fromkeys(
        (RunSettings, DeviceSettings, SpeedSettings, AdapterSettings)
    )
    makers |= dict.fromkeys(TASKS.values())
    tasks = ("digits", "linear", "transfer", "qcqp")
    for algorithm, task in product(ALGORITHMS, tasks):
        choice = {**defaults(), "algorithm": algorithm, "task": task}
        makers |= dict.fromkeys(owners(choice))
    return [(m, n, setting) for m in makers for n, setting in declared(m).items()]


def test_pyproject_lists_all_declared_settings_and_defaults():
    settings: dict[str, Any] = {}
    for maker, name, each in everything_declared():
        value = each.default
        # All declarations of a setting have the same default.
        first = settings.setdefault(name, value)
        assert (type(value), value) == (type(first), first), (maker, name)
        each.check(name, value)
    typed = {name: (type(value), value) for name, value in settings.items()}
    listed = {name: (type(value), value) for name, value in defaults().items()}
    assert typed == listed


def test_pyproject_has_the_sections_and_order_of_the_settings_page():
    text = PYPROJECT.read_text(encoding="utf-8")
    assert text == settings_page.with_settings(text), "run `python -m docs.settings`"
    _, _, table = text.partition("[tool.flwr.app.config]\n")
    lines = re.findall(r"^# (.+)$|^([\w-]+) = ", table.partition("\n[")[0], re.M)
    page = settings_page.PAGE.read_text(encoding="utf-8").replace("## ", "# ")
    rows = re.findall(r"^# (.+)$|^\| `([\w-]+)` \|", page, re.M)[1:]
    assert lines == [(title.replace("`", ""), name) for title, name in rows]


@pytest.mark.parametrize(
    ("maker", "name", "table"),
    [
        (CompressionSettings, "compressor", COMPRESSORS),
        (GraphStrategy, "mixing", MIXING),
    ],
)
def test_choices_are_the_keys_of_the_table_of_their_code(maker, name, table):
    assert set(get_args(declared(maker)[name].kind)) == set(table)


@dataclass
class Plain:
    """Settings of a client, without a declaration."""

    mu: float = 0.1


class WithSettings:
    settings_type = Plain


def of_a_task(many: int = 2):
    return many


@pytest.mark.parametrize(
    ("name", "maker", "shown"),
    [("mu", WithSettings, "Plain"), ("many", of_a_task, "of_a_task")],
)
def test_an_argument_without_an_annotated_type_is_no_setting(name, maker, shown):
    with pytest.raises(SettingsError, match=f"argument of {shown}, but no") as caught:
        resolve({name: 1}, lambda _: [maker])
    assert caught.value.code == name


# Fields of clients and strategies


def declare(base: type, field: str, annotation: Any, value: Any) -> type:
    annotations = {} if annotation is None else {field: annotation}
    return type("Mine", (base,), {field: value, "__annotations__": annotations})


@pytest.mark.parametrize(
    ("base", "field", "annotation", "value", "line"),
    [
        (Client, "pace", None, setting(3), "has no annotation; write pace: int = "),
        (Strategy, "pace", None, setting(3), "has no annotation; write pace: int = "),
        (Client, "momentum", None, 0.1, "is no setting; write momentum: float = "),
        (Strategy, "seed", int, 3, "is no setting; write seed: int = setting(3)"),
        (Client, "fit", int, setting(3), "is also an attribute; write fit_: int"),
        (
            Strategy,
            "aggregate",
            int,
            setting(3),
            "is also an attribute; write aggregate_",
        ),
    ],
)
def test_field_that_is_no_setting_is_one_line(base, field, annotation, value, line):
    with pytest.raises(SettingsError) as caught:
        declare(base, field, annotation, value)
    assert str(caught.value).startswith(f"Mine.{field} {line}")
    assert caught.value.code == field


def test_settings_of_a_class_that_is_neither_client_nor_strategy_are_refused():
    class Mixin:
        pace: int = setting(3)

    with pytest.raises(SettingsError, match="Mixin must be a subclass of Client or"):
        type("Mine", (Mixin, Client), {})
