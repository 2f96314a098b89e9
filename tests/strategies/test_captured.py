"""Captured steps, with a stand-in for CUDA graphs, equal the steps themselves."""

import logging

import numpy as np
import pytest
import torch
from cohort_tasks import N
from outcomes import outcome

from flwr_frl.common.run_cache import begin_run
from flwr_frl.task.training import captured, stacked
from flwr_frl.task.training.captured import PythonGraph


class Counted(PythonGraph):
    """Counts graphs, and steps that are replayed."""

    graphs = replays = 0

    def __init__(self, step):
        step()
        Counted.graphs += 1
        self.step = step

    def replay(self):
        Counted.replays += 1
        self.step()


class Inexact(Counted):
    """Changes the last bit of a number that the step has changed."""

    def replay(self):
        super().replay()
        sums = self.step.__self__.sums
        sums.copy_(torch.nextafter(sums, sums + 1))


class Refusing(Counted):
    def __init__(self, step):
        step()
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.fixture
def use(monkeypatch):
    def use(kind):
        monkeypatch.setitem(captured.GRAPHS, "cpu", kind)
        Counted.graphs = Counted.replays = 0
        begin_run()

    yield use
    begin_run()


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


CASES = {
    "padded": ("fedrep", {}),
    "one batch": ("fedavg", {"batch-size": 100}),
    "statistics": ("fedavg", {"task": "cohort_tasks:normalised", "batch-size": 3}),
    "correction": ("scaffold", {}),
    "anchors": ("ditto", {}),
    "moments": ("fedper", {"optimizer": "adamw", "max-gradient-norm": 0.5}),
    "bfloat16": ("fedavg", {"bfloat16": True}),
    "user's module": ("fedavg", {"task": "cohort_tasks:centred"}),
}


@pytest.mark.parametrize("case", CASES)
def test_captured_steps_equal_the_steps_themselves(case, use, monkeypatch):
    algorithm, options = CASES[case]
    monkeypatch.setattr(stacked, "MOST_ON_CPU", 1 if case == "padded" else 2**16)
    plain = outcome(algorithm, N, rounds=3, **options)
    use(Counted)
    first = outcome(algorithm, N, rounds=3, **options)
    assert_equal(first, plain)
    # Graphs of the first round are replayed in later ones.
    graphs = Counted.graphs
    assert Counted.replays > 3 * graphs > 0
    assert_equal(outcome(algorithm, N, rounds=3, **options), plain)
    assert Counted.graphs == graphs


@pytest.mark.parametrize(
    ("kind", "reason"), [(Inexact, "other results"), (Refusing, "not permitted")]
)
def test_steps_go_on_without_a_graph_that_fails_or_differs(kind, reason, use, caplog):
    plain = outcome("fedavg", N, rounds=3)
    use(kind)
    with caplog.at_level(logging.WARNING, "task"):
        assert_equal(outcome("fedavg", N, rounds=3), plain)
    lines = [each.getMessage() for each in caplog.records if each.name == "task"]
    assert [reason in line for line in lines] == [True]
