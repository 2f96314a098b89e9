"""Several seeds, tuning, validation sets and newcomers on the command line."""

import math
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from command_line import ROOT, assert_refused, cases, config_of, json_of, rows_of, run

from flwr_frl import running
from flwr_frl.results.sweep import Sweep, points_of, tune

QUICK = {"evaluate_last": 2, "evaluate_every": 0, "head_epochs": 1, "num_clients": 5}
QUICK |= {"model": "logistic", "batch_size": 100, "newcomer_epochs": 1}


def go(output: Path, *arguments: str, code: int = 0, rounds: int = 3, **more) -> None:
    words = (*arguments, "--rounds", str(rounds))
    assert run(output, *words, **{**QUICK, **more}) == code


def test_sequential_seeds_can_be_resumed(tmp_path, monkeypatch, capsys):
    complete, parts = tmp_path / "whole", tmp_path / "parts"
    go(complete, "fedavg", "fedper", "--seeds", "2", "--seed", "3")
    summary = json_of(complete / "summary.json")
    assert summary["seeds"] == [3, 4]
    for name in ("fedavg", "fedper"):
        # Means and standard deviations are those over the runs of the seeds.
        alone = [json_of(complete / f"seed-{s}" / "summary.json") for s in (3, 4)]
        accuracies = [result["algorithms"][name]["accuracy"] for result in alone]
        result = summary["algorithms"][name]
        assert result["accuracy"] == pytest.approx(np.mean(accuracies))
        assert result["accuracy-std-seeds"] == pytest.approx(np.std(accuracies, ddof=1))
    single = tmp_path / "single"
    go(single, "fedavg", "--seed", "4")
    of_seed = [row["accuracy"] for row in rows_of(complete / "seed-4", "fedavg")[-2:]]
    assert of_seed == [row["accuracy"] for row in rows_of(single, "fedavg")[-2:]]
    # A command interrupted in the second seed resumes with the same results.
    original, runs = running.run, []

    def interrupted(algorithm, settings, backend):
        runs.append(algorithm)
        if len(runs) == 4:
            raise KeyboardInterrupt
        return original(algorithm, settings, backend)

    with monkeypatch.context() as patched:
        patched.setattr(running, "run", interrupted)
        go(parts, "fedavg", "fedper", "--seeds", "2", "--seed", "3", code=130)
    assert f'resume="{parts}"' in capsys.readouterr().err
    again = ("fedavg", "fedper", "--seeds", "2", "--seed", "3")
    go(parts, *again, resume=str(parts))
    ours, theirs = (
        json_of(p / "summary.json")["algorithms"] for p in (parts, complete)
    )
    for name, result in theirs.items():
        assert ours[name]["accuracy"] == result["accuracy"]
        assert ours[name]["accuracy-std-seeds"] == result["accuracy-std-seeds"]


def test_commands_with_the_same_seeds_share_a_table(tmp_path):
    go(tmp_path, "fedavg", "--seeds", "2", rounds=1)
    first = json_of(tmp_path / "summary.json")["algorithms"]
    go(tmp_path, "fedper", "--seeds", "2", rounds=1)
    summary = json_of(tmp_path / "summary.json")
    assert summary["seeds"] == [0, 1]
    assert list(summary["algorithms"]) == ["fedavg", "fedper"]
    assert summary["algorithms"]["fedavg"] == first["fedavg"]
    # FedAvg has no third seed, and a single run joins no table over seeds.
    for words in (("local", "--seeds", "3"), ("local",)):
        go(tmp_path, *words, rounds=1)
        summary = json_of(tmp_path / "summary.json")
        assert list(summary["algorithms"]) == ["local"]
    assert "seeds" not in summary
    # The files of the seeds are kept.
    assert (tmp_path / "seed-1" / "fedavg" / "metrics.jsonl").is_file()


@pytest.mark.e2e
def test_parallel_seeds_can_be_stopped_and_resumed(tmp_path):
    turn, beside = tmp_path / "turn", tmp_path / "beside"
    words = ("fedper", "--seeds", "3")
    go(turn, *words, rounds=40)
    command = [sys.executable, str(ROOT / "simulation.py"), *words, "--rounds", "40"]
    command += ["--backend", "inline", "--jobs", "2", "--output", str(beside)]
    flag, text = config_of(QUICK)
    command += [flag, text]
    begun = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    files = [beside / f"seed-{seed}/fedper/metrics.jsonl" for seed in (0, 1)]
    # Wait until both runs have written rows.
    while not all(path.is_file() and path.stat().st_size for path in files):
        assert begun.poll() is None, begun.communicate()
        time.sleep(0.005)
    begun.terminate()
    _, errors = begun.communicate(timeout=120)
    assert begun.returncode == 130, errors
    assert "interrupted; continue with" in errors
    again = [*command[:-1], f"{text} resume='{beside}'"]
    done = subprocess.run(again, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    expected, resumed = (json_of(p / "summary.json") for p in (turn, beside))
    assert resumed["seeds"] == [0, 1, 2]
    of_turn, of_beside = (s["algorithms"]["fedper"] for s in (expected, resumed))
    for metric in ("accuracy", "accuracy-std-seeds", "loss"):
        assert of_beside[metric] == pytest.approx(of_turn[metric], abs=1e-12)


def test_tune_picks_by_validation_and_tests_once(tmp_path):
    # Learning rates that have no effect, that work, and that diverge
    grid = ("--grid", "learning-rate=1e-9,0.5,1e38")
    go(tmp_path, "tune", "fedper", *grid, rounds=5, validation_fraction=0.3)
    tuned = json_of(tmp_path / "tune.json")["fedper"]
    assert tuned["validation-fraction"] == 0.3
    assert tuned["picked"] == {"learning-rate": 0.5}
    assert [p["settings"]["learning-rate"] for p in tuned["points"]] == [
        *(1e-9, 0.5, 1e38)
    ]
    nothing, learned, diverged = tuned["points"]
    assert learned["accuracy"] > nothing["accuracy"]
    assert "valid reply" in diverged["failed"]
    # The test result is that of the picked settings on all training examples.
    alone = tmp_path / "alone"
    go(alone, "fedper", rounds=5, learning_rate=0.5)
    expected = json_of(alone / "summary.json")["algorithms"]["fedper"]
    assert tuned["test"]["accuracy"] == expected["accuracy"]
    sizes = [
        json_of(place / "fedper" / "clients.json")["000000"]["num-examples"]
        for place in (tmp_path / "fedper" / "point-1", alone)
    ]
    assert sizes[0] == sizes[1] - int(0.3 * sizes[1] + 0.5)


def test_resumed_tune_tests_the_point_that_more_points_pick(tmp_path):
    out, alone = tmp_path / "out", tmp_path / "alone"
    go(out, "tune", "fedper", "--grid", "learning-rate=0.5")
    more = ("--grid", "learning-rate=0.5,0.05")
    go(out, "tune", "fedper", *more, resume=str(out))
    tuned = json_of(out / "tune.json")["fedper"]
    assert tuned["picked"] == {"learning-rate": 0.05}
    go(alone, "fedper", learning_rate=0.05)
    expected = json_of(alone / "summary.json")["algorithms"]["fedper"]
    assert tuned["test"]["accuracy"] == expected["accuracy"]
    # The earlier test is kept.
    assert {p.name for p in (out / "fedper").glob("test-*")} == {"test-0", "test-1"}
    # The next command finds the same point.
    go(out, "tune", "fedper", *more, resume=str(out))
    assert json_of(out / "tune.json")["fedper"] == tuned


def test_tune_never_picks_a_loss_that_is_not_finite(tmp_path):
    # The summary of a resumed run has None in place of such a loss.
    losses = {0.1: math.nan, 0.2: None, 0.3: math.inf, 0.4: 2.0, 0.5: 1.0}

    def run(name, settings):
        return {"loss": losses[settings["learning-rate"]]}

    grid = points_of("learning-rate=0.1,0.2,0.3,0.4,0.5")
    sweep = Sweep(lambda names, given: given, run)
    tuned = tune(["local"], grid, {}, tmp_path, sweep)["local"]
    assert tuned["picked"] == {"learning-rate": 0.5}
    assert ["failed" in point for point in tuned["points"]] == [True] * 3 + [False] * 2


def test_a_resumed_search_continues_its_runs(tmp_path, capsys):
    words = ("tune", "fedper", "--grid")
    go(tmp_path, *words, "learning-rate=0.01,0.1", rounds=1)
    first = json_of(tmp_path / "tune.json")["fedper"]["points"]
    more = "learning-rate=0.01,0.1,0.5"
    go(tmp_path, *words, more, rounds=1, resume=str(tmp_path))
    points = json_of(tmp_path / "tune.json")["fedper"]["points"]
    assert (points[:2], len(points)) == (first, 3)
    # Another grid has other points, whose runs are not those of the folder.
    capsys.readouterr()
    other = "learning-rate=0.02,0.1"
    go(tmp_path, *words, other, rounds=1, resume=str(tmp_path), code=2)
    assert "learning-rate was " in capsys.readouterr().err


def test_results_of_newcomers_are_in_the_files(tmp_path):
    go(tmp_path, "fedrep", rounds=2, new_clients=2)
    clients = json_of(tmp_path / "fedrep" / "clients.json")
    entries = json_of(tmp_path / "fedrep" / "newcomers.json")
    assert len(entries) == 2
    assert sorted([*clients, *entries]) == [f"{i:06d}" for i in range(5)]
    summary = json_of(tmp_path / "summary.json")["algorithms"]["fedrep"]
    mean = np.mean([newcomer["accuracy"] for newcomer in entries.values()])
    assert summary["accuracy-newcomers"] == pytest.approx(mean)


BAD = r"""
fedavg --seeds 0 => seeds
fedavg --seeds 2 @ seed='one' => seed
fedavg --seeds 2 @ seed=1.5 => seed
fedavg --baseline fedrep => command-line
tune fedavg --grid momentum=0 @ resume='nowhere' => resume
tune fedavg --grid sede=1 => setting
tune fedavg --grid momentum=0,2 => momentum
tune fedavg --grid momentum=0 @ evaluate-on='test' => evaluate-on
@ validation-fraction=1.0 => validation-fraction
@ validation-fraction=0.001 => ~client 0's 71 training examples
@ partition='log-normal' num-clients=50 validation-fraction=0.98 => validation-fraction
@ evaluate-on='validation' => ~evaluate-on is 'validation'
@ result-protocol='best' => result-protocol
@ metrics='macro-f2' => metrics
@ metrics='json:dumps' => ~metric 'dumps' fails
fedrep --task linear @ validation-fraction=0.5 => ~must be 0: it draws
--jobs 0 => jobs
--jobs 2 --backend ray => jobs
"""


@pytest.mark.parametrize(("arguments", "expected"), cases(BAD))
def test_bad_input_gives_a_one_line_error(surroundings, arguments, expected):
    assert_refused(arguments, expected, surroundings)


def test_tune_accepts_a_setting_that_one_algorithm_defines(tmp_path):
    grid = ("--grid", "fewest=2,3 learning-rate=0.1", "--fraction", "1")
    go(tmp_path, "tune", "outsiders:Hooked", "fedper", *grid, rounds=1)
    tuned = json_of(tmp_path / "tune.json")
    assert tuned.keys() == {"Hooked", "fedper"}
    for result in tuned.values():
        assert [point["settings"]["fewest"] for point in result["points"]] == [2, 3]
        assert all("accuracy" in point for point in result["points"])
