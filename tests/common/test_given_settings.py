"""Resolving settings: unknown names, import paths, and one-line messages."""

import pickle
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from declarations import COUNT, MoreSteps, function
from refusals import assert_says, code_of, refusal

from flwr_frl.common.errors import ResourceError, SettingsError, need, require, unknown
from flwr_frl.common.settings import Declared, defaults, is_path, load, resolve


def test_unknown_names_raise_with_the_most_similar_one():
    for name, similar in (("sede", "seed"), ("batch_size", "batch-size")):
        error = refusal(resolve, {name: 1})
        assert error.code == "setting"
        assert f"did you mean '{similar}'" in str(error)


@pytest.mark.parametrize("strict", [True, False])
def test_values_of_another_type_raise(strict):
    for name, value in (
        *(("seed", 1.5), ("seed", True), ("seed", 2**63), ("augment", 1)),
        *(("task", 3), ("momentum", "0.5"), ("momentum", True)),
    ):
        assert code_of(resolve, {name: value}, strict=strict) == name


def test_unknown_names_may_be_kept():
    kept = resolve({"sede": 1, "seed": 3}, strict=False)
    assert kept == {**defaults(), "seed": 3, "sede": 1}
    assert code_of(resolve, {"sede": -(2**63)}, strict=False) == "sede"


def test_home_is_expanded_in_the_folders_of_results(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    settings = resolve({"output": "~/out", "resume": "~/out"})
    assert settings["output"] == settings["resume"] == "/home/me/out"


def test_a_process_resolves_settings_once_and_its_workers_never():
    settings = resolve({"seed": 3})
    assert resolve(settings) is settings
    sent = pickle.loads(pickle.dumps(settings))
    assert (resolve(sent) is sent, sent, hash(sent)) == (True, settings, hash(settings))


def test_guests_add_their_settings():
    def guests(settings):
        return MoreSteps, function

    added = {"step-size": 0.25, "num-steps": 7, "rate": 0.5, "max-size": 8}
    assert resolve({}, guests) == {**defaults(), **added}
    settings = resolve({"num-steps": 9, "rate": 1}, guests)
    assert (settings["num-steps"], settings["rate"]) == (9, 1.0)
    assert type(settings["rate"]) is float
    assert code_of(resolve, {"num-steps": 1.0}, guests) == "num-steps"
    assert_says("did you mean 'num-steps'", resolve, {"num-step": 1}, guests)
    # The settings of guests are unknown in other calls.
    assert_says("unknown setting 'num-steps'", resolve, {"num-steps": 9})


def test_two_defaults_of_a_setting_are_an_error():
    def guests(kind: type, default: Any):
        annotations = {"seed": Annotated[kind, COUNT]}
        body = {"__annotations__": annotations, "seed": default}
        return lambda _: [dataclass(type("Guest", (), body))]

    for kind, default in ((int, 77), (str, "0")):
        assert code_of(resolve, {}, guests(kind, default)) == "seed"
    assert resolve({}, guests(int, 0)) == defaults()


# Import paths


def test_an_import_path_is_loaded():
    assert is_path("package.module:name")
    assert not is_path("fedrep")
    assert load("flwr_frl.common.settings:Declared", "task") is Declared
    assert load("flwr_frl.common.settings:Declared.check", "task") is Declared.check


@pytest.mark.parametrize(
    ("path", "text", "reason"),
    [
        ("no_such_module:f", "", "No module named 'no_such_module'"),
        ("broken:Declare", "", "has no attribute 'Declare'"),
        ("broken:", "", "has no attribute ''"),
        (":f", "", "Empty module name"),
        ("broken:f", "\nraise RuntimeError('one\\n  two')", "RuntimeError: one two"),
        ("broken:f", "def f(:", "SyntaxError: invalid syntax"),
    ],
)
def test_path_that_cannot_be_imported_is_an_error(write_module, path, text, reason):
    module = write_module("broken_module", text)
    path = path.replace("broken", module)
    error = refusal(load, path, "task")
    line = f"task {path!r} cannot be imported: "
    assert (error.code, str(error).startswith(line)) == ("task", True)
    assert reason in str(error)
    # An error in the module is named with its place.
    place = {"RuntimeError": ".py:2)", "SyntaxError": ".py, line 1)"}
    ending = place.get(reason.split(":")[0])
    assert not ending or str(error).endswith(module + ending)
    assert error.__cause__ is not None


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


def test_require_and_unknown():
    require(True, "x", 1, "anything")
    error = refusal(require, False, "x", "a", "a number")
    assert (str(error), error.code) == ("x is 'a'; expected a number", "x")
    assert code_of(require, False, "a sum of x", 3, "less") == "settings"
    assert code_of(require, False, "a sum of x", 3, "less", "x") == "x"
    assert code_of(need, "no_such_package", "x", "y") == "missing-package"
    error = unknown("fruit", "aple", ["pear", "apple"])
    line = "unknown fruit 'aple'; did you mean 'apple'? known: apple, pear"
    assert (str(error), error.code) == (line, "fruit")
    assert str(unknown("fruit", "xyz", ["pear"])) == "unknown fruit 'xyz'; known: pear"
