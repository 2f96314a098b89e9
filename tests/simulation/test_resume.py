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

from flwr_frl import cli
from flwr_frl.clients.device import account, state
from flwr_frl.strategies.report.report import Report
from flwr_frl.strategies.server.checkpoint import Checkpoint
from flwr_frl.task.checkpoint import FILE


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
    code = cli.main([*arguments, "--run-config", text])
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
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("flwr_frl.strategies.server.checkpoint.write_atomically", full)
    assert run(tmp_path, "fedavg", "--rounds", "2", checkpoint_every=1) == 0
    assert len(rows_of(tmp_path, "fedavg")) == 2


@pytest.mark.parametrize("algorithm", ["fedrep", "apfl"])
def test_a_kill_after_the_last_checkpoint_loses_nothing(
    tmp_path, monkeypatch, algorithm
):
    # Without checkpoints on the way clients keep their states in memory.
    expected = finished_at(7, tmp_path / "whole", algorithm)

    def die(*_: object) -> None:
        raise Killed

    output = tmp_path / "killed"
    with monkeypatch.context() as patched:
        patched.setattr(Report, "finish", die)
        with pytest.raises(Killed):
            finished_at(5, output, algorithm)
    rows = finished_at(7, output, algorithm, resume=str(output))
    assert_same_rows(rows, expected, 1e-12)


def test_no_checkpoint_is_written_before_what_it_relies_on(tmp_path, monkeypatch):
    write, found = Checkpoint.write, []

    def look(checkpoint: Checkpoint, directory: Path) -> None:
        found.append(len(list(directory.glob("clients/*/*.safetensors"))))
        write(checkpoint, directory)

    monkeypatch.setattr(Checkpoint, "write", look)
    finished_at(3, tmp_path, "fedrep", fraction_train=1.0)
    assert found == [5]


def test_a_disk_that_was_full_for_a_while_loses_nothing(tmp_path, monkeypatch):
    expected = finished_at(7, tmp_path / "whole", "fedrep", checkpoint_every=1)
    write, refused = state.write_atomically, []

    def refuse(path: Path, data: bytes, **options: int) -> None:
        if path.name[-20:-12] in ("00000002", "00000003") and len(refused) < 4:
            refused.append(path.name)
            raise OSError(28, "No space left on device")
        write(path, data, **options)

    output = tmp_path / "full"
    with monkeypatch.context() as patched:
        patched.setattr(state, "write_atomically", refuse)
        finished_at(4, output, "fedrep", checkpoint_every=1)
    assert refused
    rows = finished_at(7, output, "fedrep", checkpoint_every=1, resume=str(output))
    assert_same_rows(rows, expected, 1e-12)


def test_one_client_that_cannot_be_kept_costs_no_other(tmp_path, monkeypatch, caplog):
    write = account.write_atomically

    def refuse(path: Path, data: bytes, **options: int) -> None:
        if path.parent.name.startswith("000001"):
            raise OSError(28, "No space left on device")
        write(path, data, **options)

    monkeypatch.setattr(account, "write_atomically", refuse)
    private = {"dp_noise": 1.0, "dp_clip": 1.0, "dp_delta": 1e-5}
    finished_at(2, tmp_path, "fedrep", fraction_train=1.0, **private)
    kept = {p.parent.name for p in tmp_path.rglob("clients/*/*.safetensors")}
    assert len(kept) == 5
    assert len(list(tmp_path.rglob("privacy.json"))) == 4
    assert caplog.text.count("the state of client 000001 is in memory only: ") == 1


def test_a_run_that_has_not_begun_is_not_said_to_go_on(tmp_path, monkeypatch, capsys):
    die_in(monkeypatch, 1, KeyboardInterrupt)
    assert run(tmp_path, "fedrep", "--rounds", "2", **STEADY) == 130
    assert capsys.readouterr().err.endswith("interrupted\n")
    monkeypatch.undo()
    die_in(monkeypatch, 2, KeyboardInterrupt)
    assert run(tmp_path, "fedrep", "--rounds", "2", **STEADY) == 130
    assert (
        f"continue with --run-config 'resume=\"{tmp_path}\"'" in capsys.readouterr().err
    )
