"""Personal states: which versions are used, kept and deleted."""

import os
import pickle
import time
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from client_messages import new_context
from disks import full
from flwr.app import ConfigRecord
from safetensors.numpy import load_file
from state_values import (
    files_in,
    head,
    on_disk,
    rounds_in,
    rounds_on,
    run_rounds,
    value_of,
)

from flwr_frl.clients.device.state import PersonalState

FITS = {"head.weight": (2, 3)}
LOST = "no version is left: it is lost"


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
def test_an_acknowledged_version_is_kept_and_an_unacknowledged_one_deleted(
    tmp_path, stored
):
    directory = tmp_path if stored else None
    context = new_context()
    run_rounds(context, [2], directory)
    # The reply of round 5 was not acknowledged: the server still sends round 2.
    PersonalState(context, directory, 2).save(head(5), 5)
    state = PersonalState(context, directory, 2)
    assert value_of(state) == 2
    # The next save deletes the unacknowledged version.
    state.save(head(7), 7)
    # Version 7 is used once it is acknowledged.
    state = PersonalState(context, directory, 7)
    assert value_of(state) == 7
    state.save(head(8), 8)
    assert rounds_in(context) == [7, 8]
    # Version 2 is the fallback in case the file of version 7 is damaged.
    assert rounds_on(tmp_path) == ([2, 7, 8] if stored else [])


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
    context, run = new_context(), {"run": "r", "client": "caf\udce9"}
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


# Rolling back to a checkpoint


def test_the_version_of_the_checkpoint_stays_on_disk(tmp_path):
    context = new_context()
    run_rounds(context, [3], tmp_path)
    # The server has a checkpoint of round 5; the client trains in 6 to 9.
    for r, acknowledged in ((6, 3), (7, 6), (8, 7), (9, 8)):
        PersonalState(context, tmp_path, acknowledged, 5).save(head(r), r)
    assert rounds_on(tmp_path) == [3, 7, 8, 9]
    # The server has crashed and resumes from its checkpoint of round 5, where the
    # client's last acknowledged round was 3.
    state = on_disk(tmp_path, 3, 5)
    assert value_of(state) == 3
    # It trains again in round 6. Its versions of later rounds do not interfere.
    state.save(head(66), 6)
    assert value_of(on_disk(tmp_path, 6, 5)) == 66
    assert rounds_on(tmp_path) == [3, 6, 8, 9]
    # Round 10 is later than the abandoned versions 8 and 9, which are now deleted.
    on_disk(tmp_path, 6, 5).save(head(10), 10)
    assert rounds_on(tmp_path) == [3, 6, 10]


def test_state_files_are_plain_safetensors_readable_only_by_the_owner(tmp_path):
    PersonalState(new_context(), tmp_path / "new").save(head(4), 7)
    (path,) = (tmp_path / "new").iterdir()
    assert path.name == "00000007.safetensors"
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
    spoil(tmp_path / "00000002.safetensors")
    state = on_disk(tmp_path, 2)
    assert (value_of(state), state.round) == (1, 1)
    assert "00000002.safetensors is not used and set aside: " in caplog.text
    aside = "00000002.safetensors.set-aside"
    assert files_in(tmp_path) == ["00000001.safetensors", aside]
    # The file is kept for inspection.
    on_disk(tmp_path, 3).save(head(3), 3)
    assert aside in files_in(tmp_path)
    # Without another version, the client starts from scratch.
    for name in ("00000001.safetensors", "00000003.safetensors"):
        damage(tmp_path / name)
    state = on_disk(tmp_path, 3)
    assert (state.load(), state.round) == (None, 0)


OTHER = "it does not fit the model"


@pytest.mark.parametrize(
    ("now", "shapes", "reason"),
    [
        ({}, FITS, ""),
        # Different classes explain the different shape. The reason does not name the
        # classes, which are private.
        (
            {"classes": '["cat", "dog"]'},
            {"head.weight": (4, 3)},
            "it is for other classes than the client has now",
        ),
        ({"algorithm": "a:FedPer"}, FITS, "it is of a:FedRep, not a:FedPer"),
        ({}, {"head.weight": (4, 3)}, OTHER),
        ({}, {}, OTHER),
        ({}, {"other": (2, 3)}, OTHER),
        # For example, a copied SD card
        ({"client": "pi-2"}, FITS, "it is of client 'pi-1'"),
        ({"damaged": "yes"}, FITS, "its file is damaged"),
    ],
)
def test_the_reason_for_not_using_an_earlier_run_s_file_is_reported(
    tmp_path, now, shapes, reason
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
    assert state.unused.startswith(reason)
    # A file of another client or model is left untouched.
    assert "damaged" in now or path.read_bytes() == data


def test_a_lost_state_is_reported():
    # The server has acknowledged round 3, but the process is new.
    for acknowledged, reason in ((3, LOST), (None, ""), (0, "")):
        state = on_disk(None, acknowledged)
        assert (state.load(), state.unused) == (None, reason)


@pytest.mark.parametrize("lose", [damage, Path.unlink])
def test_a_version_of_an_earlier_run_does_not_hide_a_lost_one(tmp_path, lose):
    on_disk(tmp_path, run="old").save(head(7), 30)
    on_disk(tmp_path, 0, run="new").save(head(1), 1)
    lose(tmp_path / "new-00000001.safetensors")
    for _ in range(2):
        state = on_disk(tmp_path, 1, run="new")
        assert value_of(state) == 7
        assert state.unused in ("its file is damaged", LOST)


def test_damage_found_by_an_evaluation_is_reported_by_the_next_training(tmp_path):
    run_rounds(new_context(), [1, 2, 3], tmp_path)
    damage(tmp_path / "00000003.safetensors")
    for reason in ("its file is damaged", "the version of round 3 is missing"):
        state = on_disk(tmp_path, 3)
        assert (value_of(state), state.unused) == (2, reason)
    # Once the client has trained on the older version, nothing is missing any more.
    state.save(head(4), 4)
    state = on_disk(tmp_path, 4)
    assert (value_of(state), state.unused) == (4, "")


def test_unfinished_files_are_deleted_after_their_round(tmp_path):
    run_rounds(new_context(), [1, 2], tmp_path)
    of_this_run = tmp_path / f".00000003.safetensors.{'0' * 16}.partial"
    of_another = tmp_path / f".abc-00000009.safetensors.{'1' * 16}.partial"
    account = tmp_path / f".privacy.json.{'0' * 16}.partial"
    for path in (of_this_run, of_another, account):
        path.write_bytes(b"half")
    # Another process may still be writing these files.
    on_disk(tmp_path, 2).save(head(3), 3)
    assert of_this_run.exists()
    on_disk(tmp_path, 3).save(head(4), 4)
    assert not of_this_run.exists()
    assert of_another.exists()
    # One file is over an hour old, the other dates from when the clock was ahead.
    for path, seconds in ((of_another, -3700), (account, 10**8)):
        os.utime(path, (time.time() + seconds,) * 2)
    on_disk(tmp_path, 4).save(head(5), 5)
    assert rounds_on(tmp_path) == [3, 4, 5]
    assert len(list(tmp_path.iterdir())) == 3


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


# Wrong acknowledgements by the server


@pytest.mark.parametrize("stored", [False, True])
def test_wrong_acknowledged_rounds_never_delete_the_newest_version(tmp_path, stored):
    directory = tmp_path if stored else None
    context = new_context()
    run_rounds(context, range(1, 13), directory, checkpointed=11)

    def newest():
        return value_of(PersonalState(context, directory, 12, 11))

    assert newest() == 12
    for acknowledged, checkpointed in product((0, 5, 11, 10**6), (0, 5, 10**6)):
        state = PersonalState(context, directory, acknowledged, checkpointed)
        state.load({"head.weight": (9, 9)})
        assert newest() == 12
    # Training does not delete it either, for example after the server was restored
    # from a backup.
    for acknowledged, round_ in ((0, 6), (5, 7), (0, 13)):
        PersonalState(context, directory, acknowledged).save(head(-1), round_)
        assert newest() == 12


def test_kept_reports_rounds_and_checkpoint(tmp_path):
    nothing = {"kept-rounds": [], "kept-checkpoint": 0}
    assert on_disk(tmp_path, run="r").kept() == nothing
    run_rounds(new_context(), range(1, 13), tmp_path, checkpointed=11)
    kept = {"kept-rounds": [10, 11, 12], "kept-checkpoint": 11}
    assert on_disk(tmp_path).kept() == kept
    assert on_disk(tmp_path, run="other").kept() == nothing
