"""One run of a base algorithm does for all speed models, which change its clock."""

from argparse import Namespace
from importlib import import_module
from pathlib import Path

import pytest

from flwr_frl import simulate
from flwr_frl.strategies.algorithms import settings_owners
from flwr_frl.strategies.grids.speeds import SpeedModel
from flwr_frl.strategies.server.participation import Participation
from flwr_frl.task.settings import resolve

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
CLOCK = ("seconds", "seconds-simulated")


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_a_base_with_other_speeds_has_another_clock_only(
    fraction, monkeypatch, tmp_path
):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    srpfl_time = import_module("srpfl_time")

    def rows_with(speed_model):
        output = str(tmp_path / speed_model)
        settings = {"num_clients": 10, "rounds": 3, "fraction": fraction, "seed": 3}
        settings |= {"speed_model": speed_model, "output": output}
        return simulate("fedrep", "inline", **settings).rows

    fixed, dynamic = rows_with("fixed"), rows_with("dynamic")
    measured = [row["seconds-simulated"] for row in dynamic]
    assert measured != [row["seconds-simulated"] for row in fixed]
    srpfl_time.set_clock(
        fixed, SpeedModel("dynamic", 10, 3), Participation(fraction, 1, 3)
    )
    assert [row["seconds-simulated"] for row in fixed] == pytest.approx(measured)
    for row, other in zip(fixed, dynamic, strict=True):
        assert {k: v for k, v in row.items() if k not in CLOCK} == {
            k: v for k, v in other.items() if k not in CLOCK
        }


@pytest.mark.parametrize("algorithm", ["fedavg-ft", "flanp-ft"])
def test_fine_tuned_runs_have_a_curve(algorithm, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    srpfl_time = import_module("srpfl_time")
    # What is evaluated in the last round alone elsewhere.
    kind = settings_owners(resolve({"algorithm": algorithm}))[-1]
    monkeypatch.setattr(kind, "traits", kind.traits)
    arguments = Namespace(
        **{"speed_model": "fixed", "fraction": 0.05, "stage": 1, "initial_nodes": 2},
        **{"seed": 0, "name": "", "data_dir": "", "evaluate_every": 1},
        **{"backend": "inline", "output": str(tmp_path)},
        run_config="task='digits' classes-per-client=10",
    )
    made = srpfl_time.run(arguments, algorithm, 2)
    times, accuracies = srpfl_time.curve(made["rows"], 0)
    assert len(times) == len(accuracies) == 2


def test_a_run_on_a_page_is_not_made_again(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    srpfl_time = import_module("srpfl_time")
    monkeypatch.setattr(srpfl_time, "RESULTS", tmp_path)
    monkeypatch.setattr(srpfl_time, "COMMIT", "0123456789")
    arguments = Namespace(
        **{"speed_model": "fixed", "fraction": 0.05, "stage": 1, "initial_nodes": 2},
        **{"seed": 0, "name": "", "data_dir": "", "evaluate_every": 1},
        **{"backend": "inline", "output": str(tmp_path / "runs")},
        run_config="task='digits' classes-per-client=10 model='logistic'",
    )
    made = srpfl_time.run(arguments, "fedrep", 2)
    page = {"made": {"fedrep": made}}
    srpfl_time.write_json(tmp_path / "srpfl_time-fixed-0.05.json", page)
    monkeypatch.setattr(srpfl_time, "simulate", None)
    arguments.output = str(tmp_path / "another")
    assert srpfl_time.run(arguments, "fedrep", 2) == made
    # Nor with other speeds, which change the clock of a base alone.
    arguments.speed_model, arguments.initial_nodes = "dynamic", 3
    other = srpfl_time.run(arguments, "fedrep", 2)
    accuracies = [[row["accuracy"] for row in run["rows"]] for run in (made, other)]
    assert accuracies[0] == accuracies[1]
    assert other["rows"][-1]["seconds-simulated"] != pytest.approx(
        made["rows"][-1]["seconds-simulated"]
    )
    # But with another learning rate, or for what waits for the first alone.
    arguments.run_config += " learning-rate=0.2"
    with pytest.raises(TypeError):
        srpfl_time.run(arguments, "fedrep", 2)
    with pytest.raises(TypeError):
        srpfl_time.run(arguments, "srpfl", 2)


def arguments(output: Path, **more: object) -> Namespace:
    return Namespace(
        **{"speed_model": "fixed", "fraction": 0.1, "stage": 1, "initial_nodes": 2},
        **{"seed": 0, "name": "", "data_dir": "", "evaluate_every": 1},
        **{"backend": "inline", "output": str(output)},
        run_config=more.get("run_config", "task='digits' classes-per-client=10"),
    )


def test_an_interrupted_run_goes_on_and_names_both_commits(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    srpfl_time = import_module("srpfl_time")
    whole = srpfl_time.run(arguments(tmp_path / "whole"), "fedrep", 3)

    def interrupted(algorithm, backend, **settings):
        simulate(algorithm, backend, **{**settings, "num-server-rounds": 2})
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(srpfl_time, "simulate", interrupted)
        patch.setattr(srpfl_time, "COMMIT", "a")
        with pytest.raises(KeyboardInterrupt):
            srpfl_time.run(arguments(tmp_path / "parts"), "fedrep", 3)
    monkeypatch.setattr(srpfl_time, "COMMIT", "b")
    parts = srpfl_time.run(arguments(tmp_path / "parts"), "fedrep", 3)
    assert parts["commit"] == "a, b"
    accuracies = [[row["accuracy"] for row in run["rows"]] for run in (whole, parts)]
    assert accuracies[0] == accuracies[1]
    assert len(accuracies[0]) == 3


def test_no_earlier_runs_rows_are_taken_for_one_that_never_began(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    srpfl_time = import_module("srpfl_time")
    srpfl_time.run(arguments(tmp_path), "fedrep", 2)
    other = "task='digits' classes-per-client=10 learning-rate=0.5"

    def never(*args, **settings):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(srpfl_time, "simulate", never)
        with pytest.raises(KeyboardInterrupt):
            srpfl_time.run(arguments(tmp_path, run_config=other), "fedrep", 2)
    begun = []
    patched = srpfl_time.simulate
    monkeypatch.setattr(
        srpfl_time, "simulate", lambda *a, **s: begun.append(a) or patched(*a, **s)
    )
    srpfl_time.run(arguments(tmp_path, run_config=other), "fedrep", 2)
    assert len(begun) == 1
