"""Clients check the messages of a server."""

import math
from pathlib import Path

import numpy as np
import pytest
from client_messages import new_context
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    RecordDict,
)

from flwr_frl.clients.client_app import make_app
from flwr_frl.clients.device.records import LAST_ROUND, check_config
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.clients.device.state_file import state_directory
from flwr_frl.clients.gossip.relayed import LONGEST_ABSENCE, exchanges
from flwr_frl.common.settings import SettingsError, resolve
from flwr_frl.task.training import TrainingDivergedError

FAST = {"head-epochs": 1, "head-layers": 1, "algorithm": "fedrep"}


def app_of(**settings):
    return make_app(resolve({**FAST, **settings}))


def context_of(**node) -> Context:
    config = {"partition-id": 0, "num-partitions": 20, **node}
    return Context(1, 1, config, RecordDict(), {})


def message(kind: str, arrays: ArrayRecord | None, config: dict) -> Message:
    content = {"config": ConfigRecord(config), "arrays": arrays or ArrayRecord()}
    return Message(RecordDict(content), 1, kind)


def initial(app) -> ArrayRecord:
    query = Message(RecordDict(), 1, f"{MessageType.QUERY}.arrays")
    return app(query, context_of()).content.array_records["arrays"]


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
    "neighbours": [[1], "a"],
    "neighbour-nodes": [["1"], [-1]],
}


@pytest.mark.parametrize(
    ("name", "value"), [(n, v) for n, values in WRONG.items() for v in values]
)
def test_invalid_config_values_raise_one_line_errors(name: str, value) -> None:
    with pytest.raises(SettingsError, match=f"the server's {name} is ") as caught:
        check_config(ConfigRecord({name: value}))
    assert str(caught.value).isprintable()


def test_configs_of_our_servers_are_valid() -> None:
    relayed = {
        "relayed-rounds": [1, 2],
        "relayed-senders": ["a", "b"],
        "relayed-weights": [0.5, 1.0],
        "relayed-data": [b"", b"x"],
    }
    config = {"server-round": 2, "run": "0a1b2c3d4e5f", "proximal-mu": 0, "x": "any"}
    complete = {**config, **relayed, "exchanged-round": 2}
    assert check_config(ConfigRecord(complete)) == complete


@pytest.mark.parametrize(
    "config",
    [
        {"relayed-rounds": [1], "relayed-senders": ["a", "b"]},
        {"relayed-rounds": [1]},
        {"neighbours": ["a"], "neighbour-nodes": [1, 2]},
    ],
)
def test_lists_of_different_lengths_are_refused(config: dict) -> None:
    with pytest.raises(SettingsError, match="not of the same length"):
        check_config(ConfigRecord(config))


def test_rounds_to_replay_are_bounded() -> None:
    with pytest.raises(SettingsError, match=r"exchanged-round is 4; expected .*, 3$"):
        check_config(ConfigRecord({"exchanged-round": 4, "server-round": 3}))
    far = {"exchanged-round": LONGEST_ABSENCE + 8}
    with pytest.raises(SettingsError, match="at most 100,000 rounds"):
        next(exchanges(far, 7))
    assert len(list(exchanges(far, 9))) == LONGEST_ABSENCE


@pytest.mark.parametrize("node", [{"state-dir": "state"}, {}])
@pytest.mark.parametrize("run", ["/abs/x", "../../x", "..", "a/../../../b"])
def test_a_run_name_cannot_leave_the_state_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: dict, run: str
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    run = run.replace("/abs", str(tmp_path / "abs"))
    app = app_of(**{"checkpoint-every": 1, "output": "out"})
    arrays = initial(app)
    config = {"run": run, "server-round": 1, "acknowledged-round": 0}
    with pytest.raises(SettingsError, match="the server's run is"):
        app(message(MessageType.TRAIN, arrays, config), context_of(**node))
    assert list(tmp_path.rglob("*")) == [home]


@pytest.mark.parametrize("length", [300, 5000])
def test_long_client_names_map_to_different_directories(
    tmp_path: Path, length: int
) -> None:
    names = ["é" * length + last for last in "ab"]
    first, second = (
        state_directory({"state-dir": str(tmp_path)}, name, "1", "") for name in names
    )
    assert first != second
    for directory in (first, second):
        directory.mkdir(parents=True)
    with pytest.raises(SettingsError) as caught:
        state_directory({"state-dir": "~nobody-at-all/state"}, "a", "1", "")
    assert caught.value.code == "state-dir"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_state_that_is_not_finite_is_not_saved(tmp_path: Path, value: float) -> None:
    context = new_context()
    PersonalState(context, tmp_path, 0).save({"w": np.ones(2)}, 1)
    with pytest.raises(TrainingDivergedError):
        PersonalState(context, tmp_path, 1).save({"w": np.array([1.0, value])}, 2)
    assert PersonalState(context, tmp_path, 1).load()["w"].tolist() == [1, 1]


def npy_of_objects() -> Array:
    array = Array(np.zeros(3, np.float32))
    array.data = b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, "
    return array


BAD_ARRAYS = {
    "nan": lambda v: Array(np.full_like(v, np.nan)),
    "infinity": lambda v: Array(np.full_like(v, -np.inf)),
    "shape": lambda v: Array(v[None]),
    "one number": lambda v: Array(np.float32(1)[None]),
    "complex": lambda v: Array(v.astype(np.complex64)),
    "the other byte order": lambda v: Array(v.astype(">f4")),
    "integers": lambda v: Array(v.astype(np.int32)),
    "no bytes": lambda v: npy_of_objects(),
}


@pytest.mark.parametrize("kind", [MessageType.TRAIN, MessageType.EVALUATE])
@pytest.mark.parametrize("name", list(BAD_ARRAYS))
def test_invalid_arrays_change_no_state(tmp_path: Path, name: str, kind: str) -> None:
    app = app_of()
    context = context_of(**{"state-dir": str(tmp_path)})
    arrays = initial(app)
    good = {"server-round": 1, "acknowledged-round": 0, "run": "r"}
    app(message(MessageType.TRAIN, arrays, good), context)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert len(before) == 1
    first = next(iter(arrays))
    bad = ArrayRecord({**arrays, first: BAD_ARRAYS[name](arrays[first].numpy())})
    with pytest.raises(SettingsError, match=f"array '{first}' of the") as caught:
        app(message(kind, bad, {**good, "acknowledged-round": 1}), context)
    assert "\n" not in str(caught.value)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
