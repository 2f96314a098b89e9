"""One run of a base algorithm serves all speed models, which change only its clock."""

from argparse import Namespace
from importlib import import_module
from pathlib import Path

import pytest

from flwr_frl import simulate
from flwr_frl.common.settings import resolve
from flwr_frl.strategies.algorithms import settings_owners
from flwr_frl.strategies.grids.speeds import SpeedModel
from flwr_frl.strategies.server.participation import Participation

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
CLOCK = ("seconds", "seconds-simulated")
DATA = "task='digits' classes-per-client=10 model='logistic'"


@pytest.fixture
def srpfl_time(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("srpfl_time")


def arguments(output: Path, **more: object) -> Namespace:
    return Namespace(
        **{"speed_model": "fixed", "fraction": 0.1, "stage": 1, "initial_nodes": 2},
        **{"seed": 0, "name": "", "data_dir": "", "evaluate_every": 1},
        own_config={},
        **{"backend": "inline", "output": str(output), "run_config": DATA, **more},
    )


def accuracies(made: dict) -> list[float]:
    return [row["accuracy"] for row in made["rows"]]


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_other_speeds_change_only_the_clock_of_a_base_algorithm(
    fraction, srpfl_time, tmp_path
):
    def rows_with(speed_model):
        settings = {"num_clients": 10, "rounds": 3, "fraction": fraction, "seed": 3}
        settings |= {"output": tmp_path / speed_model, "model": "logistic"}
        settings |= {"speed_model": speed_model, "evaluate_last": 1}
        return simulate("fedrep", "inline", **settings).rows

    fixed, dynamic = rows_with("fixed"), rows_with("dynamic")
    measured = [row["seconds-simulated"] for row in dynamic]
    assert measured != [row["seconds-simulated"] for row in fixed]
    speeds, participation = SpeedModel("dynamic", 10, 3), Participation(fraction, 1, 3)
    srpfl_time.set_clock(fixed, speeds, participation)
    assert [row["seconds-simulated"] for row in fixed] == pytest.approx(measured)
    for row, other in zip(fixed, dynamic, strict=True):
        without = [{k: v for k, v in r.items() if k not in CLOCK} for r in (row, other)]
        assert without[0] == without[1]


def test_fine_tuned_runs_have_a_curve(srpfl_time, monkeypatch, tmp_path):
    # By default, only the last round of fine-tuned algorithms is evaluated.
    kind = settings_owners(resolve({"algorithm": "flanp-ft"}))[-1]
    monkeypatch.setattr(kind, "traits", kind.traits)
    result = srpfl_time.run(arguments(tmp_path), "flanp-ft", 2)
    times, curve = srpfl_time.curve(result["rows"], 0)
    assert len(times) == len(curve) == 2


def test_a_run_on_a_page_is_reused(srpfl_time, monkeypatch, tmp_path):
    monkeypatch.setattr(srpfl_time, "RESULTS", tmp_path)
    monkeypatch.setattr(srpfl_time, "COMMIT", "0123456789")
    options = arguments(tmp_path / "runs")
    result = srpfl_time.run(options, "fedrep", 2)
    page = {"made": {"fedrep": result}}
    srpfl_time.write_json(tmp_path / "srpfl_time-fixed-0.1.json", page)
    monkeypatch.setattr(srpfl_time, "simulate", None)
    options.output = str(tmp_path / "another")
    assert srpfl_time.run(options, "fedrep", 2) == result
    # It is reused with other speeds, which change only the clock of a base algorithm.
    options.speed_model, options.initial_nodes = "dynamic", 3
    other = srpfl_time.run(options, "fedrep", 2)
    assert accuracies(result) == accuracies(other)
    times = [run["rows"][-1]["seconds-simulated"] for run in (result, other)]
    assert times[0] != pytest.approx(times[1])
    # It is not reused with another learning rate, nor for SRPFL, which waits only for
    # the first clients.
    options.run_config += " learning-rate=0.2"
    for algorithm in ("fedrep", "srpfl"):
        with pytest.raises(TypeError):
            srpfl_time.run(options, algorithm, 2)


def test_own_settings_apply_to_one_algorithm(srpfl_time, tmp_path):
    options = arguments(tmp_path)
    options.own_config = {"fedavg-ft": "learning-rate=0.2"}
    rates = {
        name: srpfl_time.run(options, name, 1)["settings"].get("learning-rate")
        for name in ("fedrep", "fedavg-ft")
    }
    assert rates == {"fedrep": None, "fedavg-ft": 0.2}


def test_an_interrupted_run_resumes_and_names_both_commits(
    srpfl_time, monkeypatch, tmp_path
):
    uninterrupted = srpfl_time.run(arguments(tmp_path / "whole"), "fedrep", 3)

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
    assert accuracies(uninterrupted) == accuracies(parts)
    assert len(uninterrupted["rows"]) == 3


def test_a_run_that_never_began_takes_no_rows_of_an_earlier_run(
    srpfl_time, monkeypatch, tmp_path
):
    srpfl_time.run(arguments(tmp_path), "fedrep", 2)
    other = arguments(tmp_path, run_config=f"{DATA} learning-rate=0.5")
    begun, original = [], srpfl_time.simulate

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    def counted(*given, **settings):
        begun.append(given)
        return original(*given, **settings)

    monkeypatch.setattr(srpfl_time, "simulate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        srpfl_time.run(other, "fedrep", 2)
    monkeypatch.setattr(srpfl_time, "simulate", counted)
    srpfl_time.run(other, "fedrep", 2)
    assert len(begun) == 1
