"""Settings: names, types and one-line errors."""

import re
import tomllib
from pathlib import Path

import pytest

from task.settings import SettingsError, defaults, require, resolve, unknown

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_defaults_are_those_of_pyproject():
    config = tomllib.loads(PYPROJECT.read_text())["tool"]["flwr"]["app"]["config"]
    assert dict(defaults()) == config
    assert resolve({}) == config


def test_overrides_change_only_what_they_name():
    settings = resolve({"seed": 5, "momentum": 0.25})
    changed = {n for n in settings if settings[n] != defaults()[n]}
    assert changed == {"seed", "momentum"}
    assert resolve({})["seed"] == defaults()["seed"]


def test_an_int_will_do_for_a_float():
    value = resolve({"learning-rate": 1})["learning-rate"]
    assert value == 1.0
    assert type(value) is float


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ({"sede": 1}, "unknown setting 'sede'; did you mean 'seed'? known: "),
        ({"batch_size": 1}, "unknown setting 'batch_size'; did you mean 'batch-size'?"),
        ({"seed": 1.5}, "seed is 1.5; it must be of type int"),
        ({"seed": True}, "seed is True; it must be of type int"),
        ({"augment": 1}, "augment is 1; it must be of type bool"),
        ({"task": 3}, "task is 3; it must be of type str"),
        ({"momentum": "0.5"}, "momentum is '0.5'; it must be of type float"),
        ({"momentum": True}, "momentum is True; it must be of type float"),
    ],
)
def test_wrong_names_and_types(overrides, line):
    with pytest.raises(SettingsError, match=re.escape(line)):
        resolve(overrides)


def test_require_and_unknown():
    require(True, "x", 1, "anything")
    with pytest.raises(SettingsError, match=r"^x is 'a'; it must be a number$"):
        require(False, "x", "a", "a number")
    assert str(unknown("fruit", "aple", ["pear", "apple"])) == (
        "unknown fruit 'aple'; did you mean 'apple'? known: apple, pear"
    )
    assert str(unknown("fruit", "xyz", ["pear"])) == "unknown fruit 'xyz'; known: pear"
