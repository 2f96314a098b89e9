"""All trackers at once: TensorBoard event files, an MLflow server and W&B files.

MLflow's server is not part of the package of its client. Set its program as
``MLFLOW=…/bin/mlflow``; otherwise, MLflow writes files.
"""

import contextlib
import os
import struct
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from federation import free_port, read_lines, wait_until

from flwr_frl import running

ROUNDS, LONGER = 2, 3
SERVER = os.environ.get("MLFLOW", "")


@contextlib.contextmanager
def mlflow_server(home: Path) -> Iterator[str]:
    """Yield the tracking URI of MLflow."""
    if not SERVER:
        yield f"file:{home / 'mlruns'}"
        return
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = [SERVER, "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-store-uri", f"sqlite:///{home / 'mlflow.db'}"]
    command += ["--artifacts-destination", str(home / "artifacts"), "--workers", "1"]
    environment = {**os.environ, "PYTHONPATH": ""}
    with (home / "mlflow.log").open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, cwd=home
        )
    try:

        def answers() -> bool:
            with contextlib.suppress(OSError):
                return urllib.request.urlopen(f"{address}/health").status == 200
            return False

        wait_until(answers, 180, "MLflow's server")
        yield address
    finally:
        process.terminate()
        process.wait(30)


def wandb_records(path: Path) -> list:
    """Return the records of a W&B file: a LevelDB log after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, records, record = path.read_bytes(), [], b""
    position = 7
    while position + 7 <= len(data):
        _, length, kind = struct.unpack_from("<IHB", data, position)
        if kind == 0 or 32768 - position % 32768 < 7:
            # The rest of a block is empty.
            position += 32768 - position % 32768
            continue
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            records.append(Record.FromString(record))
            record = b""
    return records


@pytest.mark.e2e
@pytest.mark.usefixtures("figures")
def test_all_trackers_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient
    from tensorboardX.proto.event_pb2 import Event

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    common = {"clients": 5, "evaluate_every": 1, "head_epochs": 1, "backend": "inline"}
    common |= {"classes_per_client": 2, "fraction": 1.0, "cohort": "off"}
    plain = running.simulate(
        "fedrep", rounds=LONGER, output=str(tmp_path / "plain"), **common
    )
    output = tmp_path / "tracked"
    with mlflow_server(tmp_path) as address:
        common |= {"tracker": "tensorboard,mlflow,wandb", "output": str(output)}
        common |= {"tracker_uri": f",{address},offline"}
        running.simulate("fedrep", rounds=ROUNDS, **common)
        run = running.simulate("fedrep", rounds=LONGER, resume=str(output), **common)
        # Trackers do not change the results.
        for row, other in zip(run.rows, plain.rows, strict=True):
            assert {**row, "seconds": 0} == {**other, "seconds": 0}
        rows = read_lines(output / "fedrep" / "metrics.jsonl")
        accuracies = [(row["round"], row["accuracy"]) for row in rows]
        assert len(accuracies) == LONGER

        # MLflow: one run, which was continued
        client = MlflowClient(address)
        experiment = client.get_experiment_by_name("flwr-frl")
        (tracked,) = client.search_runs([experiment.experiment_id])
        history = client.get_metric_history(tracked.info.run_id, "accuracy")
        assert [(m.step, m.value) for m in history] == accuracies
        assert tracked.data.params["task"] == "digits"
        assert tracked.data.params["num-server-rounds"] == str(ROUNDS)
        checkpoint = str(output / "fedrep" / "checkpoint.safetensors")
        assert tracked.data.tags["checkpoint"] == checkpoint
        assert tracked.info.status == "FINISHED"
        files = {f.path for f in client.list_artifacts(tracked.info.run_id)}
        assert files == {"accuracy.png", "report.html"}

    # TensorBoard: one folder
    (folder,) = (output / "tensorboard").iterdir()
    points = []
    for path in folder.iterdir():
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            for value in event.summary.value:
                if value.tag == "accuracy":
                    points.append((event.step, value.simple_value))
    assert sorted(points) == [(i, pytest.approx(a)) for i, a in accuracies]

    # W&B: two files of one run
    folders = sorted((output / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    logged, names = [], set()
    for folder in folders:
        (path,) = folder.glob("*.wandb")
        for record in wandb_records(path):
            if record.WhichOneof("record_type") == "run":
                names.add(record.run.run_id)
            for item in record.history.item:
                if (item.key or item.nested_key[0]) == "accuracy":
                    logged.append(float(item.value_json))
    assert len(names) == 1
    assert logged == pytest.approx([a for _, a in accuracies])
