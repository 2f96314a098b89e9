"""One run of a base algorithm serves all speed models, which change only its clock."""

import pytest

from benchmarks.clocks import set_clock, timed
from benchmarks.derived import time_to
from flwr_frl import simulate
from flwr_frl.strategies.grids.speeds import SpeedModel
from flwr_frl.strategies.server.participation import Participation

CLOCK = ("seconds", "seconds-simulated")


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_other_speeds_change_only_the_clock_of_a_base_algorithm(fraction, tmp_path):
    def rows_with(speed_model):
        settings = {"num_clients": 10, "rounds": 3, "fraction": fraction, "seed": 3}
        settings |= {"output": tmp_path / speed_model, "model": "logistic"}
        settings |= {"speed_model": speed_model, "evaluate_last": 1}
        return simulate("fedrep", "inline", **settings).rows

    fixed, dynamic = rows_with("fixed"), rows_with("dynamic")
    measured = [row["seconds-simulated"] for row in dynamic]
    assert measured != [row["seconds-simulated"] for row in fixed]
    speeds, participation = SpeedModel("dynamic", 10, 3), Participation(fraction, 1, 3)
    set_clock(fixed, speeds, participation)
    assert [row["seconds-simulated"] for row in fixed] == pytest.approx(measured)
    for row, other in zip(fixed, dynamic, strict=True):
        without = [{k: v for k, v in r.items() if k not in CLOCK} for r in (row, other)]
        assert without[0] == without[1]


def test_runs_that_differ_only_in_their_clock_are_carried_out_once(
    tmp_path, monkeypatch
):
    common = {"num-clients": 10, "num-server-rounds": 2, "fraction-train": 0.5}
    common |= {"evaluate-every": 1, "evaluate-last": 1, "model": "logistic", "seed": 3}

    def run(algorithm, speeds, **own):
        settings = {**common, "algorithm": algorithm, "speed-model": speeds, **own}
        return timed(settings, tmp_path / "cell" / algorithm / "0")

    first = run("flanp-ft", "fixed"), run("fedavg-ft", "fixed")
    # Fine-tuned algorithms have a curve, too.
    assert all(len(found["curve"]["time"][0]) == 2 for found in first)
    monkeypatch.setattr("benchmarks.runs.simulate", None)
    other = run("fedavg-ft", "dynamic", **{"communication-time": 10.0})
    assert other["accuracy"] == first[1]["accuracy"]
    assert other["time"] > first[1]["time"] + 20 - 5
    tested = run("fedavg-ft", "fixed", tested="global")
    assert tested["accuracy"] != first[1]["accuracy"]
    # FLANP waits only for the first clients.
    with pytest.raises(RuntimeError):
        run("flanp-ft", "dynamic")


def test_times_to_a_level_are_interpolated_between_tests():
    curve = [[1.0, 3.0], [0.2, 0.6], [1, 2]]
    assert time_to(curve, 0.4) == pytest.approx(2)
    assert time_to(curve, 0.4, per_round=10) == pytest.approx(17)
