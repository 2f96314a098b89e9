"""Colours and line styles of methods."""

from flwr_frl.results.figures import COLOURS, figure_of, looks
from flwr_frl.strategies.algorithms import ALGORITHMS


def test_methods_have_distinct_looks_that_do_not_depend_on_others():
    names = ["fedrep", "flute", *(f"custom-{i:02}" for i in range(30))]
    found = looks(names)
    assert len(set(found.values())) == len(names)
    assert found == looks(names[::-1])
    often = ["fedrep", "fedavg", "flute", "local", "fedper", "ditto", "srpfl"]
    alone = [looks([name])[name] for name in often]
    assert [looks(often)[name] for name in often] == alone
    assert alone[0] == (COLOURS[0], "-")
    # More than there are colours and line styles
    assert looks(ALGORITHMS).keys() == ALGORITHMS.keys()


def test_equal_curves_have_other_markers():
    runs = {name: [[{"round": 1, "accuracy": 0.5}]] for name in ("fedavg", "fedprox")}
    first, second = figure_of(runs, 3.3).axes[0].lines
    assert [first.get_label(), second.get_label()] == ["FedAvg", "FedProx"]
    assert first.get_marker() != second.get_marker()
