"""Settings: declarations, ranges, names, types and one-line errors."""

import math
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from declarations import RATE, MoreSteps, function
from refusals import code_of, refusal

from flwr_frl.clients.algorithms import owners
from flwr_frl.clients.base import Client
from flwr_frl.clients.device.setup import DeviceSettings
from flwr_frl.common.errors import require
from flwr_frl.common.settings import (
    Declared,
    PathText,
    build,
    declared,
    defaults,
    load,
    setting,
)
from flwr_frl.strategies.algorithms import ALGORITHMS
from flwr_frl.strategies.base import Strategy
from flwr_frl.strategies.grids.speeds import SpeedModel
from flwr_frl.strategies.server.run_settings import RunSettings
from flwr_frl.strategies.server.secure import SecureSettings
from flwr_frl.task.models.adapters import AdapterSettings
from flwr_frl.task.tasks import TASKS

INFINITY = math.inf


# Allowed values

LIMITS = [
    # Limits, and what is allowed and refused.
    ({"gt": 0, "lt": 1}, [1e-300, 0.5], [0.0, -0.0, 1.0, -1.0]),
    ({"gt": 0, "le": 1}, [1e-300, 1, 1.0], [0.0, 1 + 1e-15]),
    ({"ge": 0, "lt": 1}, [0, -0.0, 0.5], [-1e-300, 1, 1.0]),
    ({"ge": 0.5}, [0.5, 10**30, 1e308], [0.499, -5]),
    ({}, [-1e308, 0, 1e308], [True, "1", None]),
]


def of(kind: Any, default: Any = 0.0, **facts: Any) -> Declared:
    about = {"argument": "x", "default": default, "annotation": kind}
    return replace(setting(**facts), **about)


@pytest.mark.parametrize(("limits", "allowed", "refused"), LIMITS)
def test_limits_of_finite_numbers(limits, allowed, refused):
    declaration = of(float, **limits)
    for value in allowed:
        declaration.check("x", value)
    for value in [*refused, math.nan, INFINITY, -INFINITY]:
        assert code_of(declaration.check, "x", value) == "x"


@pytest.mark.parametrize(
    ("declaration", "value", "line"),
    [
        (of(float, gt=0), "fast", "'fast'; expected a number, above 0"),
        (of(float, ge=0, lt=1), 1, "1; expected a number, at least 0 and below 1"),
        (of(int, 1, ge=1), 1.5, "1.5; expected an integer, at least 1"),
        (of(bool, True), 1, "1; expected true or false"),
        (of(Literal["", "b", "c"], ""), "d", "'d'; expected empty, b, c"),
        (of(PathText, "", form="a file"), "x\0", r"'x\x00'; expected a file"),
        (of(str, ""), 3, "3; expected a string"),
    ],
)
def test_message_has_the_value_and_what_is_allowed(declaration, value, line):
    error = refusal(declaration.check, "x", value)
    assert (str(error), error.code) == (f"x is {line}", "x")


# Declarations


class Whole:
    """Takes all of its settings as one object."""

    _settings_type = MoreSteps

    def __init__(self, name: str, settings: MoreSteps, size: int = 0) -> None:
        self.name, self.settings, self.size = name, settings, size


def unused(rate: Annotated[Any, RATE]) -> None:
    """Has a setting without a default."""


@pytest.mark.parametrize(
    ("maker", "values"),
    [
        # Dataclasses have the fields of their bases, too.
        (MoreSteps, {"step-size": 0.25, "num-steps": 7}),
        (Whole, {"step-size": 0.25, "num-steps": 7}),
        (function, {"rate": 0.5, "max-size": 8}),
        # Keyword arguments of a partial are new defaults, and remain settings.
        (partial(function, max_size=9), {"rate": 0.5, "max-size": 9}),
        (partial(MoreSteps, 0.5), {"num-steps": 7}),
        *((each, {}) for each in (object, dict.fromkeys, lambda x, *y, **z: None)),
    ],
)
def test_declared_settings_and_their_defaults(maker, values):
    found = {name: setting.default for name, setting in declared(maker).items()}
    assert found == values


def test_a_setting_needs_a_valid_default():
    for maker in (unused, partial(unused, rate=None), partial(unused, rate=[1])):
        assert code_of(declared, maker) == "rate"


POSTPONED = """
from __future__ import annotations
from dataclasses import dataclass
from typing import Annotated
from flwr_frl.common.settings import Checked, setting

Rate = Annotated[float, setting(gt=0, le=1)]

def function(rate: Rate = 1):
    return rate

@dataclass
class Data(Checked):
    rate: float = setting(0.5, gt=0, le=1)
"""
# A module that lacks the names used in the annotations
HEIR = """
from dataclasses import dataclass
from {} import Data

@dataclass
class MoreData(Data):
    other: int = 1
"""


def test_postponed_annotations_are_resolved_in_their_module(write_module):
    postponed = write_module("postponed", POSTPONED)
    heir = write_module("heir", HEIR.format(postponed))
    for path in (f"{postponed}:function", f"{postponed}:Data", f"{heir}:MoreData"):
        ((name, declaration),) = declared(load(path, "maker")).items()
        assert (name, declaration.kind) == ("rate", float)
        assert declaration.limits == RATE.limits
        # Integer defaults are converted.
        assert type(declaration.default) is float


# Building


def test_build_uses_only_declared_settings():
    settings = {"rate": 0.25, "position": 9, "plain": 9, "num-clients": 9, "x": 1}
    assert build(function, settings, num_clients=2) == (2, 0.25, 8)
    assert build(partial(function, max_size=3), {}, num_clients=1) == (1, 0.5, 3)
    # The settings object of a class
    whole = build(partial(Whole, "me"), {"num-steps": 2, "size": 5}, size=6)
    assert (whole.name, whole.size) == ("me", 6)
    assert whole.settings == MoreSteps(num_steps=2)


@pytest.mark.parametrize(
    ("maker", "name", "value"),
    [
        (MoreSteps, "step-size", math.nan),
        (partial(function, 1), "max-size", 0),
        (partial(Whole, "me"), "step-size", -1.0),
    ],
)
def test_build_rejects_values_out_of_range(maker, name, value):
    assert code_of(build, maker, {name: value}) == name
    if isinstance(maker, type):
        assert code_of(maker, **{name.replace("-", "_"): value}) == name


# Settings in pyproject.toml


def everything_declared() -> list[tuple[Any, str, Declared]]:
    settings = (
        RunSettings,
        DeviceSettings,
        SpeedModel,
        AdapterSettings,
        SecureSettings,
    )
    makers: dict[Any, None] = dict.fromkeys([*settings, *TASKS.values()])
    tasks = ("digits", "linear", "transfer", "qcqp")
    for algorithm, task in product(ALGORITHMS, tasks):
        choice = {**defaults(), "algorithm": algorithm, "task": task}
        makers |= dict.fromkeys(owners(choice))
    return [(m, n, setting) for m in makers for n, setting in declared(m).items()]


def test_pyproject_lists_all_declared_settings_and_defaults():
    typed: dict[str, Any] = {}
    for maker, name, each in everything_declared():
        value = (type(each.default), each.default)
        # All declarations of a setting have the same default.
        assert typed.setdefault(name, value) == value, (maker, name)
        each.check(name, each.default)
    assert typed == {name: (type(value), value) for name, value in defaults().items()}


# Fields of clients and strategies


def declare(base: type, field: str, annotation: Any, value: Any) -> type:
    annotations = {field: annotation} if annotation else {}
    return type("Mine", (base,), {field: value, "__annotations__": annotations})


THREE = setting(3)


@pytest.mark.parametrize(
    ("base", "field", "annotation", "value"),
    [
        (Client, "pace", None, THREE),
        (Strategy, "pace", None, THREE),
        (Client, "momentum", None, 0.1),
        (Strategy, "seed", int, 3),
    ],
)
def test_field_that_is_no_setting_is_one_line(base, field, annotation, value):
    error = refusal(declare, base, field, annotation, value)
    assert error.code == field


def test_a_long_value_is_shortened_to_one_line():
    error = str(refusal(require, False, "task", [np.zeros(9)] * 30, "short"))
    assert error.startswith("task is a list, [array([0., 0., 0.")
    assert len(error) < 400


def test_an_unknown_limit_of_a_setting_names_the_known_ones():
    assert "known: ge, gt, le, lt" in str(refusal(setting, 3, min=0))
