"""Files of a run: no other file is lost, and every run can be resumed."""

import json
import os
import shlex
import signal
from pathlib import Path

import pytest
from command_line import STEADY as USUAL
from command_line import assert_same_rows, config_of, die_in, one_error, rows_of, run
from disks import full

from flwr_frl.common.checkpoint import FILE
from flwr_frl.results.output import archive_run, locked, prepare_directory
from flwr_frl.results.processes import HANG_UP
from flwr_frl.results.report import Report

STEADY = {**USUAL, "fraction_train": 1.0}

# A state of a simulated client
STATE = "00000001-00000000-r-00000001.safetensors"


def go(output: Path, *algorithms: str, rounds: int, code: int = 0, **more) -> None:
    assert run(output, *algorithms, "--rounds", str(rounds), **STEADY, **more) == code


@pytest.mark.parametrize("algorithm", ["fedrep", "scaffold"])
def test_ctrl_c_leaves_a_checkpoint_and_a_hint(
    tmp_path, monkeypatch, capsys, algorithm
) -> None:
    uninterrupted, parts = tmp_path / "whole", tmp_path / "parts"
    # The path has a missing folder and its parent.
    go(tmp_path / "no" / ".." / "whole", algorithm, rounds=4)
    with monkeypatch.context() as patched:
        die_in(patched, 3, KeyboardInterrupt)
        go(parts, algorithm, rounds=4, code=130)
    last_line = capsys.readouterr().err.strip().splitlines()[-1]
    hint = f"""interrupted; continue with --run-config 'resume="{parts}"'"""
    assert last_line == hint
    assert (parts / algorithm / FILE).is_file()
    assert len(rows_of(parts, algorithm)) == 2
    # The hint is appended to the command.
    typed = algorithm, "--rounds", "4", *config_of(STEADY)
    assert run(parts, *typed, *shlex.split(hint)[3:]) == 0
    assert_same_rows(
        rows_of(parts, algorithm), rows_of(uninterrupted, algorithm), 1e-12
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, *HANG_UP])
def test_other_signals_are_handled_as_ctrl_c(tmp_path, monkeypatch, number) -> None:
    # Under nohup, SIGHUP is ignored and would not be handled.
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with monkeypatch.context() as patched:
            die_in(patched, 2, lambda: signal.raise_signal(number))
            go(tmp_path, "fedavg", rounds=3, code=130)
        assert (tmp_path / "fedavg" / FILE).is_file()
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_second_run_archives_the_first(tmp_path, caplog) -> None:
    go(tmp_path, "fedrep", "fedavg", rounds=2)
    first = rows_of(tmp_path, "fedrep")
    saved = (tmp_path / "fedrep" / FILE).read_bytes()
    go(tmp_path, "fedrep", rounds=1, seed=7)
    (aside,) = tmp_path.glob("earlier-*")
    line = f'the earlier run was moved to {aside}; continue it with resume="{aside}"'
    assert line in caplog.text
    assert (aside / "fedrep" / FILE).read_bytes() == saved
    assert rows_of(aside, "fedrep") == first
    # The earlier run can be resumed, including its clients' heads.
    go(aside, "fedrep", rounds=4, resume=str(aside))
    uninterrupted = tmp_path / "whole"
    go(uninterrupted, "fedrep", rounds=4)
    assert_same_rows(rows_of(aside, "fedrep"), rows_of(uninterrupted, "fedrep"), 1e-12)


def test_earlier_runs_are_archived_beside_each_other(tmp_path) -> None:
    directory = tmp_path / "fedrep"
    (directory / "clients").mkdir(parents=True)
    parts = (FILE, "clients.json", "metrics.jsonl")
    for part in parts:
        (directory / part).touch()
    archive_run(tmp_path, "fedrep")
    (aside,) = tmp_path.glob("earlier-*")
    kept = {path.name for path in (aside / "fedrep").iterdir()}
    assert kept == {"clients", *parts}
    # A second earlier run is kept next to it, and not moved into a link.
    (tmp_path / "theirs").mkdir()
    aside.with_name(f"{aside.name}-2").symlink_to(tmp_path / "theirs")
    directory.mkdir()
    (directory / FILE).touch()
    archive_run(tmp_path, "fedrep")
    assert len(list(tmp_path.glob(f"earlier-*/fedrep/{FILE}"))) == 2
    assert list((tmp_path / "theirs").iterdir()) == []


def test_two_runs_of_an_algorithm_cannot_share_a_folder(tmp_path, capsys) -> None:
    with locked(tmp_path, "fedavg"):
        go(tmp_path, "fedavg", rounds=1, code=2)
        assert "another run is writing to" in one_error(capsys.readouterr().err)
        # Another algorithm may write to the folder.
        go(tmp_path, "fedper", rounds=1)
    go(tmp_path, "fedavg", rounds=1)


def test_a_full_disk_delays_metrics(tmp_path, monkeypatch) -> None:
    go(tmp_path / "whole", "fedavg", rounds=5)
    add = Report.add

    def in_a_few_rounds(report: Report, row: dict, clients: dict) -> None:
        with monkeypatch.context() as patched:
            if row["round"] in (2, 3):
                patched.setattr(os, "fsync", full)
            add(report, row, clients)

    with monkeypatch.context() as patched:
        patched.setattr(Report, "add", in_a_few_rounds)
        go(tmp_path / "full", "fedavg", rounds=5)
    rows = rows_of(tmp_path / "full", "fedavg")
    assert_same_rows(rows, rows_of(tmp_path / "whole", "fedavg"), 0)


OF_ALGORITHM = ("checkpoint.safetensors", "metrics.jsonl", "clients.json")
OF_RUN = ("summary.json", "report.html")


@pytest.mark.parametrize("name", [*(f"fedrep/{n}" for n in OF_ALGORITHM), *OF_RUN])
def test_a_file_that_cannot_be_written_is_an_error(tmp_path, monkeypatch, capsys, name):
    replace, file = os.replace, tmp_path / name

    def refuse(partial: Path, path: Path) -> None:
        if path == file:
            full()
        replace(partial, path)

    monkeypatch.setattr(os, "replace", refuse)
    go(tmp_path, "fedrep", rounds=1, code=2)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"error: output is {str(tmp_path)!r}")
    named = " and ".join(OF_RUN) if name in OF_RUN else name
    assert f"not written: {named}; " in last


def test_a_run_killed_after_its_last_round_is_reported_again(tmp_path) -> None:
    go(tmp_path, "fedrep", rounds=3)
    clients = json.loads((tmp_path / "fedrep" / "clients.json").read_text())
    summary = json.loads((tmp_path / "summary.json").read_text())
    rows = rows_of(tmp_path, "fedrep")
    (tmp_path / "fedrep" / "clients.json").unlink()
    (tmp_path / "summary.json").unlink()
    go(tmp_path, "fedrep", rounds=3, resume=str(tmp_path))
    assert json.loads((tmp_path / "fedrep" / "clients.json").read_text()) == clients
    again = json.loads((tmp_path / "summary.json").read_text())
    assert again["algorithms"] == summary["algorithms"]
    assert rows_of(tmp_path, "fedrep") == rows


def test_a_folder_that_cannot_be_created_is_a_one_line_error(tmp_path, capsys):
    (tmp_path / "file").touch()
    go(tmp_path / "file" / "out", "fedavg", rounds=1, code=2)
    assert "Not a directory: " in one_error(capsys.readouterr().err)


# Links


def states_in(folder: Path) -> Path:
    """Fill a foreign folder with entries like those of simulated clients; return it."""
    for number in ("000001", "000002"):
        (folder / number).mkdir(parents=True)
        (folder / number / STATE).write_text("theirs")
        (folder / number / "photo.jpg").write_text("theirs")
    return folder


def texts_in(folder: Path) -> list[str]:
    return [path.read_text() for path in folder.rglob("*.*")]


@pytest.mark.parametrize("link", ["fedrep", "fedrep/clients", "fedrep/clients/000001"])
def test_a_link_in_the_output_is_refused_and_its_target_unchanged(
    tmp_path, capsys, link
) -> None:
    theirs = states_in(tmp_path / "theirs" / "clients")
    lead = {"fedrep": theirs.parent, "fedrep/clients": theirs}
    place = tmp_path / "out" / link
    place.parent.mkdir(parents=True)
    place.symlink_to(lead.get(link, theirs / "000001"))
    go(tmp_path / "out", "fedrep", rounds=1, code=2)
    error = one_error(capsys.readouterr().err)
    assert f"output: {str(place)!r} is a link; expected a " in error
    assert texts_in(theirs) == ["theirs"] * 4
    assert len(list(theirs.rglob("*"))) == 6


def test_only_files_named_like_client_states_are_removed_or_copied(tmp_path):
    states_in(tmp_path / "own" / "clients")
    directory = tmp_path / "own" / "clients" / "000001"
    ours = ("00000002-00000000-r-00000002.safetensors.set-aside", "privacy.json")
    left = (
        ".00000002-00000000-r-00000002.safetensors.0123456789abcdef.partial",
        f".privacy.json.{'0' * 16}.partial",
    )
    for name in (*ours, *left):
        (directory / name).write_text("ours")
    former = states_in(tmp_path / "former" / "clients") / "000002"
    prepare_directory(tmp_path / "own", None)
    assert texts_in(tmp_path / "own") == ["theirs"] * 2
    assert [path.name for path in directory.iterdir()] == ["photo.jpg"]
    prepare_directory(tmp_path / "own", tmp_path / "former")
    copy = directory.parent / "000002" / STATE
    assert copy.read_bytes() == (former / STATE).read_bytes()
    assert copy.stat().st_mode & 0o777 == 0o600
    assert len(list((tmp_path / "own").rglob("*.*"))) == 4
