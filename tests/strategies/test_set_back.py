"""Servers restored from a backup: clients keep their newest versions."""

import shutil

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from inline_runs import rows_in
from safetensors.numpy import load_file

from flwr_frl.clients.client_app import make_app
from flwr_frl.common.errors import SettingsError
from flwr_frl.common.messages import ACKNOWLEDGED_ROUND
from flwr_frl.common.settings import resolve
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server_app import serve

CHECKPOINT = "checkpoint.safetensors"


def settings_of(path, rounds: int, **more):
    usual = {"algorithm": "fedrep", "model": "mlp-2", "num-clients": 5}
    usual |= {"fraction-train": 1.0, "checkpoint-every": 1, "evaluate-every": 1}
    usual |= {"head-epochs": 2, "learning-rate": 0.05, "batch-size": 150}
    given = {"num-server-rounds": rounds, "output": str(path), **more}
    return resolve({**usual, **given})


def go(settings):
    grid = InlineGrid(make_app(settings), int(settings["num-clients"]))
    serve(grid, settings)
    return grid


def rows_of(path, algorithm="fedrep"):
    return {row["round"]: row for row in rows_in(path, algorithm)}


def heads_of(path, algorithm="fedrep"):
    folder = path / algorithm / "clients"
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*-*")}


def test_server_restored_from_a_backup_loses_no_head(tmp_path, caplog) -> None:
    # Train long enough that one round of the representation makes no difference.
    options = {"head-epochs": 5, "representation-epochs": 2, "batch-size": 20}
    options |= {"evaluate-every": 6, "evaluate-last": 1}
    go(settings_of(tmp_path, 5, **options))
    backup = tmp_path / "backup"
    shutil.copy(tmp_path / "fedrep" / CHECKPOINT, backup)
    go(settings_of(tmp_path, 12, resume=str(tmp_path), **options))
    heads, twelfth = heads_of(tmp_path), rows_of(tmp_path)[12]
    assert len(heads) >= 2 * 5
    shutil.copy(backup, tmp_path / "fedrep" / CHECKPOINT)
    go(settings_of(tmp_path, 6, resume=str(tmp_path), **options))
    # All heads of round 12 are still stored, and their accuracy is kept.
    now = heads_of(tmp_path)
    newest = {p: data for p, data in heads.items() if p.name.endswith("12.safetensors")}
    assert len(newest) == 5
    assert newest.items() <= now.items()
    rows = rows_of(tmp_path)
    assert max(rows) == 6
    assert rows[6]["accuracy"] >= twelfth["accuracy"] - 0.01
    assert rows[6]["clients"] == 5
    line = "client 000003 does not continue from its last state: the server is behind "
    assert f"{line}its state of round 12" in caplog.text


def test_control_variate_is_correct_after_a_rollback(tmp_path, caplog) -> None:
    algorithm, shared, kept = "scaffold", "arrays/control.", "own-control."
    options = {"algorithm": algorithm, "model": "logistic", "momentum": 0.0}
    options |= {"evaluate-every": 0, "evaluate-last": 1}

    def distance(server_round: int) -> float:
        mean = load_file(tmp_path / algorithm / CHECKPOINT)
        states = [
            load_file(path)
            for path in (tmp_path / algorithm / "clients").rglob(
                f"*-{server_round:08d}.safetensors"
            )
        ]
        assert len(states) == 5
        differences = [
            mean[shared + name] - np.mean([s[kept + name] for s in states], axis=0)
            for name in ("head.weight", "head.bias")
        ]
        return max(np.abs(d).max() for d in differences)

    go(settings_of(tmp_path, 3, **options))
    assert distance(3) < 1e-6
    shutil.copy(tmp_path / algorithm / CHECKPOINT, tmp_path / "backup")
    go(settings_of(tmp_path, 9, resume=str(tmp_path), **options))
    assert distance(9) < 1e-6
    shutil.copy(tmp_path / "backup", tmp_path / algorithm / CHECKPOINT)
    go(settings_of(tmp_path, 7, resume=str(tmp_path), **options))
    # A mean that was only updated by changes would stay wrong.
    assert distance(7) < 1e-6
    assert len([m for m in caplog.messages if "begin" in m and "anew" in m]) == 1


def test_ordinary_resume_is_not_a_rollback(tmp_path, caplog) -> None:
    # The run is killed in round 8 and resumes from round 6, which is not a rollback.
    together, apart = tmp_path / "together", tmp_path / "apart"
    go(settings_of(together, 8, **{"checkpoint-every": 3}))
    go(settings_of(apart, 6, **{"checkpoint-every": 3}))
    backup = apart / "backup"
    shutil.copy(apart / "fedrep" / CHECKPOINT, backup)
    # Run to round 9 without a checkpoint in round 8, then restore that of round 6.
    go(settings_of(apart, 9, resume=str(apart), **{"checkpoint-every": 100}))
    shutil.copy(backup, apart / "fedrep" / CHECKPOINT)
    rows = rows_of(together)
    # The checkpoint of round 9 was written at the end, so clients have not seen it.
    go(settings_of(apart, 8, resume=str(apart), **{"checkpoint-every": 3}))
    again = rows_of(apart)
    assert "the server is behind" not in caplog.text
    for r in (7, 8):
        for name in ("train-loss", "accuracy", "clients"):
            assert again[r][name] == rows[r][name]


def test_evaluation_deletes_no_version(tmp_path) -> None:
    settings = settings_of(tmp_path, 4)
    grid = go(settings)
    heads = heads_of(tmp_path)
    app = make_app(settings)
    query = Message(RecordDict(), 1, f"{MessageType.QUERY}.arrays")
    arrays = app(query, grid.contexts[1]).content["arrays"]
    for acknowledged in (0, 1, 10**6):
        config = {ACKNOWLEDGED_ROUND: acknowledged, "server-round": 5}
        content = {"arrays": arrays, "config": ConfigRecord(config)}
        message = Message(RecordDict(content), 1, MessageType.EVALUATE)
        app(message, grid.contexts[1])
    assert heads_of(tmp_path) == heads


def test_two_runs_of_an_experiment_do_not_disturb_each_other(tmp_path) -> None:
    def device_run(output, rounds, **more):
        settings = settings_of(tmp_path / output, rounds, experiment="lab", **more)
        grid = InlineGrid(make_app(settings), 5)
        for i, context in enumerate(grid.contexts.values()):
            context.node_config["state-dir"] = str(tmp_path / "state")
            context.node_config["client-name"] = f"pi-{i}"
        serve(grid, settings)
        return rows_of(tmp_path / output)

    device_run("a", 3)
    alone = {p: p.read_bytes() for p in (tmp_path / "state").rglob("*.safetensors")}
    # Another run of the same experiment, and one with another model.
    device_run("b", 3)
    device_run("c", 2, model="logistic", **{"head-layers": 1})
    for path, data in alone.items():
        assert path.read_bytes() == data
    assert not list((tmp_path / "state").rglob("*set-aside*"))
    # The first run continues unaffected.
    rows = device_run("a", 4, resume=str(tmp_path / "a"))
    assert rows[4]["clients"] == 5


def test_gossip_rejects_a_rolled_back_server(tmp_path) -> None:
    options = {"algorithm": "dpsgd", "model": "logistic", "num-clients": 5}
    go(settings_of(tmp_path, 2, **options))
    checkpoint, backup = tmp_path / "dpsgd" / CHECKPOINT, tmp_path / "backup"
    shutil.copy(checkpoint, backup)
    go(settings_of(tmp_path, 6, resume=str(tmp_path), **options))
    newest = checkpoint.read_bytes()
    shutil.copy(backup, checkpoint)
    heads = heads_of(tmp_path, "dpsgd")
    with pytest.raises(SettingsError, match="of round 6, not that of round 2; gossip"):
        go(settings_of(tmp_path, 7, resume=str(tmp_path), **options))
    assert heads_of(tmp_path, "dpsgd") == heads
    # The newest checkpoint can still be resumed.
    checkpoint.write_bytes(newest)
    go(settings_of(tmp_path, 7, resume=str(tmp_path), **options))
    assert rows_of(tmp_path, "dpsgd")[7]["clients"] == 5
