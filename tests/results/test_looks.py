"""Colours and line styles of methods."""

from flwr_frl.results.figures import COLOURS, equal_curves, figure_of, looks
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


def test_a_curve_that_is_hidden_by_an_equal_one_is_dashed_and_named():
    curves = {"fedavg": ([1], [0.5], [0]), "local": ([1], [0.25], [0])}
    curves |= {"fedprox": ([1], [0.5], [0]), "fedrep": ([], [], []), "x": ([], [], [])}
    assert equal_curves(curves) == {"fedprox": "fedavg"}
    runs = {name: [[{"round": 1, "accuracy": 0.5}]] for name in ("fedavg", "fedprox")}
    lines = figure_of(runs, 3.3).axes[0].lines
    assert [line.get_label() for line in lines] == ["FedAvg", "FedProx = FedAvg"]
    assert [line.get_linestyle() for line in lines] == ["-", "--"]
    assert lines[0].get_marker() != lines[1].get_marker()
