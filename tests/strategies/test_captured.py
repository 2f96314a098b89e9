"""Captured steps, with a stand-in for CUDA graphs, equal the steps themselves."""

import gc
import logging
from weakref import ref

import numpy as np
import pytest
import torch
from cohort_tasks import N
from outcomes import assert_same, outcome

from flwr_frl.common.run_cache import begin_run
from flwr_frl.task.training import captured, stacked

counts = {"graphs": 0, "replays": 0}


def counted(step):
    """Capture a step like a GPU, and count graphs and steps that are replayed."""
    step()
    counts["graphs"] += 1

    def replay():
        counts["replays"] += 1
        step()

    return replay


def inexact(step):
    """Change the last bit of a number that the step has changed."""

    def replay():
        step()
        sums = step.args[-1]
        sums.copy_(torch.nextafter(sums, sums + 1))

    return replay


def refusing(step):
    step()
    raise RuntimeError("operation not permitted when stream is capturing")


@pytest.fixture
def use(monkeypatch):
    def use(kind):
        monkeypatch.setitem(captured.GRAPHS, "cpu", kind)
        counts.update(graphs=0, replays=0)
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
    "gossip": ("dpsgd", {}),
    "gossip of vectors": ("squarm-sgd", {}),
    "user's module": ("fedavg", {"task": "cohort_tasks:centred"}),
}


@pytest.mark.parametrize("case", CASES)
def test_captured_steps_equal_the_steps_themselves(case, use, monkeypatch):
    algorithm, options = CASES[case]
    monkeypatch.setattr(stacked, "MOST_ON_CPU", 1 if case == "padded" else 2**16)
    plain = outcome(algorithm, N, rounds=3, **options)
    use(counted)
    first = outcome(algorithm, N, rounds=3, **options)
    assert_equal(first, plain)
    # Graphs of the first round are replayed in later ones.
    graphs = counts["graphs"]
    assert counts["replays"] >= 3 * graphs > 0
    assert_equal(outcome(algorithm, N, rounds=3, **options), plain)
    assert counts["graphs"] == graphs


def test_a_cohort_of_one_is_captured_only_where_steps_are(use):
    alone = {each: outcome(each, "off") for each in ("fedavg", "scaffold")}
    for each, expected in alone.items():
        assert_equal(outcome(each, 1), expected)
    use(counted)
    for each, expected in alone.items():
        assert_same(outcome(each, 1), expected)
    assert counts["replays"] > counts["graphs"] > 0


@pytest.mark.parametrize(
    ("kind", "reason"), [(inexact, "other results"), (refusing, "not permitted")]
)
def test_steps_go_on_without_a_graph_that_fails_or_differs(kind, reason, use, caplog):
    plain = outcome("fedavg", N, rounds=3)
    use(kind)
    with caplog.at_level(logging.WARNING, "task"):
        assert_equal(outcome("fedavg", N, rounds=3), plain)
    lines = [each.getMessage() for each in caplog.records if each.name == "task"]
    assert [reason in line for line in lines] == [True]


def test_graphs_are_replaced_with_the_learning_rate_and_released(use):
    use(counted)
    for k in range(3):
        outcome("fedavg", N, rounds=1, **{"learning-rate": 0.01 * (1 + k)})
        outcome("fedrep", N, rounds=1, **{"learning-rate": 0.01 * (1 + k)})
    # One for all parameters, one for the head and one for the representation.
    assert captured._kept.cache_info().currsize == 3
    tensors = [t for t in gc.get_objects() if isinstance(t, captured.Steps)]
    kept = [ref(each) for each in tensors]
    del tensors
    gc.disable()
    captured.forget()
    gc.enable()
    assert kept
    assert not any(each() for each in kept)
