"""Personal states: which versions are used, kept and deleted."""

import os
import pickle
import time
from pathlib import Path

import numpy as np
import pytest
from client_messages import new_context
from disks import full
from flwr.app import ConfigRecord
from safetensors.numpy import load_file
from state_values import file_of, head, on_disk, rounds_on, run_rounds, value_of

from flwr_frl.clients.device.state import PersonalState, Version, needed

FITS = {"head.weight": (2, 3)}
UNUSABLE = "its file cannot be used"
LOST = "the version of round {} is missing; restore state-dir from a backup, or go on "
LOST += "without it"


def test_loaded_values_equal_saved_ones(tmp_path):
    # Not contiguous in memory, like the weights of a channels-last convolution
    strided = np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(0, 2, 1)
    arrays = {
        "a": strided,
        "fortran": np.asfortranarray(strided),
        "scalar": np.array(7, np.int64),
        "double": np.array([1e-300, np.pi]),
    }
    context = new_context()
    PersonalState(context, tmp_path).save(arrays, 1)
    for state in (PersonalState(context, tmp_path), on_disk(tmp_path)):
        loaded = state.load()
        np.testing.assert_equal(loaded, arrays)
        for name, value in arrays.items():
            assert (loaded[name].dtype, loaded[name].shape) == (
                value.dtype,
                value.shape,
            )


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize(
    ("saved", "acknowledged", "expected"),
    [
        ([], None, None),
        ([(0, 1, 1)], 0, None),
        ([(0, 1, 1)], 1, 1),
        # A repeated round replaces its version.
        ([(0, 2, 2), (2, 3, 3), (2, 3, 33)], 3, 33),
        # Without an acknowledged round, the newest version is used.
        ([(0, 2, 2), (2, 4, 4)], None, 4),
    ],
)
def test_the_newest_acknowledged_version_is_used(
    tmp_path, stored, saved, acknowledged, expected
):
    context, run = new_context(), {"run": "r", "client": "café"}
    directory = tmp_path if stored else None
    for before, round_, value in saved:
        PersonalState(context, directory, before, **run).save(head(value), round_)
    # Files outlive the process, records in memory do not.
    context = new_context() if stored else context
    assert value_of(PersonalState(context, directory, acknowledged, **run)) == expected


def test_memory_holds_at_most_two_versions_and_other_records_stay():
    context = new_context()
    context.state["other"] = ConfigRecord({"x": 1})
    for r in range(1, 9):
        PersonalState(context, None, r - 1, r - 1).save(head(r), r)
        versions = {f"personal-{n}" for n in (r - 1, r) if n}
        assert {*context.state} == {"other", *versions}


# Deleting


@pytest.mark.parametrize(
    ("rounds", "acknowledged", "checkpoint", "kept"),
    [
        ([1], 0, 0, [1]),
        # The acknowledged version, its predecessor, and the two newest ones
        ([1, 2, 3, 4, 5], 4, 0, [3, 4, 5]),
        ([1, 2, 3, 4, 5], 3, 0, [2, 3, 4, 5]),
        # A server that restarts from its checkpoint needs the version of round 3.
        ([1, 3, 6, 7, 8, 9], 8, 5, [3, 7, 8, 9]),
        # It then trains in round 6 again: the version that was written last stays.
        ([1, 3, 7, 8, 9, 6], 3, 5, [1, 3, 6, 8, 9]),
        # A repeated round replaces its version.
        ([1, 2, 3, 3], 2, 0, [1, 2, 3]),
        # Whatever a server acknowledges, the newest versions stay.
        ([10, 11, 12, 6], 0, 0, [6, 11, 12]),
        ([10, 11, 12, 13], 10**6, 10**6, [12, 13]),
    ],
)
def test_versions_that_a_server_may_need_are_kept(
    tmp_path, rounds, acknowledged, checkpoint, kept
):
    versions = [Version(i, 0, "r", round_, tmp_path) for i, round_ in enumerate(rounds)]
    chosen = needed(versions, acknowledged, checkpoint)
    assert sorted(version.round for version in chosen) == kept
    assert versions[-1] in chosen


def test_saving_deletes_superseded_files(tmp_path):
    context = new_context()
    run_rounds(context, [3], tmp_path)
    for r, acknowledged in ((6, 3), (7, 6), (8, 7), (9, 8)):
        PersonalState(context, tmp_path, acknowledged, 5).save(head(r), r)
    assert rounds_on(tmp_path) == [3, 7, 8, 9]
    # The server has crashed and resumes from its checkpoint of round 5.
    state = on_disk(tmp_path, 3, 5)
    assert value_of(state) == 3
    state.save(head(66), 6)
    assert value_of(on_disk(tmp_path, 6, 5)) == 66


def test_state_files_are_plain_safetensors_readable_only_by_the_owner(tmp_path):
    path = on_disk(tmp_path / "new", None, 5, run="r").save(head(4), 7)
    assert path.name == "00000001-00000005-r-00000007.safetensors"
    assert load_file(path)["head.weight"].tolist() == [[4.0] * 3] * 2
    assert path.stat().st_mode & 0o777 == 0o600


# Damaged files and files of other clients or models


def damage(path):
    """Change one byte of the values, so that the file is still a safetensors file."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "spoil",
    [
        damage,
        lambda path: path.write_bytes(path.read_bytes()[:-5]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(pickle.dumps({"head.weight": 1})),
    ],
    ids=["a byte", "cut off", "empty", "a pickle"],
)
def test_a_damaged_file_is_set_aside_and_the_version_before_it_used(
    tmp_path, caplog, spoil
):
    run_rounds(new_context(), [1, 2], tmp_path)
    path = file_of(tmp_path, 2)
    spoil(path)
    state = on_disk(tmp_path, 2)
    assert (value_of(state), state.round) == (1, 1)
    assert f"{path.name} is not used: " in caplog.text
    # The file is kept for inspection.
    on_disk(tmp_path, 3).save(head(3), 3)
    assert path.with_name(f"{path.name}.set-aside").exists()
    # Without another version, the client starts from scratch.
    for round_ in (1, 3):
        damage(file_of(tmp_path, round_))
    state = on_disk(tmp_path, 3)
    assert (state.load(), state.round) == (None, 0)


@pytest.mark.parametrize(
    ("now", "shapes", "reason"),
    [
        ({}, FITS, ""),
        ({"classes": '["cat", "dog"]'}, {"head.weight": (4, 3)}, "its classes: "),
        ({"algorithm": "a:FedPer"}, FITS, "its algorithm: a:FedRep, not a:FedPer"),
        *(
            ({}, no, "its shapes: ")
            for no in ({"head.weight": (4, 3)}, {}, {"o": (2,)})
        ),
        # For example, a copied SD card
        ({"client": "pi-2"}, FITS, "its client: pi-1, not pi-2"),
        ({"damaged": "yes"}, FITS, "checksum"),
    ],
)
def test_an_earlier_run_s_file_that_does_not_fit_is_not_used(
    tmp_path, caplog, now, shapes, reason
):
    about = {"classes": '["cat"]', "algorithm": "a:FedRep"}
    on_disk(tmp_path, run="r", client="pi-1", about=about).save(head(1), 1)
    (path,) = tmp_path.iterdir()
    if "damaged" in now:
        damage(path)
    data = path.read_bytes()
    about = {name: now.get(name, text) for name, text in about.items()}
    client = now.get("client", "pi-1")
    state = on_disk(tmp_path, run="s", client=client, about=about)
    assert (state.load(shapes) is None) is bool(state.unused) is bool(reason)
    assert reason in caplog.text
    # Names of classes are private.
    assert "cat" not in state.unused
    # A file of another client or model is left untouched.
    assert "damaged" in now or path.read_bytes() == data


def test_a_lost_state_is_reported():
    # The server has acknowledged round 3, but the process is new.
    for acknowledged, reason in ((3, LOST.format(3)), (None, ""), (0, "")):
        state = on_disk(None, acknowledged)
        assert (state.load(), state.unused) == (None, reason)


@pytest.mark.parametrize("lose", [damage, Path.unlink])
def test_a_version_of_an_earlier_run_does_not_hide_a_lost_one(tmp_path, lose):
    on_disk(tmp_path, run="old").save(head(7), 30)
    on_disk(tmp_path, 0, run="new").save(head(1), 1)
    lose(file_of(tmp_path, 1, "new"))
    for _ in range(2):
        state = on_disk(tmp_path, 1, run="new")
        assert value_of(state) == 7
        assert state.unused in (UNUSABLE, LOST.format(1))


def test_damage_found_by_an_evaluation_is_reported_by_the_next_training(tmp_path):
    run_rounds(new_context(), [1, 2, 3], tmp_path)
    damage(file_of(tmp_path, 3))
    for reason in (UNUSABLE, LOST.format(3)):
        state = on_disk(tmp_path, 3)
        assert (value_of(state), state.unused) == (2, reason)
    # Once the client has trained on the older version, nothing is missing any more.
    state.save(head(4), 4)
    state = on_disk(tmp_path, 4)
    assert (value_of(state), state.unused) == (4, "")


def test_unfinished_files_of_killed_writers_are_deleted(tmp_path):
    run_rounds(new_context(), [1, 2], tmp_path)
    names = ["00000003-00000000-r-00000009.safetensors", "a.json", "privacy.json"]
    paths = [tmp_path / f".{name}.{'0' * 16}.partial" for name in names]
    for path, seconds in zip(paths, (0, -3700, 10**8), strict=True):
        path.write_bytes(b"half")
        os.utime(path, (time.time() + seconds,) * 2)
    # Another process may still be writing the first one.
    on_disk(tmp_path, 2).save(head(3), 3)
    assert [path for path in paths if path.exists()] == paths[:1]


@pytest.mark.parametrize("fault", ["full", "no directory"])
def test_a_state_that_cannot_be_written_stays_in_memory(
    tmp_path, caplog, monkeypatch, fault
):
    context = new_context()
    directory = tmp_path if fault == "full" else Path("/proc/nowhere")
    if fault == "full":
        run_rounds(context, [1], tmp_path)
        monkeypatch.setattr("flwr_frl.clients.device.state.write_atomically", full)
    PersonalState(context, directory, 1).save(head(2), 2)
    assert "state of round 2 is kept in memory only" in caplog.text
    assert value_of(PersonalState(context, directory, 2)) == 2
    assert rounds_on(tmp_path) == ([1] if fault == "full" else [])


@pytest.mark.parametrize(
    ("acknowledged", "checkpointed", "used"),
    [(11, 11, 11), (5, 5, 12), (0, 5, 12), (0, 11, 0)],
)
def test_a_server_that_is_behind_costs_no_state(
    tmp_path, acknowledged, checkpointed, used
):
    # The server may have been restored before this client first took part.
    run_rounds(new_context(), range(1, 13), tmp_path, checkpointed=11)
    state = on_disk(tmp_path, acknowledged, checkpointed=checkpointed)
    state.load()
    assert state.round == used
    assert ("is behind" in state.unused) == (used == 12)


# Several runs


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
    assert value_of(on_disk(tmp_path, 30, run="first")) == 7


def test_the_run_that_wrote_last_counts_as_the_newest(tmp_path):
    for run, value in (("b", 1), ("a", 2), ("c", 3)):
        on_disk(tmp_path, run=run).save(head(value), 5)
    # File times are unreliable.
    os.utime(file_of(tmp_path, 5, "a"), (2_100_000_000,) * 2)
    assert value_of(on_disk(tmp_path, 0, run="d")) == 3
    on_disk(tmp_path, run="b").save(head(4), 6)
    assert value_of(on_disk(tmp_path, 0, run="d")) == 4


@pytest.fixture
def keep_eight(monkeypatch):
    monkeypatch.setattr("flwr_frl.clients.device.state.KEPT", 8)


@pytest.mark.parametrize("separate", [False, True])
def test_the_newest_versions_of_other_runs_are_kept(tmp_path, separate, keep_eight):
    def place(run: str) -> Path:
        return tmp_path / f"run-{run}" / "pi" if separate else tmp_path

    def save(run: str, round_: int) -> None:
        on_disk(place(run), run=run).save(head(1), round_)

    for i in range(8):
        save(f"r{i}", 5)
    save("r0", 6)
    # Privacy accounts and folders of other clients are never deleted.
    others = [place("r1") / "privacy.json", place("r2").parent / "other"]
    for path in others:
        path.mkdir()
    for i in range(8, 14):
        save(f"r{i}", 5)
    save("now", 1)
    left = {path.name.split("-")[2] for path in tmp_path.rglob("*.safetensors")}
    assert left == {"now", *(f"r{i}" for i in (0, *range(7, 14)))}
    assert all(path.exists() for path in others)
    assert value_of(on_disk(place("now"), run="now")) == 1
    assert not separate or not place("r4").parent.exists()


@pytest.mark.parametrize("link", ["run-old", "run-old/pi"])
def test_linked_directories_of_runs_are_not_deleted(tmp_path, link, keep_eight):
    theirs = tmp_path / "theirs" / "pi"
    on_disk(theirs, run="old").save(head(1), 1)
    root = tmp_path / "state"
    (root / link).parent.mkdir(parents=True)
    (root / link).symlink_to(theirs if link.endswith("pi") else theirs.parent)
    runs = [f"r{i}" for i in range(10)]
    for run in runs:
        on_disk(root / f"run-{run}" / "pi", run=run).save(head(1), 1)
    assert [run for run in runs if not (root / f"run-{run}").exists()] == ["r0"]
    assert rounds_on(theirs) == [1]


def test_an_experiment_deletes_no_sibling_directories(tmp_path, keep_eight):
    for folder in (*(f"run-r{i}" for i in range(12)), "lab"):
        on_disk(tmp_path / folder / "pi", run="x").save(head(1), 1)
    assert len(list(tmp_path.glob("run-*/pi/*-x-00000001.safetensors"))) == 12
