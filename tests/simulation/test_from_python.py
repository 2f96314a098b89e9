"""``simulate`` from Python, and somebody else's package."""

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

from flwr_frl import cli, running
from flwr_frl.clients.client_app import make_app
from flwr_frl.strategies import FedRep
from flwr_frl.task import run_cache
from flwr_frl.task.settings import SettingsError, resolve
from flwr_frl.task.tasks import build_task


def test_a_simulation_from_python_is_that_of_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quick = {"model": "mlp-2", "batch_size": 50}
    found = running.simulate(
        "fedrep", num_clients=20, rounds=2, backend="inline", **quick
    )
    assert run(tmp_path / "other", "fedrep", "--rounds", "2", **quick) == 0
    assert_same_rows(found.rows, rows_of(tmp_path / "other"), 0)
    assert found.rows == rows_of(tmp_path / "results")
    assert (
        found.summary
        == json_of(tmp_path / "results" / "summary.json")["algorithms"]["fedrep"]
    )
    assert found.summary["rounds"] == 2
    # As a pair, too.
    summary, rows = found
    assert (summary, rows) == (found.summary, found.rows)


def test_a_simulation_from_python_takes_names_as_on_the_command_line(tmp_path):
    found = [
        running.simulate(
            algorithm,
            backend="inline",
            output=str(tmp_path / str(i)),
            model="mlp-2",
            batch_size=50,
            head_epochs=1,
            evaluate_every=1,
            **named,
        )
        for i, (algorithm, named) in enumerate(
            [
                ("fedrep", {"rounds": 2, "clients": 5, "fraction": 0.6}),
                (FedRep, {"rounds": 2, "num_clients": 5, "fraction_train": 0.6}),
                (
                    "outsiders:Plain",
                    {"num_server_rounds": 2, "clients": 5, "fraction": 0.6},
                ),
            ]
        )
    ]
    first, *others = found
    assert [row["clients"] for row in first.rows] == [3, 3]
    for other in others:
        assert_same_rows(other.rows, first.rows, 0)
    places = [tmp_path / "1" / "FedRep", tmp_path / "2" / "Plain"]
    assert all((place / "metrics.jsonl").is_file() for place in places)


def test_settings_as_a_notebook_has_them(tmp_path):
    quick = {"model": "mlp-2", "batch_size": np.int64(50), "rounds": np.int32(1)}
    found = running.simulate(
        "fedavg",
        "inline",
        output=tmp_path / "out",
        metrics=["macro-f1", "balanced-accuracy"],
        learning_rate=np.float64(0.05),
        augment=np.bool_(False),
        partition=np.str_("iid"),
        clients=4,
        **quick,
    )
    assert found.summary["macro-f1"] > 0
    told = json_of(tmp_path / "out" / "summary.json")["config"]
    assert told["metrics"] == "macro-f1,balanced-accuracy"
    assert (told["batch-size"], told["learning-rate"]) == (50, 0.05)


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
    ],
)
def test_bad_input_from_python(tmp_path, monkeypatch, algorithm, settings, code):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError) as caught:
        running.simulate(algorithm, **{"backend": "inline", **settings})
    assert caught.value.code == code
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def guest(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests" / "guest")


GUEST = ("guest.algorithm:Guest", "--task", "guest.task:sensors", "--clients", "6")


def test_a_guest_s_algorithm_and_task_stop_and_resume(tmp_path, guest):
    own = {"roll": 0.8, "warm_up": 3, "readings": 40, "evaluate_every": 1}
    assert run(tmp_path / "a", *GUEST, "--rounds", "5", **own) == 0
    saved = {**own, "checkpoint_every": 2}
    assert run(tmp_path / "b", *GUEST, "--rounds", "3", **saved) == 0
    again = {**saved, "resume": str(tmp_path / "b")}
    assert run(tmp_path / "b", *GUEST, "--rounds", "5", **again) == 0
    whole, resumed = (rows_of(tmp_path / name, "Guest") for name in "ab")
    assert_same_rows(resumed, whole, 1e-12)
    assert whole[-1]["loss"] < whole[0]["loss"]
    summary = json_of(tmp_path / "a" / "summary.json")
    assert list(summary["algorithms"]) == ["Guest"]
    assert (summary["config"]["roll"], summary["config"]["readings"]) == (0.8, 40)
    # Its settings do something.
    assert run(tmp_path / "c", *GUEST, "--rounds", "5", **{**own, "roll": 0.0}) == 0
    other = rows_of(tmp_path / "c", "Guest")
    assert other[0]["train-loss"] == whole[0]["train-loss"]
    assert other[-1]["train-loss"] != whole[-1]["train-loss"]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("roll=1.0", "roll"),
        ("warm-up=-1", "warm-up"),
        ("readings=1", "readings"),
        ("warm-upp=1", "setting"),
    ],
)
def test_a_guest_s_settings_are_checked(surroundings, guest, text, code):
    assert_refused((*GUEST, *config(text)), code, surroundings)


def test_a_strategy_of_the_script_itself_is_for_one_process(tmp_path, monkeypatch):
    own = type("Own", (FedRep,), {"__module__": "__main__"})
    with pytest.raises(SettingsError) as caught:
        running.simulate(own, "ray", rounds=1)
    assert caught.value.code == "algorithm"
    monkeypatch.setattr(sys.modules["__main__"], "Own", own, raising=False)
    found = running.simulate(
        own, "inline", rounds=1, model="mlp-2", batch_size=50, output=str(tmp_path)
    )
    assert found.summary["rounds"] == 1


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
    def fit(self, parameters, config):
        self.receive(parameters, config)
        return self.send(self.train("all", 1))

class Mine(FedAvg, client=__name__ + ":MineClient"):
    pass
"""


def test_what_is_edited_in_a_process_counts_from_the_next_run_on(
    tmp_path, write_module
):
    module = importlib.import_module(write_module("cell", CELL))

    def run_it() -> tuple[int, float]:
        found = running.simulate(
            module.Mine,
            "inline",
            task=module.table,
            clients=2,
            rounds=1,
            output=str(tmp_path / "out"),
        )
        told = json_of(tmp_path / "out" / "Mine" / "clients.json")
        return told["000000"]["num-examples"], found.rows[-1]["train-loss"]

    count, loss = run_it()
    assert count == 3
    assert loss > 0
    module.N = 5
    assert run_it()[0] == 5
    # Cells that are run again, edited.
    exec(CELL.replace("N = 3", "N = 7"), vars(module))
    assert run_it()[0] == 7
    exec(CELL.replace("N = 3", "N = 7").replace('"all", 1', '"all", 0'), vars(module))
    assert run_it() == (7, 0)
    # The file, where the module is reloaded.
    with open(module.__file__, "a") as file:
        file.write("N = 11")
    importlib.reload(module)
    assert run_it()[0] == 11


def test_a_worker_forgets_what_another_command_was_about(write_module, monkeypatch):
    settings = resolve({"task": write_module("cell", CELL) + ":table"})
    # Flower's message is of no matter: what it would be given is not one.
    run_cache.begin_run()
    first, second = make_app(settings), make_app(settings)
    task = build_task(settings, 2)
    for app in (first, second):
        with pytest.raises(AttributeError):
            app(None, None)
    # Several algorithms of one command share it.
    assert build_task(settings, 2) is task
    run_cache.begin_run()
    other = make_app(settings)
    # A worker, which has not begun the command itself.
    monkeypatch.setattr(run_cache._current, "run_id", first.command)
    task = build_task(settings, 2)
    with pytest.raises(AttributeError):
        other(None, None)
    assert build_task(settings, 2) is not task


def test_tasks_of_one_s_own_are_found_where_the_command_is_started(
    tmp_path, monkeypatch
):
    (tmp_path / "of_mine.py").write_text("x = 1\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["--task", "of_mine:nothing"]) == 2
    assert "of_mine" in sys.modules
