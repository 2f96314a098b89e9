"""Runs that are stopped or crash can be resumed."""

from pathlib import Path

import pytest
from command_line import (
    PERSONAL,
    STEADY,
    Killed,
    assert_same_rows,
    die_in,
    json_of,
    rows_of,
    run,
)

from flwr_frl.clients.device import account, state
from flwr_frl.common.checkpoint import FILE
from flwr_frl.results.report import Report
from flwr_frl.strategies.server.checkpoint import Checkpoint

# Settings of runs with a checkpoint before the end
SAVED = {"checkpoint_every": 5}


def finished_at(rounds: int, output: Path, algorithm: str, **overrides) -> list[dict]:
    # By default, stages depend on the number of rounds, which differs here.
    stages = {"rounds_per_stage": "3"} if algorithm == "srpfl" else {}
    settings = {**STEADY, **stages, **overrides}
    code = run(output, algorithm, "--rounds", str(rounds), **settings)
    assert code == 0
    return rows_of(output, algorithm)


def resumed(output: Path, algorithm: str, **overrides) -> list[dict]:
    return finished_at(9, output, algorithm, resume=str(output), **overrides)


def killed_in(server_round: int, output: Path, algorithm: str, **overrides) -> None:
    with pytest.MonkeyPatch.context() as patched:
        die_in(patched, server_round)
        with pytest.raises(Killed):
            finished_at(9, output, algorithm, **overrides)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Rows of runs over 9 rounds, without any checkpoint."""
    output = tmp_path_factory.mktemp("undisturbed")
    return {algorithm: finished_at(9, output, algorithm) for algorithm in PERSONAL}


@pytest.mark.parametrize("algorithm", PERSONAL)
def test_a_run_that_was_stopped_and_one_that_crashed_can_be_resumed(
    tmp_path, undisturbed, algorithm
):
    finished_at(4, tmp_path, algorithm, **SAVED)
    # The last round, 4, has a checkpoint although it is not a multiple of 5. Then
    # rounds 6 to 8 are trained, and the server is rolled back to round 5, and the
    # clients with it.
    killed_in(8, tmp_path, algorithm, **SAVED, resume=str(tmp_path))
    rows = resumed(tmp_path, algorithm, **SAVED)
    assert_same_rows(rows, undisturbed[algorithm], 1e-12)
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(seconds)


def test_checkpoints_do_not_change_results(tmp_path, undisturbed):
    rows = finished_at(9, tmp_path, "fedrep", **SAVED)
    assert_same_rows(rows, undisturbed["fedrep"], 0)
    # A finished run is only reported again, and a new run does not use its heads.
    again = resumed(tmp_path, "fedrep", **SAVED)
    assert_same_rows(again, rows, 0)
    assert_same_rows(finished_at(9, tmp_path, "fedrep", **SAVED), rows, 0)


def test_a_finished_run_is_summarized_again_with_other_settings(tmp_path):
    finished_at(9, tmp_path, "fedrep", **SAVED)
    before = json_of(tmp_path / "summary.json")
    rows = resumed(tmp_path, "fedrep", evaluate_last=1, metrics="macro-f1")
    after = json_of(tmp_path / "summary.json")
    assert before["config"]["evaluate-last"] == 10
    assert after["config"]["evaluate-last"] == 1
    accuracy = after["algorithms"]["fedrep"]["accuracy"]
    assert accuracy == pytest.approx(rows[-1]["accuracy"])
    assert accuracy != before["algorithms"]["fedrep"]["accuracy"]
    clients = json_of(tmp_path / "fedrep" / "clients.json")
    assert all("macro-f1" in about for about in clients.values())


def test_a_run_can_be_resumed_in_another_folder(tmp_path, undisturbed):
    first, second = tmp_path / "first", tmp_path / "second"
    finished_at(5, first, "fedrep", **SAVED)
    heads = {*first.rglob("*.safetensors")}
    rows = finished_at(9, second, "fedrep", **SAVED, resume=str(first))
    assert_same_rows(rows, undisturbed["fedrep"], 1e-12)
    summary = json_of(second / "summary.json")["algorithms"]["fedrep"]
    assert summary["bytes"] == sum(r["bytes-down"] + r["bytes-up"] for r in rows)
    assert len(rows_of(first, "fedrep")) == 5
    assert {*first.rglob("*.safetensors")} == heads


def test_a_run_that_crashed_after_a_failed_checkpoint_can_be_resumed(
    tmp_path, monkeypatch, undisturbed
):
    write = Checkpoint.write

    def fail_later(checkpoint: Checkpoint, directory: Path) -> None:
        if checkpoint.server_round > 3:
            raise OSError(28, "No space left on device")
        write(checkpoint, directory)

    # There is a checkpoint of round 3 and none of round 6.
    with monkeypatch.context() as patched:
        patched.setattr(Checkpoint, "write", fail_later)
        killed_in(8, tmp_path, "fedper", checkpoint_every=3)
    rows = resumed(tmp_path, "fedper", checkpoint_every=3)
    assert_same_rows(rows, undisturbed["fedper"], 1e-12)


def test_resuming_several_algorithms_starts_those_not_begun(tmp_path):
    finished_at(2, tmp_path, "fedavg")
    words, resume = ("fedavg", "fedper", "--rounds", "3"), {"resume": str(tmp_path)}
    assert run(tmp_path, *words, **STEADY, **resume) == 0
    assert [len(rows_of(tmp_path, name)) for name in ("fedavg", "fedper")] == [3, 3]
    # An algorithm that has never started cannot be resumed.
    assert run(tmp_path, "fedrep", **STEADY, **resume) == 2


@pytest.mark.parametrize("algorithm", ["fedrep", "apfl"])
def test_a_kill_after_the_last_checkpoint_loses_nothing(
    tmp_path, monkeypatch, algorithm
):
    # Without checkpoints during the run, clients keep their states in memory.
    expected = finished_at(9, tmp_path / "whole", algorithm)

    def die(*_: object) -> None:
        raise Killed

    output = tmp_path / "killed"
    with monkeypatch.context() as patched:
        patched.setattr(Report, "finish", die)
        with pytest.raises(Killed):
            finished_at(5, output, algorithm)
    assert_same_rows(resumed(output, algorithm), expected, 1e-12)


def test_a_temporarily_full_disk_loses_no_state(tmp_path, monkeypatch, undisturbed):
    write, refused = state.write_atomically, []

    def refuse(path: Path, data: bytes, **options: int) -> None:
        if path.name[-20:-12] in ("00000002", "00000003") and len(refused) < 4:
            refused.append(path.name)
            raise OSError(28, "No space left on device")
        write(path, data, **options)

    with monkeypatch.context() as patched:
        patched.setattr(state, "write_atomically", refuse)
        finished_at(4, tmp_path, "fedrep", checkpoint_every=1)
    assert refused
    rows = resumed(tmp_path, "fedrep", checkpoint_every=1)
    assert_same_rows(rows, undisturbed["fedrep"], 1e-12)


def test_a_client_whose_state_cannot_be_written_affects_no_other(
    tmp_path, monkeypatch, capsys, caplog
):
    write = account.write_atomically

    def refuse(path: Path, data: bytes, **options: int) -> None:
        if path.parent.name.startswith("000001"):
            raise OSError(28, "No space left on device")
        write(path, data, **options)

    monkeypatch.setattr(account, "write_atomically", refuse)
    private = {"dp_noise": 1.0, "dp_clip": 1.0, "dp_delta": 1e-5}
    words = ("fedrep", "--rounds", "2")
    assert run(tmp_path, *words, **{**STEADY, "fraction_train": 1.0, **private}) == 2
    assert "not written: fedrep/clients; " in capsys.readouterr().err
    kept = {p.parent.name for p in tmp_path.rglob("clients/*/*.safetensors")}
    assert len(kept) == 5
    assert len(list(tmp_path.rglob("privacy.json"))) == 4
    assert caplog.text.count("the state of client 000001 is in memory only: ") == 1


@pytest.mark.parametrize(("server_round", "begun"), [(1, False), (2, True)])
def test_the_hint_is_shown_only_for_a_run_that_has_begun(
    tmp_path, monkeypatch, capsys, server_round, begun
):
    die_in(monkeypatch, server_round, KeyboardInterrupt)
    assert run(tmp_path, "fedrep", "--rounds", "2", **STEADY) == 130
    assert (tmp_path / "fedrep" / FILE).is_file() is begun
    assert ("; continue with --run-config " in capsys.readouterr().err) is begun
