"""``simulate`` from Python, and a third-party package."""

import importlib
import sys

import numpy as np
import pytest
from command_line import (
    ROOT,
    assert_refused,
    assert_same_rows,
    config,
    json_of,
    rows_of,
    run,
)
from refusals import code_of

from flwr_frl import cli, running
from flwr_frl.strategies import FedRep


def test_a_simulation_from_python_equals_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quick = {"model": "mlp-2", "batch_size": 50}
    result = running.simulate("fedrep", "inline", num_clients=20, rounds=2, **quick)
    assert run(tmp_path / "other", "fedrep", "--rounds", "2", **quick) == 0
    assert_same_rows(result.rows, rows_of(tmp_path / "other"), 0)
    assert result.rows == rows_of(tmp_path / "results")
    written = json_of(tmp_path / "results" / "summary.json")["algorithms"]["fedrep"]
    assert result.summary == written


def test_simulate_accepts_the_names_of_command_line_options_and_classes(tmp_path):
    few = {"model": "mlp-2", "batch_size": 50, "head_epochs": 1, "evaluate_every": 1}
    runs = [
        running.simulate(algorithm, "inline", output=tmp_path / name, **few, **more)
        for name, algorithm, more in (
            ("a", "fedrep", {"rounds": 2, "clients": 5, "fraction": 0.6}),
            ("b", FedRep, {"rounds": 2, "num_clients": 5, "fraction_train": 0.6}),
            ("c", "outsiders:Plain", {"num_server_rounds": 2, "clients": 5}),
        )
    ]
    assert [row["clients"] for row in runs[0].rows] == [3, 3]
    assert_same_rows(runs[1].rows, runs[0].rows, 0)
    places = [tmp_path / "b" / "FedRep", tmp_path / "c" / "Plain"]
    assert all((place / "metrics.jsonl").is_file() for place in places)


def test_settings_may_be_numpy_scalars_paths_and_lists(tmp_path):
    quick = {"model": "mlp-2", "batch_size": np.int64(50), "rounds": np.int32(1)}
    quick |= {"learning_rate": np.float64(0.05), "augment": np.bool_(False)}
    quick |= {"partition": np.str_("iid"), "output": tmp_path / "out", "clients": 4}
    metrics = ["macro-f1", "balanced-accuracy"]
    result = running.simulate("fedavg", "inline", metrics=metrics, **quick)
    assert result.summary["macro-f1"] > 0
    written = json_of(tmp_path / "out" / "summary.json")["config"]
    assert written["metrics"] == "macro-f1,balanced-accuracy"
    assert (written["batch-size"], written["learning-rate"]) == (50, 0.05)


def nested() -> list:
    def table(num_clients):
        raise AssertionError("it cannot be found")

    class Own(FedRep):
        pass

    return [table, Own, lambda num_clients: None]


@pytest.mark.parametrize(
    ("algorithm", "settings", "code"),
    [
        ("fedrap", {}, "algorithm"),
        (None, {}, "algorithm"),
        (nested()[1], {}, "algorithm"),
        (type("Nowhere", (FedRep,), {"__module__": "outsiders"}), {}, "algorithm"),
        ("fedrep", {"task": nested()[0]}, "task"),
        ("fedrep", {"task": nested()[2]}, "task"),
        ("fedrep", {"sede": 3}, "setting"),
        ("fedrep", {"metrics": [1]}, "metrics"),
        ("fedrep", {"fraction": 2.0}, "fraction-train"),
        ("fedrep", {"backend": "dask"}, "backend"),
        ([], {}, "algorithm"),
        (["fedrep", "fedrep"], {}, "algorithm"),
        *(("fedrep", {"seeds": seeds}, "seeds") for seeds in (0, 1.5, [0, 1])),
    ],
)
def test_bad_input_from_python_gives_a_one_line_error(
    tmp_path, monkeypatch, algorithm, settings, code
):
    monkeypatch.chdir(tmp_path)
    given = {"backend": "inline", **settings}
    assert code_of(running.simulate, algorithm, **given) == code
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def guest(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests" / "guest")


GUEST = ("guest.algorithm:Guest", "--task", "guest.task:sensors", "--clients", "6")


def test_a_third_party_algorithm_and_task_can_be_resumed(tmp_path, guest):
    settings = {"roll": 0.8, "warm_up": 3, "readings": 40, "evaluate_every": 1}
    assert run(tmp_path / "a", *GUEST, "--rounds", "5", **settings) == 0
    saved = {**settings, "checkpoint_every": 2}
    assert run(tmp_path / "b", *GUEST, "--rounds", "3", **saved) == 0
    again = {**saved, "resume": str(tmp_path / "b")}
    assert run(tmp_path / "b", *GUEST, "--rounds", "5", **again) == 0
    uninterrupted, resumed = (rows_of(tmp_path / name, "Guest") for name in "ab")
    assert_same_rows(resumed, uninterrupted, 1e-12)
    assert uninterrupted[-1]["loss"] < uninterrupted[0]["loss"]
    summary = json_of(tmp_path / "a" / "summary.json")
    assert list(summary["algorithms"]) == ["Guest"]
    assert (summary["config"]["roll"], summary["config"]["readings"]) == (0.8, 40)
    # The setting has an effect.
    still = {**settings, "roll": 0.0}
    assert run(tmp_path / "c", *GUEST, "--rounds", "5", **still) == 0
    other = rows_of(tmp_path / "c", "Guest")
    assert other[0]["train-loss"] == uninterrupted[0]["train-loss"]
    assert other[-1]["train-loss"] != uninterrupted[-1]["train-loss"]


def test_settings_of_a_third_party_package_are_checked(surroundings, guest):
    for text, code in (
        *(("roll=1.0", "roll"), ("warm-up=-1", "warm-up")),
        *(("readings=1", "readings"), ("warm-upp=1", "setting")),
    ):
        assert_refused((*GUEST, *config(text)), code, surroundings)


def test_a_strategy_defined_in_the_script_runs_only_inline(tmp_path, monkeypatch):
    strategy = type("Own", (FedRep,), {"__module__": "__main__"})
    assert code_of(running.simulate, strategy, "ray", rounds=1) == "algorithm"
    monkeypatch.setattr(sys.modules["__main__"], "Own", strategy, raising=False)
    quick = {"model": "mlp-2", "batch_size": 50, "output": str(tmp_path)}
    result = running.simulate(strategy, "inline", rounds=1, **quick)
    assert result.summary["rounds"] == 1


CELL = """
import torch
from flwr_frl.clients import FedAvgClient
from flwr_frl.strategies import FedAvg
from flwr_frl.task import ExampleSet, ExampleTask, SplitModel
from torch import nn

N = 3

def table(num_clients):
    sets = [ExampleSet(torch.ones(N, 1), torch.ones(N, 1))] * num_clients
    build = lambda: SplitModel(nn.Linear(1, 2), nn.Linear(2, 1))
    return ExampleTask(build, sets, sets, nn.functional.mse_loss)

class MineClient(FedAvgClient):
    def update(self):
        return self.train("all", 1)

class Mine(FedAvg, client=__name__ + ":MineClient"):
    pass
"""


def test_edited_code_is_used_from_the_next_run_on(tmp_path, write_module):
    module = importlib.import_module(write_module("cell", CELL))

    def run_it() -> tuple[int, float]:
        more = {"clients": 2, "rounds": 1, "output": str(tmp_path / "out")}
        result = running.simulate(module.Mine, "inline", task=module.table, **more)
        reported = json_of(tmp_path / "out" / "Mine" / "clients.json")
        return reported["000000"]["num-examples"], result.rows[-1]["train-loss"]

    count, loss = run_it()
    assert count == 3
    assert loss > 0
    module.N = 5
    assert run_it()[0] == 5
    # Cells that are edited and executed again
    exec(CELL.replace("N = 3", "N = 7"), vars(module))
    assert run_it()[0] == 7
    exec(CELL.replace("N = 3", "N = 7").replace('"all", 1', '"all", 0'), vars(module))
    assert run_it() == (7, 0)
    # An edited file, whose module is reloaded
    with open(module.__file__, "a") as file:
        file.write("N = 11")
    importlib.reload(module)
    assert run_it()[0] == 11


def test_custom_tasks_are_imported_from_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "of_mine.py").write_text("x = 1\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["--task", "of_mine:nothing"]) == 2
    assert "of_mine" in sys.modules
