"""Colours and line styles of methods."""

from flwr_frl.results.figures import figure_of, looks
from flwr_frl.strategies.algorithms import ALGORITHMS


def test_methods_have_distinct_looks_in_any_order():
    names = ["fedrep", "flute", *(f"custom-{i:02}" for i in range(30))]
    found = looks(names)
    assert len(set(found.values())) == len(names)
    assert found == looks(names[::-1])
    # More than there are colours and line styles
    assert looks(ALGORITHMS).keys() == ALGORITHMS.keys()


def test_equal_curves_have_other_markers():
    runs = {name: [[{"round": 1, "accuracy": 0.5}]] for name in ("fedavg", "fedprox")}
    first, second = figure_of(runs, 3.3).axes[0].lines
    assert [first.get_label(), second.get_label()] == ["FedAvg", "FedProx"]
    assert first.get_marker() != second.get_marker()
