"""Runs that lose most replies of their last rounds: what ends, and what stays."""

import json

import pytest
from command_line import STEADY, json_of, run
from refusals import code_of

from flwr_frl import simulate
from flwr_frl.clients import app as client_app
from flwr_frl.common.errors import TrainingDivergedError

# Steps with which the models of multi-task optimisation overflow in round 4
DIVERGING = {"saddle_step": 20.0, "dual_regularizer": "0.001"}
QUICK = {**STEADY, "num_server_rounds": 2, "cohort": "off"}


@pytest.fixture
def lost(monkeypatch):
    """Let clients of these indices fail in every round."""
    failing, pack = set[int](), client_app.pack

    def fail(message, client, *rest):
        if client._index in failing:
            raise TrainingDivergedError("the loss is inf")
        return pack(message, client, *rest)

    monkeypatch.setattr(client_app, "pack", fail)
    return failing


def test_command_ends_with_its_own_exit_code_and_keeps_all_results(tmp_path, capsys):
    words = ("fedrep", "multi-task", "--clients", "10", "--rounds", "4")
    assert run(tmp_path, *words, **DIVERGING) == 3
    printed = capsys.readouterr()
    (line,) = [x for x in printed.err.splitlines() if x.startswith("error:")]
    assert line.startswith("error: multi-task lost ")
    assert "lost" in printed.out
    # Failures come last, whatever their accuracy.
    assert printed.out.index("\n fedrep") < printed.out.index("\n multi-task")
    summary = json_of(tmp_path / "summary.json")["algorithms"]
    assert summary["fedrep"]["lost-replies"] == 0
    assert summary["multi-task"]["lost-replies"] > 0.5
    assert (tmp_path / "multi-task" / "checkpoint.safetensors").is_file()
    # The run has ended, so a resumed one reports the same.
    assert run(tmp_path, *words, **DIVERGING, resume=str(tmp_path)) == 3


def test_results_are_shown_if_another_algorithm_has_none(tmp_path, capsys):
    # The learning rate of `multi-task` is `saddle-step`.
    broken = {"num_clients": 10, "num_server_rounds": 2, "learning_rate": 1e38}
    assert run(tmp_path, "fedrep", "multi-task", **broken) == 2
    printed = capsys.readouterr()
    assert "\n multi-task" in printed.out
    assert "\n fedrep" not in printed.out
    assert "valid reply" in printed.err.splitlines()[-1]
    again = {"output": tmp_path / "again", **broken}
    code_of(simulate, ["fedrep", "multi-task"], "inline", **again)
    assert (tmp_path / "again" / "table.tex").is_file()


@pytest.mark.parametrize("algorithm", ["fedavg", "flute", "fedbuff", "dpsgd"])
def test_any_algorithm_fails_if_most_of_its_clients_fail(algorithm, lost, tmp_path):
    lost.update({0, 1, 2})
    more = {"fraction": 1.0, "buffer_size": 1, "concurrency": 5, "max_empty_rounds": 0}
    given = {"output": tmp_path, **QUICK, **more}
    assert code_of(simulate, algorithm, "inline", **given) == "lost-replies"
    assert (tmp_path / "summary.json").is_file()
    # A run with most clients is a success.
    lost.remove(2)
    if algorithm == "fedavg":
        made = simulate(algorithm, "inline", **given)
        assert made.summary["lost-replies"] == 0.4


def test_tuning_does_not_pick_a_point_that_lost_most_replies(tmp_path):
    words = ("tune", "multi-task", "--clients", "10", "--rounds", "4")
    grid = ("--grid", "saddle-step=20.0,0.1")
    settings = {"dual_regularizer": "0.001"}
    assert run(tmp_path, *words, *grid, **settings) == 0
    tuned = json.loads((tmp_path / "tune.json").read_text())["multi-task"]
    assert tuned["picked"] == {"saddle-step": 0.1}
    assert "lost" in tuned["points"][0]["failed"]
