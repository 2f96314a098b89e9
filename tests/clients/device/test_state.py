"""Personal states: which versions are used, kept and deleted."""

import contextlib
import errno
import logging
import os
import pickle
import time
from pathlib import Path

import numpy as np
import pytest
from client_messages import new_context
from flwr.app import ConfigRecord, Context
from safetensors.numpy import load_file

from flwr_frl.clients.device.state import PersonalState
from flwr_frl.clients.device.state_file import pack, read_checked

FITS = {"head.weight": (2, 3)}
LOST = "no version is left: it is lost, or fit has not called self.save"


@contextlib.contextmanager
def flower_log(caplog):
    """Let caplog hear Flower's logger, which does not propagate."""
    logger = logging.getLogger("flwr")
    logger.addHandler(caplog.handler)
    try:
        yield
    finally:
        logger.removeHandler(caplog.handler)


def head(value: float) -> dict[str, np.ndarray]:
    return {"head.weight": np.full((2, 3), value, np.float32)}


def value_of(state: PersonalState) -> float | None:
    arrays = state.load()
    return None if arrays is None else float(arrays["head.weight"][0, 0])


def rounds_in(context: Context) -> list[int]:
    return sorted(int(name.split("-")[1]) for name in context.state)


def rounds_on(directory) -> list[int]:
    return sorted(int(path.stem) for path in directory.glob("*.safetensors"))


def run_rounds(context, rounds, directory=None, checkpointed=0):
    """Train in some rounds, each of which counts; the value is the round's number."""
    acknowledged = 0
    for r in rounds:
        state = PersonalState(context, directory, acknowledged, checkpointed)
        state.save(head(r), r)
        acknowledged = r


def test_loaded_values_equal_saved_ones(tmp_path):
    # As of a convolution with channels last: not contiguous in memory.
    strided = np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(0, 2, 1)
    arrays = {
        "a": strided,
        "fortran": np.asfortranarray(strided),
        "scalar": np.array(7, np.int64),
        "double": np.array([1e-300, np.pi]),
    }
    context = new_context()
    PersonalState(context, tmp_path).save(arrays, 1)
    for where in (context, new_context()):
        loaded = PersonalState(where, tmp_path).load()
        assert loaded.keys() == arrays.keys()
        for name, value in arrays.items():
            np.testing.assert_array_equal(loaded[name], value)
            assert loaded[name].dtype == value.dtype
            assert loaded[name].shape == value.shape


@pytest.mark.parametrize("on_disk", [False, True])
def test_an_acknowledged_version_is_kept_and_an_unacknowledged_one_deleted(
    tmp_path, on_disk
):
    directory = tmp_path if on_disk else None
    context = new_context()
    run_rounds(context, [2], directory)
    # Round 5 was trained, but its reply never counted: the server still says 2.
    PersonalState(context, directory, 2).save(head(5), 5)
    state = PersonalState(context, directory, 2)
    assert value_of(state) == 2
    # It goes when there is a newer one.
    state.save(head(7), 7)
    if on_disk:
        assert rounds_in(context) == [2, 7]
        assert rounds_on(tmp_path) == [2, 7]
    # And when that did count, 7 it is.
    state = PersonalState(context, directory, 7)
    assert value_of(state) == 7
    state.save(head(8), 8)
    assert rounds_in(context) == [7, 8]
    if on_disk:
        # The one before is what is left if the newest file is damaged.
        assert rounds_on(tmp_path) == [2, 7, 8]


@pytest.mark.parametrize("on_disk", [False, True])
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
    tmp_path, on_disk, saved, acknowledged, expected
):
    context, run = new_context(), {"run": "r", "client": "caf\udce9"}
    directory = tmp_path if on_disk else None
    for before, round_, value in saved:
        PersonalState(context, directory, before, **run).save(head(value), round_)
    # A directory outlives the process.
    context = new_context() if on_disk else context
    assert value_of(PersonalState(context, directory, acknowledged, **run)) == expected


def test_memory_holds_at_most_two_versions_and_other_records_stay():
    context = new_context()
    context.state["other"] = ConfigRecord({"x": 1})
    for r in range(1, 9):
        PersonalState(context, None, r - 1, r - 1).save(head(r), r)
        versions = {f"personal-{n}" for n in (r - 1, r) if n}
        assert {*context.state} == {"other", *versions}


# Going back to a checkpoint


def test_the_version_of_the_checkpoint_stays_on_disk(tmp_path):
    context = new_context()
    run_rounds(context, [3], tmp_path)
    # The server has a checkpoint of round 5; the client trains in 6, 7 and 8.
    run_rounds_after = [(6, 3), (7, 6), (8, 7)]
    for r, acknowledged in run_rounds_after:
        PersonalState(context, tmp_path, acknowledged, 5).save(head(r), r)
    PersonalState(context, tmp_path, 8, 5).save(head(9), 9)
    assert rounds_on(tmp_path) == [3, 7, 8, 9]
    # The server died and goes back: it has acknowledged round 3, its last before 5.
    state = PersonalState(new_context(), tmp_path, 3, 5)
    assert value_of(state) == 3
    # In 6 it trains again; what it has of later rounds is in nobody's way.
    state.save(head(66), 6)
    assert value_of(PersonalState(new_context(), tmp_path, 6, 5)) == 66
    assert rounds_on(tmp_path) == [3, 6, 8, 9]
    # The run has passed them by.
    PersonalState(new_context(), tmp_path, 6, 5).save(head(10), 10)
    assert rounds_on(tmp_path) == [3, 6, 10]


def test_a_file_is_plain_safetensors_that_only_its_owner_may_read(tmp_path):
    PersonalState(new_context(), tmp_path / "new").save(head(4), 7)
    (path,) = (tmp_path / "new").iterdir()
    assert path.name == "00000007.safetensors"
    assert load_file(path)["head.weight"].tolist() == [[4.0] * 3] * 2
    assert path.stat().st_mode & 0o777 == 0o600


# What is on a disk is not trusted


def files_in(directory):
    return sorted(path.name for path in directory.iterdir())


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
    spoil(tmp_path / "00000002.safetensors")
    state = PersonalState(new_context(), tmp_path, 2)
    with flower_log(caplog):
        assert value_of(state) == 1
    assert state.round == 1
    assert "00000002.safetensors is not used and set aside: " in caplog.text
    names = ["00000001.safetensors", "00000002.safetensors.set-aside"]
    assert files_in(tmp_path) == names
    # It stays there: a person may want to look at it.
    PersonalState(new_context(), tmp_path, 3).save(head(3), 3)
    assert "00000002.safetensors.set-aside" in files_in(tmp_path)
    # Without any other version, the client begins anew.
    for name in ("00000001.safetensors", "00000003.safetensors"):
        damage(tmp_path / name)
    state = PersonalState(new_context(), tmp_path, 3)
    assert (state.load(), state.round) == (None, 0)


@pytest.mark.parametrize(
    ("now", "shapes", "reason"),
    [
        ({}, FITS, ""),
        # Other classes explain other shapes; their names stay on the device.
        (
            {"classes": '["cat", "dog"]'},
            {"head.weight": (4, 3)},
            "it is for other classes than the client has now",
        ),
        ({"algorithm": "a:FedPer"}, FITS, "it is of a:FedRep, not a:FedPer"),
        ({}, {"head.weight": (4, 3)}, "it does not fit the model"),
        ({}, {}, "it does not fit the model"),
        ({}, {"other": (2, 3)}, "it does not fit the model"),
        # A copied SD card, say.
        ({"client": "pi-2"}, FITS, "it is of client 'pi-1'"),
        ({"damaged": "yes"}, FITS, "its file is damaged"),
    ],
)
def test_why_a_file_of_an_earlier_run_is_not_used(tmp_path, now, shapes, reason):
    about = {"classes": '["cat"]', "algorithm": "a:FedRep"}
    given = {"client": "pi-1", "about": about}
    PersonalState(new_context(), tmp_path, run="r", **given).save(head(1), 1)
    (path,) = tmp_path.iterdir()
    if "damaged" in now:
        damage(path)
    data = path.read_bytes()
    given["client"] = now.get("client", "pi-1")
    given["about"] = {name: now.get(name, text) for name, text in about.items()}
    state = PersonalState(new_context(), tmp_path, run="s", **given)
    assert (state.load(shapes) is None) is bool(reason)
    assert state.unused.startswith(reason)
    assert bool(state.unused) is bool(reason)
    # A foreign file stays as it is, for the client or the model whose it is.
    assert "damaged" in now or path.read_bytes() == data


def test_a_lost_state_is_reported():
    # The server has counted a reply of round 3; the process is a new one.
    state = PersonalState(new_context(), acknowledged=3)
    assert state.load() is None
    assert state.unused == LOST
    for fresh in (None, 0):
        state = PersonalState(new_context(), acknowledged=fresh)
        assert state.load() is None
        assert state.unused == ""


@pytest.mark.parametrize("lose", [damage, Path.unlink])
def test_a_version_of_an_earlier_run_does_not_hide_a_lost_one(tmp_path, lose):
    PersonalState(new_context(), tmp_path, run="old").save(head(7), 30)
    PersonalState(new_context(), tmp_path, 0, run="new").save(head(1), 1)
    lose(tmp_path / "new-00000001.safetensors")
    for _ in range(2):
        state = PersonalState(new_context(), tmp_path, 1, run="new")
        assert value_of(state) == 7
        assert state.unused in ("its file is damaged", LOST)


def test_damage_found_by_an_evaluation_is_reported_by_the_next_training(tmp_path):
    run_rounds(new_context(), [1, 2, 3], tmp_path)
    damage(tmp_path / "00000003.safetensors")
    said = []
    for _ in "evaluation", "training":
        state = PersonalState(new_context(), tmp_path, 3)
        assert value_of(state) == 2
        said.append(state.unused)
    assert said == ["its file is damaged", "the version of round 3 is missing"]
    # What the training makes of it counts: nothing is missing any more.
    state.save(head(4), 4)
    state = PersonalState(new_context(), tmp_path, 4)
    assert (value_of(state), state.unused) == (4, "")


def test_unfinished_files_are_deleted_after_their_round(tmp_path):
    run_rounds(new_context(), [1, 2], tmp_path)
    of_this_run = tmp_path / f".00000003.safetensors.{'0' * 16}.partial"
    of_another = tmp_path / ".abc-00000009.safetensors.4711"
    account = tmp_path / f".privacy.json.{'0' * 16}.partial"
    for path in (of_this_run, of_another, account):
        path.write_bytes(b"half")
    # Somebody may still be writing them.
    PersonalState(new_context(), tmp_path, 2).save(head(3), 3)
    assert of_this_run.exists()
    PersonalState(new_context(), tmp_path, 3).save(head(4), 4)
    assert not of_this_run.exists()
    assert of_another.exists()
    # One of them was written when the clock was ahead.
    for path, seconds in ((of_another, -3700), (account, 10**8)):
        os.utime(path, (time.time() + seconds,) * 2)
    PersonalState(new_context(), tmp_path, 4).save(head(5), 5)
    assert rounds_on(tmp_path) == [3, 4, 5]
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("fault", ["full", "no directory"])
def test_a_state_that_cannot_be_written_stays_in_memory(
    tmp_path, caplog, monkeypatch, fault
):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    context = new_context()
    directory = tmp_path if fault == "full" else Path("/proc/nowhere")
    if fault == "full":
        run_rounds(context, [1], tmp_path)
        monkeypatch.setattr("flwr_frl.clients.device.state.write_atomically", full)
    with flower_log(caplog):
        PersonalState(context, directory, 1).save(head(2), 2)
    assert "state of round 2 is kept in memory only" in caplog.text
    assert value_of(PersonalState(context, directory, 2)) == 2
    assert rounds_on(tmp_path) == ([1] if fault == "full" else [])


# Runs


def test_a_run_continues_from_an_earlier_run_until_one_of_its_versions_counts(tmp_path):
    first = {"directory": tmp_path, "run": "first"}
    PersonalState(new_context(), **first).save(head(7), 30)
    second = {"directory": tmp_path, "run": "second"}
    context = new_context()
    state = PersonalState(context, acknowledged=0, **second)
    assert state.round == 0
    assert value_of(state) == 7
    state.save(head(8), 1)
    # Round 1 did not count: still the first run's.
    assert value_of(PersonalState(new_context(), acknowledged=0, **second)) == 7
    PersonalState(context, acknowledged=0, **second).save(head(9), 2)
    state = PersonalState(context, acknowledged=2, **second)
    assert value_of(state) == 9
    # Both runs may be going on: nobody touches the other's.
    assert "first-00000030.safetensors" in files_in(tmp_path)
    assert value_of(PersonalState(new_context(), acknowledged=30, **first)) == 7


def set_back_clock(*paths: Path) -> None:
    """Give files the times of a device that began in 2036 and lost its clock since."""
    for i, path in enumerate(paths):
        os.utime(path, ns=((2_100_000_000 - i) * 10**9,) * 2)


def without_counter(path: Path) -> None:
    """Make a file as earlier releases wrote it."""
    about, arrays = read_checked(path, "")
    del about["counter"]
    path.write_bytes(pack(arrays, about))


def test_files_of_the_newest_eight_earlier_runs_are_kept(tmp_path):
    for i in range(12):
        PersonalState(new_context(), tmp_path, run=f"r{i}").save(head(i), 5)
        files = [tmp_path / f"r{j}-00000005.safetensors" for j in range(i + 1)]
        set_back_clock(*filter(Path.exists, files))
    PersonalState(new_context(), tmp_path, run="now").save(head(1), 1)
    stay = [f"r{i}-00000005.safetensors" for i in range(4, 12)]
    assert files_in(tmp_path) == sorted([*stay, "now-00000001.safetensors"])


def test_directories_of_the_newest_eight_runs_are_kept(tmp_path):
    def place(run: str, client: str = "pi") -> Path:
        return tmp_path / f"run-{run}" / client

    def save(run: str, round_: int) -> None:
        PersonalState(new_context(), place(run), run=run).save(head(1), round_)

    def stay() -> set[str]:
        names = {
            path.parent.name.removeprefix("run-") for path in tmp_path.glob("*/pi")
        }
        return names - {"now"}

    for i in range(8):
        save(f"r{i}", 5)
    # A resumed run is as new as what it has written last.
    save("r0", 6)
    # What was told of the examples counts for good; an experiment may be called so.
    (place("r1") / "privacy.json").touch()
    (place("r3") / "r3-00000005.safetensors").rename(place("r3") / "a-00000005")
    place("r2", "other").mkdir()
    # A killed writer's is the run's as well.
    (place("r4") / f".r4-00000006.safetensors.{'a' * 16}.partial").touch()
    for i in range(8, 14):
        save(f"r{i}", 5)
        set_back_clock(
            *(place(f"r{j}") for j in range(i + 1) if place(f"r{j}").exists())
        )
    save("now", 1)
    assert stay() == {f"r{i}" for i in (0, 1, 3, *range(7, 14))}
    assert value_of(PersonalState(new_context(), place("now"), run="now")) == 1
    assert place("r2", "other").exists()
    assert not place("r4").parent.exists()


@pytest.mark.parametrize("link", ["run-old", "run-old/pi"])
def test_linked_directories_of_runs_are_not_deleted(tmp_path, link):
    theirs = tmp_path / "theirs" / "pi"
    PersonalState(new_context(), theirs, run="old").save(head(1), 1)
    root = tmp_path / "state"
    (root / link).parent.mkdir(parents=True)
    (root / link).symlink_to(theirs if link.endswith("pi") else theirs.parent)
    runs = [f"r{i}" for i in range(10)]
    for run in runs:
        directory = root / f"run-{run}" / "pi"
        PersonalState(new_context(), directory, run=run).save(head(1), 1)
    assert [run for run in runs if not (root / f"run-{run}").exists()] == ["r0"]
    assert files_in(theirs) == ["old-00000001.safetensors"]


def test_an_experiment_deletes_no_directory_beside_its_own(tmp_path):
    for i in range(12):
        path = tmp_path / f"run-r{i}" / "pi"
        PersonalState(new_context(), path, run="x").save(head(1), 1)
    PersonalState(new_context(), tmp_path / "lab" / "pi", run="x").save(head(1), 1)
    assert len(list(tmp_path.glob("run-*/pi/x-00000001.safetensors"))) == 12


# Nothing is lost on a server's word


@pytest.mark.parametrize("on_disk", [False, True])
def test_no_acknowledged_round_makes_a_client_lose_its_newest_version(
    tmp_path, on_disk
):
    directory = tmp_path if on_disk else None
    context = new_context()
    run_rounds(context, range(1, 13), directory, checkpointed=11)

    def newest():
        return value_of(PersonalState(context, directory, 12, 11))

    assert newest() == 12
    for acknowledged in (0, 5, 11, 10**6):
        for checkpointed in (0, 5, 10**6):
            state = PersonalState(context, directory, acknowledged, checkpointed)
            state.load({"head.weight": (9, 9)})
            assert newest() == 12
    # Nor if it trains, as from a backup.
    for acknowledged, round_ in ((0, 6), (5, 7), (0, 13)):
        state = PersonalState(context, directory, acknowledged, 0)
        state.save(head(-1), round_)
        assert newest() == 12


def test_kept_reports_rounds_and_checkpoint(tmp_path):
    nothing = {"kept-rounds": [], "kept-checkpoint": 0}
    assert PersonalState(new_context(), tmp_path, run="r").kept() == nothing
    run_rounds(new_context(), range(1, 13), tmp_path, checkpointed=11)
    state = PersonalState(new_context(), tmp_path)
    assert state.kept() == {"kept-rounds": [10, 11, 12], "kept-checkpoint": 11}
    assert PersonalState(new_context(), tmp_path, run="other").kept() == nothing


def test_the_newest_earlier_run_is_used_whatever_the_clock(tmp_path):
    paths = []
    for run, value in (("b", 1), ("a", 2), ("c", 3)):
        PersonalState(new_context(), tmp_path, run=run).save(head(value), 5)
        paths.append(tmp_path / f"{run}-00000005.safetensors")
    set_back_clock(*paths)
    assert value_of(PersonalState(new_context(), tmp_path, 0, run="d")) == 3
    # The run that has written last is the newest, though it began first.
    PersonalState(new_context(), tmp_path, run="b").save(head(4), 6)
    set_back_clock(*reversed(paths), tmp_path / "b-00000006.safetensors")
    assert value_of(PersonalState(new_context(), tmp_path, 0, run="d")) == 4


def test_states_of_earlier_releases_are_older_than_all_others_and_kept(tmp_path):
    old = [f"old{i}" for i in range(9)]
    for i, run in enumerate(old):
        PersonalState(new_context(), tmp_path, run=run).save(head(-i), 9)
        without_counter(tmp_path / f"{run}-00000009.safetensors")
        os.utime(tmp_path / f"{run}-00000009.safetensors", ns=(i * 10**9,) * 2)
    # Among themselves they have their times alone.
    assert value_of(PersonalState(new_context(), tmp_path, 0, run="next")) == -8

    def old_left() -> int:
        return len(list(tmp_path.glob("old*")))

    for i in range(8):
        PersonalState(new_context(), tmp_path, run=f"new{i}").save(head(i), 1)
        os.utime(tmp_path / f"new{i}-00000001.safetensors", (0, 0))
        assert value_of(PersonalState(new_context(), tmp_path, 0, run="next")) == i
        # Nobody can tell which of them is the newest.
        assert old_left() == 9
    PersonalState(new_context(), tmp_path, run="new8").save(head(8), 1)
    assert old_left() == 0
    # A run that an earlier release began goes on, too.
    PersonalState(new_context(), tmp_path, run="own").save(head(5), 1)
    without_counter(tmp_path / "own-00000001.safetensors")
    state = PersonalState(new_context(), tmp_path, 1, run="own")
    assert value_of(state) == 5
    state.save(head(6), 2)
    assert value_of(PersonalState(new_context(), tmp_path, 2, run="own")) == 6
