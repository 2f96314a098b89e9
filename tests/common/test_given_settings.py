"""Resolving settings: unknown names, import paths, and one-line messages."""

import pickle
import re
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from declarations import COUNT, PYPROJECT, MoreSteps, function

from flwr_frl.common.settings import (
    Declared,
    ResourceError,
    SettingsError,
    defaults,
    is_path,
    load,
    need,
    require,
    resolve,
    setting,
    unknown,
)


def test_overrides_change_only_what_they_name():
    settings = resolve({"seed": 5, "momentum": 0.25})
    changed = {n for n in settings if settings[n] != defaults()[n]}
    assert changed == {"seed", "momentum"}
    assert resolve({})["seed"] == defaults()["seed"]


def test_int_is_accepted_for_a_float():
    value = resolve({"learning-rate": 1})["learning-rate"]
    assert value == 1.0
    assert type(value) is float


def test_unknown_names_raise_with_the_most_similar_one(code_of):
    for name, similar in (("sede", "seed"), ("batch_size", "batch-size")):
        assert code_of(lambda name=name: resolve({name: 1})) == "setting"
        with pytest.raises(SettingsError, match=f"did you mean '{similar}'"):
            resolve({name: 1})


@pytest.mark.parametrize("unknown_names", ["refuse", "keep"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", 1.5),
        ("seed", True),
        ("augment", 1),
        ("task", 3),
        ("momentum", "0.5"),
        ("momentum", True),
        ("seed", 2**63),
    ],
)
def test_values_of_another_type_raise(code_of, name, value, unknown_names):
    given = {name: value}
    assert code_of(lambda: resolve(given, unknown_names=unknown_names)) == name


def test_unknown_names_may_be_kept_or_ignored(code_of, caplog):
    given = {"sede": 1, "seed": 3}
    kept, ignored = (resolve(given, unknown_names=do) for do in ("keep", "ignore"))
    assert kept == {**defaults(), "seed": 3, "sede": 1}
    assert ignored == {**defaults(), "seed": 3}
    assert "does not know and ignores: sede" in caplog.text
    large = {"sede": -(2**63)}
    assert code_of(lambda: resolve(large, unknown_names="keep")) == "sede"


def test_resolved_settings_are_read_only():
    settings: Any = resolve({})
    with pytest.raises(TypeError):
        settings["seed"] = 1


def test_guests_add_their_settings(code_of):
    def guests(settings):
        return MoreSteps, function

    added = {"step-size": 0.25, "num-steps": 7, "rate": 0.5, "max-size": 8}
    assert resolve({}, guests) == {**defaults(), **added}
    settings = resolve({"num-steps": 9, "rate": 1}, guests)
    assert (settings["num-steps"], settings["rate"]) == (9, 1.0)
    assert type(settings["rate"]) is float
    assert code_of(lambda: resolve({"num-steps": 1.0}, guests)) == "num-steps"
    with pytest.raises(SettingsError, match="did you mean 'num-steps'"):
        resolve({"num-step": 1}, guests)
    # The settings of guests are unknown in other calls.
    with pytest.raises(SettingsError, match="unknown setting 'num-steps'"):
        resolve({"num-steps": 9})


def test_two_defaults_of_a_setting_are_an_error(code_of):
    @dataclass
    class Guest:
        seed: Annotated[int, COUNT] = 77

    with pytest.raises(SettingsError, match="default 77, but elsewhere it is 0") as e:
        resolve({}, lambda _: [Guest])
    assert e.value.code == "seed"

    @dataclass
    class Text:
        seed: Annotated[str, setting()] = "0"

    assert code_of(lambda: resolve({}, lambda _: [Text])) == "seed"

    @dataclass
    class Same:
        seed: Annotated[int, COUNT] = 0

    assert resolve({}, lambda _: [Same]) == defaults()


# Import paths


def test_an_import_path_is_loaded():
    assert is_path("package.module:name")
    assert not is_path("fedrep")
    assert load("flwr_frl.common.settings:Declared", "task") is Declared
    assert load("flwr_frl.common.settings:Declared.check", "task") is Declared.check


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("no_such_module:f", "'no_such_module'; install it, or .* that contains it"),
        ("task.no_such:f", "No module named 'task.no_such'"),
        ("flwr_frl.common.settings:Declare", r"has no 'Declare'; .* 'Declared'\?"),
        ("flwr_frl.common.settings:Declared.x", "has no 'Declared.x'"),
        ("flwr_frl.common.settings:", "has no ''"),
        (":f", "Empty module name"),
    ],
)
def test_path_that_cannot_be_imported_is_an_error(path, reason):
    with pytest.raises(SettingsError, match=f"{reason}$") as error:
        load(path, "task")
    assert error.value.code == "task"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_mod"),
        ("raise RuntimeError('first line\\n  second line')", "first line second line"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_error_in_an_imported_module_is_reported_in_one_line(
    write_module, text, reason
):
    name = write_module("broken_module", text)
    with pytest.raises(SettingsError, match=re.escape(reason)) as error:
        load(f"{name}:f", "algorithm")
    assert str(error.value).startswith(f"algorithm '{name}:f' cannot be imported: ")
    assert "\n" not in str(error.value)
    assert error.value.__cause__ is not None


def test_pickled_errors_keep_their_code():
    error = pickle.loads(pickle.dumps(ResourceError("no GPU", "device")))
    assert isinstance(error, ResourceError)
    assert (str(error), error.code) == ("no GPU", "device")


def test_code_is_the_setting_with_which_a_message_begins():
    codes = {
        "weights is 'a.pth'; there is no such file": "weights",
        "resume: there is no checkpoint": "resume",
        "there is nothing to train on": "settings",
        "it is none": "settings",
        "client 'a' is unknown": "settings",
    }
    assert {line: SettingsError(line).code for line in codes} == codes
    assert SettingsError("weights is 'a.pth'", "model").code == "model"


# One-line messages


def test_require_and_unknown(code_of):
    require(True, "x", 1, "anything")
    with pytest.raises(SettingsError, match=r"^x is 'a'; expected a number$") as e:
        require(False, "x", "a", "a number")
    assert (e.value.code, unknown("fruit", "x", []).code) == ("x", "fruit")
    assert code_of(lambda: require(False, "a sum of x", 3, "less")) == "settings"
    assert code_of(lambda: require(False, "a sum of x", 3, "less", "x")) == "x"
    assert code_of(lambda: need("no_such_package", "x", "y")) == "missing-package"
    assert str(unknown("fruit", "aple", ["pear", "apple"])) == (
        "unknown fruit 'aple'; did you mean 'apple'? known: apple, pear"
    )
    assert str(unknown("fruit", "xyz", ["pear"])) == "unknown fruit 'xyz'; known: pear"


def test_more_than_60_names_are_not_listed():
    names = [f"name-{i}" for i in range(61)]
    assert "name-9" not in str(unknown("setting", "zzz", names))
    assert str(unknown("setting", "zzz", names[1:])).endswith(", name-9")
    assert (PYPROJECT.parent / "docs" / "settings.md").is_file()
