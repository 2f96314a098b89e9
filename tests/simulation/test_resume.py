"""Runs that stop, crash and go on."""

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

import simulation
from strategies.server.checkpoint import Checkpoint
from task.checkpoint import FILE


def finished_at(rounds: int, output: Path, algorithm: str, **overrides) -> list[dict]:
    # By default the stages follow from the number of rounds, which differs here.
    stages = {"rounds_per_stage": "3"} if algorithm == "srpfl" else {}
    settings = {**STEADY, **stages, **overrides}
    code = run(output, algorithm, "--rounds", str(rounds), **settings)
    assert code == 0
    return rows_of(output, algorithm)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Rows of runs over 9 rounds, without any checkpoint."""
    output = tmp_path_factory.mktemp("undisturbed")
    return {algorithm: finished_at(9, output, algorithm) for algorithm in PERSONAL}


@pytest.mark.parametrize("algorithm", PERSONAL)
def test_checkpoints_do_not_change_the_numbers(tmp_path, undisturbed, algorithm):
    rows = finished_at(9, tmp_path, algorithm, checkpoint_every=5)
    assert_same_rows(rows, undisturbed[algorithm], 0)
    assert (tmp_path / algorithm / FILE).is_file()


@pytest.mark.parametrize("algorithm", PERSONAL)
def test_stop_at_round_5_and_resume(tmp_path, undisturbed, algorithm):
    finished_at(5, tmp_path, algorithm, checkpoint_every=5)
    rows = finished_at(9, tmp_path, algorithm, checkpoint_every=5, resume=str(tmp_path))
    assert_same_rows(rows, undisturbed[algorithm], 1e-12)
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(seconds)


def test_a_run_goes_on_in_another_folder(tmp_path, undisturbed):
    first, second = tmp_path / "first", tmp_path / "second"
    finished_at(5, first, "fedrep", checkpoint_every=5)
    rows = finished_at(9, second, "fedrep", checkpoint_every=5, resume=str(first))
    assert_same_rows(rows, undisturbed["fedrep"], 1e-12)
    summary = json_of(second / "summary.json")["algorithms"]["fedrep"]
    assert summary["bytes"] == sum(r["bytes-down"] + r["bytes-up"] for r in rows)
    lines = (second / "fedrep" / "metrics.csv").read_text().splitlines()[1:]
    assert {int(line.split(",")[3]) for line in lines} == set(range(10))
    assert len(rows_of(first, "fedrep")) == 5


@pytest.mark.parametrize("algorithm", PERSONAL)
def test_a_crash_between_checkpoints(tmp_path, monkeypatch, undisturbed, algorithm):
    # Rounds 6 to 8 are trained, and their replies have counted; the server goes back to
    # round 5, and the clients with it.
    with monkeypatch.context() as patched:
        die_in(patched, 8)
        with pytest.raises(Killed):
            finished_at(9, tmp_path, algorithm, checkpoint_every=5)
    rows = finished_at(9, tmp_path, algorithm, checkpoint_every=5, resume=str(tmp_path))
    assert_same_rows(rows, undisturbed[algorithm], 1e-12)


def test_a_crash_after_an_end_between_checkpoints(tmp_path, monkeypatch, undisturbed):
    # The last round, 6, has a checkpoint as well, though it is no multiple of 5.
    finished_at(6, tmp_path, "fedper", checkpoint_every=5)
    resume = {"checkpoint_every": 5, "resume": str(tmp_path)}
    with monkeypatch.context() as patched:
        die_in(patched, 8)
        with pytest.raises(Killed):
            finished_at(9, tmp_path, "fedper", **resume)
    rows = finished_at(9, tmp_path, "fedper", **resume)
    assert_same_rows(rows, undisturbed["fedper"], 1e-12)


def test_a_crash_after_a_checkpoint_that_failed(tmp_path, monkeypatch, undisturbed):
    write = Checkpoint.write

    def fail_later(checkpoint: Checkpoint, directory: Path) -> None:
        if checkpoint.server_round > 3:
            raise OSError(28, "No space left on device")
        write(checkpoint, directory)

    # There is one of round 3 and none of round 6.
    with monkeypatch.context() as patched:
        patched.setattr(Checkpoint, "write", fail_later)
        die_in(patched, 8)
        with pytest.raises(Killed):
            finished_at(9, tmp_path, "fedper", checkpoint_every=3)
    rows = finished_at(9, tmp_path, "fedper", checkpoint_every=3, resume=str(tmp_path))
    assert_same_rows(rows, undisturbed["fedper"], 1e-12)


def test_resume_without_further_checkpoints(tmp_path, undisturbed):
    finished_at(5, tmp_path, "fedrep", checkpoint_every=5)
    rows = finished_at(9, tmp_path, "fedrep", resume=str(tmp_path))
    assert_same_rows(rows, undisturbed["fedrep"], 1e-12)


def test_resume_into_another_directory(tmp_path, undisturbed):
    finished_at(5, tmp_path / "a", "fedrep", checkpoint_every=5)
    rows = finished_at(
        9, tmp_path / "b", "fedrep", checkpoint_every=5, resume=str(tmp_path / "a")
    )
    assert_same_rows(rows[-4:], undisturbed["fedrep"][5:], 1e-12)


def test_resume_where_the_run_was_is_the_default(tmp_path, undisturbed, monkeypatch):
    monkeypatch.chdir(tmp_path)
    finished_at(5, tmp_path / "there", "fedper", checkpoint_every=5)
    options = {**STEADY, "checkpoint_every": 5}
    text = " ".join(f"{n.replace('_', '-')}={v!r}" for n, v in options.items())
    text += f" resume='{tmp_path / 'there'}'"
    arguments = ["fedper", "--backend", "inline", "--rounds", "9"]
    code = simulation.main([*arguments, "--run-config", text])
    assert code == 0
    rows = rows_of(tmp_path / "there", "fedper")
    assert_same_rows(rows, undisturbed["fedper"], 1e-12)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_resume_a_run_that_is_over(tmp_path, undisturbed):
    rows = finished_at(5, tmp_path, "fedper", checkpoint_every=5)
    again = finished_at(5, tmp_path, "fedper", checkpoint_every=5, resume=str(tmp_path))
    assert_same_rows(again, rows, 0)


def test_linear_fedrep_resumes(tmp_path):
    linear = {"task": "linear", "samples": 10, "head_steps": 10}
    whole = finished_at(9, tmp_path / "a", "fedrep", **linear)
    finished_at(5, tmp_path / "b", "fedrep", checkpoint_every=5, **linear)
    rows = finished_at(
        9,
        tmp_path / "b",
        "fedrep",
        checkpoint_every=5,
        resume=str(tmp_path / "b"),
        **linear,
    )
    assert_same_rows(rows, whole, 1e-12)


def test_a_new_run_does_not_take_an_old_run_s_heads(tmp_path):
    first, second = (
        finished_at(3, tmp_path, "fedrep", checkpoint_every=2) for _ in range(2)
    )
    assert_same_rows(first, second, 0)


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("strategies.server.checkpoint.write_atomically", full)
    assert run(tmp_path, "fedavg", "--rounds", "2", checkpoint_every=1) == 0
    assert len(rows_of(tmp_path, "fedavg")) == 2
