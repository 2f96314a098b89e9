"""Checkpoints: what is written is read, and what is wrong with a file is said."""

import errno
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from strategies.server.checkpoint import MAY_DIFFER, Checkpoint
from strategies.server.replies import to_record
from task.checkpoint import FILE
from task.settings import SettingsError, resolve

SETTINGS = resolve({"learning-rate": 0.1, "algorithm": "fedrep"})
ARRAYS = {
    "z.weight": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "a.count": np.array(7, np.int64),
    "m.bias": np.array([np.pi, 1e-300]),
}


def checkpoint_of(arrays=None, state=None, **settings) -> Checkpoint:
    return Checkpoint(
        12,
        to_record(ARRAYS if arrays is None else arrays),
        state or ({"sums": np.ones((2, 2))}, {"acknowledged": {"000001": 12}}),
        34.5,
        {**SETTINGS, **settings},
    )


def test_what_is_written_is_read(tmp_path):
    checkpoint_of().write(tmp_path / "new")
    assert [path.name for path in (tmp_path / "new").iterdir()] == [FILE]
    former = Checkpoint.read(tmp_path / "new", SETTINGS)
    assert former.server_round == 12
    assert former.seconds == 34.5
    # The order of the names is part of it.
    assert list(former.arrays) == list(ARRAYS)
    for name, value in ARRAYS.items():
        read = former.arrays[name].numpy()
        np.testing.assert_array_equal(read, value)
        assert read.dtype == value.dtype
        assert read.shape == value.shape
    arrays, values = former.state
    assert list(arrays) == ["sums"]
    np.testing.assert_array_equal(arrays["sums"], np.ones((2, 2)))
    assert values == {"acknowledged": {"000001": 12}}


@pytest.mark.parametrize("where", ["arrays", "state"])
def test_the_order_in_memory_does_not_matter(tmp_path, where):
    from flwr.app import Array, ArrayRecord

    values = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    if where == "arrays":
        arrays, state = ArrayRecord({"w": Array(values)}), ({}, {})
    else:
        arrays, state = ArrayRecord(), ({"w": values}, {})
    Checkpoint(1, arrays, state, 0.0, SETTINGS).write(tmp_path)
    former = Checkpoint.read(tmp_path, SETTINGS)
    found = {
        "arrays": lambda: former.arrays["w"].numpy(),
        "state": lambda: former.state[0]["w"],
    }[where]()
    np.testing.assert_array_equal(found, values)


def test_a_run_without_shared_arrays(tmp_path):
    checkpoint_of(arrays={}, state=({}, {"acknowledged": {}})).write(tmp_path)
    former = Checkpoint.read(tmp_path, SETTINGS)
    assert len(former.arrays) == 0
    assert former.state == ({}, {"acknowledged": {}})


def test_a_new_checkpoint_replaces_the_old_one(tmp_path):
    checkpoint_of().write(tmp_path)
    checkpoint_of(arrays={"only": np.zeros(1)}).write(tmp_path)
    assert list(Checkpoint.read(tmp_path, SETTINGS).arrays) == ["only"]


def test_a_full_disk_leaves_the_old_one(tmp_path, monkeypatch):
    checkpoint_of().write(tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint_of(arrays={"only": np.zeros(1)}).write(tmp_path)
    monkeypatch.undo()
    assert list(Checkpoint.read(tmp_path, SETTINGS).arrays) == list(ARRAYS)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_what_a_killed_server_left_half_written_goes(tmp_path, monkeypatch):
    def kill(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setattr(os, "getpid", lambda: 1)
        killed.setattr(os, "replace", kill)
        killed.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            checkpoint_of().write(tmp_path)
    (left,) = tmp_path.iterdir()
    assert left.name != FILE
    (tmp_path / "metrics.jsonl").touch()
    checkpoint_of().write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {FILE, "metrics.jsonl"}


def test_no_checkpoint(tmp_path):
    name = re.escape(repr(str(tmp_path / FILE)))
    with pytest.raises(SettingsError, match=f"resume: there is no checkpoint {name}"):
        Checkpoint.read(tmp_path, SETTINGS)


def about(**changes) -> bytes:
    values = {
        "round": 1,
        "seconds": 1.0,
        "settings": SETTINGS,
        "values": {},
        "names": ["w"],
    } | changes
    tensors = {"arrays/w": np.zeros(2)}
    return save(tensors, metadata={"run": json.dumps(values)})


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: b"", id="empty"),
        pytest.param(lambda data: b"hello", id="text"),
        pytest.param(lambda data: data[: len(data) // 2], id="half"),
        pytest.param(lambda data: data[:-1], id="one byte less"),
        pytest.param(lambda data: bytes(len(data)), id="zeros"),
        pytest.param(lambda data: data[:100] + bytes(20) + data[120:], id="hole"),
        pytest.param(lambda data: save({"w": np.zeros(1)}), id="another file"),
        pytest.param(
            lambda data: save({"w": np.zeros(1)}, metadata={"run": "{"}), id="no JSON"
        ),
        pytest.param(lambda data: about(names=["v"]), id="no array"),
        pytest.param(
            lambda data: save({}, metadata={"run": "{}"}),
            id="nothing",
        ),
        pytest.param(lambda data: save({}, metadata={"run": "[]"}), id="a list"),
    ],
)
def test_a_damaged_checkpoint(tmp_path, damage):
    checkpoint_of().write(tmp_path)
    path: Path = tmp_path / FILE
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SettingsError, match="is damaged") as caught:
        Checkpoint.read(tmp_path, SETTINGS)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_settings_are_named(tmp_path):
    checkpoint_of().write(tmp_path)
    with pytest.raises(SettingsError) as caught:
        Checkpoint.read(tmp_path, {**SETTINGS, "seed": 3, "learning-rate": 0.2})
    message = str(caught.value)
    assert f"{str(tmp_path)!r} was made with other settings: " in message
    assert "seed was 0 and is 3" in message
    assert "learning-rate was 0.1 and is 0.2" in message
    assert message.count(" was ") == 3


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_which_settings_may_differ(tmp_path, name):
    checkpoint_of().write(tmp_path)
    value = SETTINGS[name]
    other = {bool: lambda v: not v, str: lambda v: f"{v}-other"}.get(
        type(value), lambda v: v + 1
    )(value)
    if name in MAY_DIFFER:
        assert Checkpoint.read(tmp_path, {**SETTINGS, name: other}).server_round == 12
    else:
        with pytest.raises(SettingsError, match=f"{name} was"):
            Checkpoint.read(tmp_path, {**SETTINGS, name: other})


def test_what_decides_the_numbers_may_not_differ():
    decisive = {"algorithm", "task", "seed", "fraction-train", "learning-rate", "model"}
    assert not MAY_DIFFER & decisive
    assert {"num-server-rounds", "output", "resume"} <= MAY_DIFFER <= set(SETTINGS)
