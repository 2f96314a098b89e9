"""A page's run counts as finished only if it is what would be run, and sound."""

from importlib import import_module
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def runs(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("runs")


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ({}, True),
        ({"nc-weight": 0.25}, True),
        ({"data-dir": "elsewhere", "evaluate-every": 7}, True),
        ({"nc-weight": 0.5}, False),
        ({"seed": 1}, False),
    ],
)
def test_a_run_is_another_if_a_setting_is(runs, other, same):
    own = {"seed": 0, "num-clients": 100}
    assert runs.DEFAULTS["nc-weight"] == 0.25
    assert runs.alike(own, {**own, **other}) is same


def test_a_run_that_failed_or_is_of_changed_code_is_made_again(runs):
    sound = {"accuracy": 0.5, "commit": "0123456789"}
    assert runs.kept(sound) == sound
    assert runs.kept(None) is None
    assert runs.kept({**sound, "failed": "ValueError"}) is None
    assert runs.kept({**sound, "commit": "0123456789-dirty"}) is None
