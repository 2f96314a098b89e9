"""Clients check the messages of a server."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from client_messages import (
    app_of,
    context_of,
    initial_arrays,
    message_of,
    new_context,
    trained,
)
from flwr.app import Array, ArrayRecord, ConfigRecord, MessageType
from refusals import assert_says, code_of, refusal

from flwr_frl.clients.device import groups
from flwr_frl.clients.device.codec import LAST_ROUND, check_config
from flwr_frl.clients.device.state import PersonalState, state_directory
from flwr_frl.common.errors import TrainingDivergedError

WRONG = {
    "server-round": ["1", 1.5, -1, LAST_ROUND + 1, [1], b"1", True],
    "acknowledged-round": ["0", -5, 2**62],
    "checkpoint-round": [1.0, "x"],
    "run": ["/abs/x", "../x", "a/b", "", "a\x00b", "é", "x" * 65, 5, "a b", "a\n"],
    "proximal-mu": ["1", -1.0, math.nan, math.inf],
    "exchanged-round": [2**62, "1", -1],
    "consensus-step": ["1", 2.0, -0.1, math.nan],
    "neighbour-weight": [1e30, "w"],
    "node": ["a", -1],
    "refusal": [5],
    "relayed-senders": [[1], "a"],
    "relayed-weights": [["a"], [1e30], [math.nan]],
    "relayed-rounds": [["1"], [1.5], 3],
    "relayed-data": [["text"], [1]],
    "neighbour-nodes": [["1"], [-1]],
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_config_values_raise_one_line_errors(name: str) -> None:
    for value in WRONG[name]:
        line = str(refusal(check_config, ConfigRecord({name: value})))
        assert line.startswith(f"the server's {name} is ")
        assert line.isprintable()


def test_configs_of_our_servers_are_valid() -> None:
    config = {"server-round": 2, "run": "0a1b2c3d4e5f", "proximal-mu": 0, "x": "any"}
    config |= {"relayed-rounds": [1, 2], "relayed-senders": ["a", "b"]}
    config |= {"relayed-weights": [0.5, 1.0], "relayed-data": [b"", b"x"]}
    config["exchanged-round"] = 2
    assert check_config(ConfigRecord(config)) == config


def test_lists_of_different_lengths_are_refused() -> None:
    for config in (
        {"relayed-rounds": [1], "relayed-senders": ["a", "b"]},
        {"relayed-rounds": [1]},
    ):
        assert_says("not of the same length", check_config, ConfigRecord(config))


def test_rounds_to_replay_precede_the_message() -> None:
    config = ConfigRecord({"exchanged-round": 4, "server-round": 3})
    assert_says("exchanged-round is 4; expected", check_config, config)


@pytest.mark.parametrize("node", [{"state_dir": "state"}, {}])
@pytest.mark.parametrize("run", ["/abs/x", "../../x", "..", "a/../../../b"])
def test_a_run_name_cannot_leave_the_state_directory(tmp_path, monkeypatch, node, run):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    run = run.replace("/abs", str(tmp_path / "abs"))
    app = app_of(checkpoint_every=1, output="out")
    arrays, context = initial_arrays(app, context_of()), context_of(**node)
    config = {"run": run, "server_round": 1, "acknowledged_round": 0}
    assert_says("the server's run is", trained, app, arrays, context, **config)
    assert list(tmp_path.rglob("*")) == [home]


@pytest.mark.parametrize("length", [300, 5000])
def test_long_client_names_map_to_different_directories(tmp_path, length) -> None:
    for last in "ab":
        state_directory(str(tmp_path), "é" * length + last, "1", "").mkdir(parents=True)
    unknown = "~nobody-at-all/state"
    assert code_of(state_directory, unknown, "a", "1", "") == "state-dir"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_state_that_is_not_finite_is_not_saved(tmp_path: Path, value: float) -> None:
    context = new_context()
    PersonalState(context, tmp_path, 0).save({"w": np.ones(2)}, 1)
    with pytest.raises(TrainingDivergedError):
        PersonalState(context, tmp_path, 1).save({"w": np.array([1.0, value])}, 2)
    assert PersonalState(context, tmp_path, 1).load()["w"].tolist() == [1, 1]


OBJECTS = Array(np.zeros(3, np.float32))
OBJECTS.data = b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, "
BAD_ARRAYS = {
    "nan": lambda v: Array(np.full_like(v, np.nan)),
    "infinity": lambda v: Array(np.full_like(v, -np.inf)),
    "shape": lambda v: Array(v[None]),
    "one number": lambda v: Array(np.float32(1)[None]),
    "complex": lambda v: Array(v.astype(np.complex64)),
    "the other byte order": lambda v: Array(v.astype(">f4")),
    "integers": lambda v: Array(v.astype(np.int32)),
    "no bytes": lambda v: OBJECTS,
}


@pytest.mark.parametrize("kind", [MessageType.TRAIN, MessageType.EVALUATE])
@pytest.mark.parametrize("name", list(BAD_ARRAYS))
def test_invalid_arrays_change_no_state(tmp_path: Path, name: str, kind: str) -> None:
    app, context = app_of(), context_of(state_dir=str(tmp_path))
    arrays = initial_arrays(app, context)
    config = {"server_round": 1, "run": "r"}
    trained(app, arrays, context, **config, acknowledged_round=0)
    (path,) = (p for p in tmp_path.rglob("*") if p.is_file())
    before, first = path.read_bytes(), next(iter(arrays))
    bad = ArrayRecord({**arrays, first: BAD_ARRAYS[name](arrays[first].numpy())})
    message = message_of(kind, bad, **config, acknowledged_round=1)
    assert_says(f"array '{first}' of the", app, message, context)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path]
    assert path.read_bytes() == before


def test_small_tensors_of_a_gpu_become_arrays_by_one_transfer(monkeypatch):
    tensors = {
        "w": torch.arange(6.0).view(2, 3),
        "n": torch.ones(()),
        "b": torch.ones(2),
    }
    # The tensors are those of another device now.
    monkeypatch.setattr(groups, "CPU", torch.device("meta"))
    arrays = groups.to_arrays(tensors)
    assert len({id(array.base) for array in arrays.values()}) == 1
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(arrays[name], tensor)
        assert arrays[name].shape == tensor.shape
