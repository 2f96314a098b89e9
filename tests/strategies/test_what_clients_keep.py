"""Personal arrays stay on the clients and survive crashes."""

import json
from pathlib import Path

import pytest
from command_line import Killed, die_in
from flwr.app import Context, MessageType, RecordDict
from softmax_runs import N, round_of, run

from flwr_frl.clients import client_app
from flwr_frl.common.checkpoint import FILE
from flwr_frl.common.messages import CLASS_COUNTS, HELD_CLASSES
from flwr_frl.common.settings import resolve
from flwr_frl.strategies import server_app
from flwr_frl.strategies.grids.simulation import InlineGrid

# Prefixes of the arrays that clients keep
KEPT = {
    "fedprox": set(),
    "scaffold": {"own-control"},
    "ditto": {"model"},
    "apfl": {"model", "alpha"},
    "l2gd": {"model"},
    "fed-mtl": {"model"},
    "fedrod": {"personal-head"},
    "fedcp": {"personal-head"},
    "pfedme": {"model"},
    "fedbn": {"representation"},
    "fedproto": {"representation", "head", "classes"},
    "fedala": {"model", "weights", "started"},
    "feddbe": {"memory"},
    "fedrep": {"head"},
    "local": {"representation", "head"},
}
LAYERED = {"task": "layered:layered"}
OWN = {
    "pfedme": {"pfedme_steps": 1},
    # A batch norm needs more than one example in each batch.
    "fedbn": {"task": "softmax_runs:scaled", "batch_size": 3},
    **dict.fromkeys(("fedproto", "fedala", "feddbe", "fedrep", "local"), LAYERED),
}
# Properties that are lists, with the type of their entries. They have at most as many
# entries as there are classes.
LISTS = {HELD_CLASSES: str, CLASS_COUNTS: int}
# Small batches in random order, with momentum and weight decay
USUAL = {"batch_size": 8, "momentum": 0.5, "weight_decay": 1e-3, "learning_rate": 0.1}


def usual(algorithm: str) -> dict:
    return {"task": "softmax_runs:softmax", **USUAL, **OWN.get(algorithm, {})}


def bytes_of(message) -> bytes:
    arrays = message.content.array_records.values()
    configs = message.content.config_records.values()
    parts = [array.data for record in arrays for array in record.values()]
    parts += [v for c in configs for v in c.values() if isinstance(v, bytes)]
    return b"".join(parts)


def assert_small(content: RecordDict) -> None:
    """Assert that other records have single numbers, short strings and short lists."""
    for record in content.metric_records.values():
        assert all(isinstance(value, (int, float)) for value in record.values())
    for record in content.config_records.values():
        assert len(record) < 16
        for name, value in record.items():
            if name in LISTS:
                assert all(type(entry) is LISTS[name] for entry in value)
                assert len(value) <= 10
            else:
                assert isinstance(value, (bool, int, float, str))
                assert len(str(value)) < 100


@pytest.mark.parametrize("algorithm", KEPT)
def test_personal_arrays_are_never_in_replies(algorithm):
    outcome = run(algorithm, 5, evaluate=(2, 5), **usual(algorithm))
    kinds = {m.metadata.message_type for m in outcome.grid.replies}
    assert {MessageType.TRAIN, MessageType.EVALUATE, MessageType.QUERY} <= kinds
    names = set()
    for i in range(N):
        secrets = [kept[i] for kept in outcome.kept if kept[i]]
        names |= {name.partition(".")[0] for state in secrets for name in state}
        replies = [r for r in outcome.grid.replies if r.metadata.src_node_id == i + 1]
        if algorithm == "scaffold":
            # At first c_i is 0 and Δc_i equals c_i, as in the paper.
            first = next((r for r, c in enumerate(outcome.trained, 1) if i in c), 0)
            secrets = [kept[i] for kept in outcome.kept[first:] if kept[i]]
            exchanged = outcome.between("train")
            late = [r for m, r in exchanged if round_of(m) > first]
            replies = [r for r in late if r.metadata.src_node_id == i + 1]
        sent = b"".join(map(bytes_of, replies))
        for state in secrets:
            for name, array in state.items():
                # FedALA's old model is the one that was sent; the class counts that
                # FedProto sends reveal the classes.
                is_public = algorithm == "fedala" and name.startswith("model.")
                is_public = is_public or name == "classes.own"
                if array.size > 1 and not is_public:
                    assert array.tobytes() not in sent, name
        for reply in replies:
            assert_small(reply.content)
            for record in reply.content.array_records.values():
                assert not {n.partition(".")[0] for n in record} & KEPT[algorithm]
    assert names == KEPT[algorithm]


# Runs by `flwr run`


def flower(output: Path, rounds: int, device: Path | None = None, **more) -> list[dict]:
    """Run both apps with settings from Flower, and return the rows."""
    given = {"algorithm": "ditto", "output": str(output), "num-server-rounds": rounds}
    given |= {"num-clients": N, "fraction-train": 1.0, "checkpoint-every": 2}
    named = {**usual("ditto"), "evaluate_last": 1, "evaluate_every": 1, **more}
    given |= {name.replace("_", "-"): value for name, value in named.items()}
    grid = InlineGrid(client_app.make_app(resolve(given)), N)
    for context in grid.contexts.values():
        if device:
            context.node_config["state-dir"] = str(device)
    server_app.app(grid, Context(1, 0, {}, RecordDict(), given))
    lines = (output / "ditto" / "metrics.jsonl").read_text().splitlines()
    return [{**json.loads(line), "seconds": 0} for line in lines]


def test_new_run_ignores_the_states_of_a_killed_run(tmp_path, monkeypatch):
    expected = flower(tmp_path / "whole", 3)
    # Killed after two rounds, before the first checkpoint
    with monkeypatch.context() as patched:
        die_in(patched, 2)
        with pytest.raises(Killed):
            flower(tmp_path / "killed", 3)
    assert not (tmp_path / "killed" / "ditto" / FILE).exists()
    assert any((tmp_path / "killed" / "ditto" / "clients").glob("*/*.safetensors"))
    assert flower(tmp_path / "killed", 3) == expected


def test_device_states_are_not_deleted(tmp_path):
    # Even if the folder of states is inside the server's results
    device = tmp_path / "out" / "ditto" / "clients"
    rows = flower(tmp_path / "out", 2, device, experiment="fleet")
    (tmp_path / "out" / "ditto" / FILE).unlink()
    kept = {p: p.read_bytes() for p in (device / "fleet").rglob("*.safetensors")}
    assert len({path.parent for path in kept}) == N
    again = flower(tmp_path / "out", 2, device, experiment="fleet")
    # It continues from the states of the same experiment.
    assert again[0]["accuracy"] != rows[0]["accuracy"]
