"""Checkpoints: round trips, damaged files, other settings and failed writes."""

import errno
import json
from pathlib import Path

import numpy as np
import pytest
from function_clients import grid_of
from safetensors.numpy import save

from flwr_frl.common.checkpoint import FILE
from flwr_frl.common.errors import SettingsError
from flwr_frl.common.sealed import seal
from flwr_frl.common.settings import resolve
from flwr_frl.strategies.base import Strategy
from flwr_frl.strategies.server.checkpoint import Checkpoint
from flwr_frl.strategies.server.replies import to_record
from flwr_frl.strategies.server_app import serve

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


def test_checkpoint_round_trip(tmp_path):
    checkpoint_of().write(tmp_path / "new")
    assert [path.name for path in (tmp_path / "new").iterdir()] == [FILE]
    former = Checkpoint.read(tmp_path / "new", SETTINGS)
    assert former.server_round == 12
    assert former.seconds == 34.5
    # The order of the names is restored, too.
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


def test_only_the_owner_can_read_a_checkpoint(tmp_path):
    checkpoint_of().write(tmp_path)
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def without_array() -> bytes:
    values = {"round": 1, "seconds": 1.0, "settings": {**SETTINGS}, "values": {}}
    return seal({}, {"run": json.dumps(values), "order": '["arrays/w"]'})


DAMAGE = {
    "empty": lambda data: b"",
    "text": lambda data: b"hello",
    "half": lambda data: data[: len(data) // 2],
    "one byte less": lambda data: data[:-1],
    "zeros": lambda data: bytes(len(data)),
    "hole": lambda data: data[:100] + bytes(20) + data[120:],
    "another file": lambda data: save({"w": np.zeros(1)}),
    "no JSON": lambda data: seal({"w": np.zeros(1)}, {"run": "{"}),
    "no array": lambda data: without_array(),
    "nothing": lambda data: seal({}, {"run": "{}"}),
    "a list": lambda data: seal({}, {"run": "[]"}),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_checkpoint_fails_with_a_one_line_error(tmp_path, damage):
    checkpoint_of().write(tmp_path)
    path: Path = tmp_path / FILE
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SettingsError, match="is damaged") as caught:
        Checkpoint.read(tmp_path, SETTINGS)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


# Checkpoints of a run that is interrupted, or whose disk is full


def go(output: Path, rounds: int, every: int) -> None:
    settings = {"algorithm": "fedavg", "fraction-train": 1.0, "output": str(output)}
    settings |= {"num-server-rounds": rounds, "checkpoint-every": every}
    serve(grid_of(3), resolve(settings))


def round_kept(output: Path) -> int:
    return Checkpoint.read(output / "fedavg", {}).server_round


def fail_once(monkeypatch, server_round: int, error: BaseException) -> None:
    """Make the first write of a round's checkpoint fail."""
    write, failures = Checkpoint.write, [error]

    def failing(checkpoint: Checkpoint, directory: Path) -> None:
        if checkpoint.server_round == server_round and failures:
            raise failures.pop()
        write(checkpoint, directory)

    monkeypatch.setattr(Checkpoint, "write", failing)


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize(("every", "at"), [(0, 3), (2, 2)])
def test_run_interrupted_while_writing_a_checkpoint_writes_it(
    tmp_path, monkeypatch, ending, every, at
):
    fail_once(monkeypatch, at, ending())
    with pytest.raises(ending):
        go(tmp_path, 3, every)
    assert round_kept(tmp_path) == at


@pytest.mark.parametrize(("ended_in", "kept"), [(4, 3), (5, 4)])
def test_interrupted_run_makes_up_for_a_failed_checkpoint(
    tmp_path, monkeypatch, ended_in, kept
):
    # Checkpoints are due after rounds 3 and 6. Writing that of round 3 fails; when the
    # run is interrupted, the state after the last complete round is written.
    fail_once(monkeypatch, 3, OSError(errno.ENOSPC, "No space left on device"))
    sample = Strategy.sample

    def interrupted(strategy: Strategy, server_round: int, nodes: list[int]):
        if server_round == ended_in:
            raise KeyboardInterrupt
        return sample(strategy, server_round, nodes)

    monkeypatch.setattr(Strategy, "sample", interrupted)
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path, 6, 3)
    assert round_kept(tmp_path) == kept
