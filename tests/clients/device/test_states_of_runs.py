"""Personal states of several runs: reuse, retention and deletion."""

import os
from pathlib import Path

import pytest
from client_messages import new_context
from state_values import files_in, head, on_disk, value_of

from flwr_frl.clients.device.state import PersonalState


def test_an_earlier_run_s_state_is_used_until_a_version_is_acknowledged(tmp_path):
    on_disk(tmp_path, run="first").save(head(7), 30)
    context, run = new_context(), {"directory": tmp_path, "run": "second"}
    state = PersonalState(context, acknowledged=0, **run)
    assert (state.round, value_of(state)) == (0, 7)
    state.save(head(8), 1)
    # Round 1 was not acknowledged, so the state of the first run is still used.
    assert value_of(on_disk(tmp_path, 0, run="second")) == 7
    PersonalState(context, acknowledged=0, **run).save(head(9), 2)
    assert value_of(PersonalState(context, acknowledged=2, **run)) == 9
    # Both runs may still be in progress, so neither deletes the other's files.
    assert "first-00000030.safetensors" in files_in(tmp_path)
    assert value_of(on_disk(tmp_path, 30, run="first")) == 7


def set_back_clock(*paths: Path) -> None:
    """Set file times in 2036, each older than the one before it in the arguments."""
    for i, path in enumerate(paths):
        os.utime(path, ns=((2_100_000_000 - i) * 10**9,) * 2)


def test_files_of_the_newest_eight_earlier_runs_are_kept(tmp_path):
    for i in range(12):
        on_disk(tmp_path, run=f"r{i}").save(head(i), 5)
        files = [tmp_path / f"r{j}-00000005.safetensors" for j in range(i + 1)]
        set_back_clock(*filter(Path.exists, files))
    on_disk(tmp_path, run="now").save(head(1), 1)
    stay = [f"r{i}-00000005.safetensors" for i in range(4, 12)]
    assert files_in(tmp_path) == sorted([*stay, "now-00000001.safetensors"])


def test_directories_of_the_newest_eight_runs_are_kept(tmp_path):
    def place(run: str, client: str = "pi") -> Path:
        return tmp_path / f"run-{run}" / client

    def save(run: str, round_: int) -> None:
        on_disk(place(run), run=run).save(head(1), round_)

    for i in range(8):
        save(f"r{i}", 5)
    # A run is as old as its newest file.
    save("r0", 6)
    # A privacy budget (r1) and files of unknown names (r3) are never deleted.
    (place("r1") / "privacy.json").touch()
    (place("r3") / "r3-00000005.safetensors").rename(place("r3") / "a-00000005")
    place("r2", "other").mkdir()
    # Partial files of killed processes are deleted with their run.
    (place("r4") / f".r4-00000006.safetensors.{'a' * 16}.partial").touch()
    for i in range(8, 14):
        save(f"r{i}", 5)
        places = (place(f"r{j}") for j in range(i + 1))
        set_back_clock(*filter(Path.exists, places))
    save("now", 1)
    stay = {path.parent.name for path in tmp_path.glob("*/pi")}
    expected = {f"run-r{i}" for i in (0, 1, 3, *range(7, 14))}
    assert stay == {"run-now", *expected}
    assert value_of(on_disk(place("now"), run="now")) == 1
    assert place("r2", "other").exists()
    assert not place("r4").parent.exists()


@pytest.mark.parametrize("link", ["run-old", "run-old/pi"])
def test_linked_directories_of_runs_are_not_deleted(tmp_path, link):
    theirs = tmp_path / "theirs" / "pi"
    on_disk(theirs, run="old").save(head(1), 1)
    root = tmp_path / "state"
    (root / link).parent.mkdir(parents=True)
    (root / link).symlink_to(theirs if link.endswith("pi") else theirs.parent)
    runs = [f"r{i}" for i in range(10)]
    for run in runs:
        on_disk(root / f"run-{run}" / "pi", run=run).save(head(1), 1)
    assert [run for run in runs if not (root / f"run-{run}").exists()] == ["r0"]
    assert files_in(theirs) == ["old-00000001.safetensors"]


def test_an_experiment_deletes_no_sibling_directories(tmp_path):
    for folder in (*(f"run-r{i}" for i in range(12)), "lab"):
        on_disk(tmp_path / folder / "pi", run="x").save(head(1), 1)
    assert len(list(tmp_path.glob("run-*/pi/x-00000001.safetensors"))) == 12


def test_the_newest_earlier_run_is_used_regardless_of_file_times(tmp_path):
    paths = []
    for run, value in (("b", 1), ("a", 2), ("c", 3)):
        on_disk(tmp_path, run=run).save(head(value), 5)
        paths.append(tmp_path / f"{run}-00000005.safetensors")
    set_back_clock(*paths)
    assert value_of(on_disk(tmp_path, 0, run="d")) == 3
    # The run that wrote last counts as the newest, although it began first.
    on_disk(tmp_path, run="b").save(head(4), 6)
    set_back_clock(*reversed(paths), tmp_path / "b-00000006.safetensors")
    assert value_of(on_disk(tmp_path, 0, run="d")) == 4
