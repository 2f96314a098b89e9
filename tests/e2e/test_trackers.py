"""Files of W&B receive the metrics of a run that is continued."""

import struct
import time
from pathlib import Path

import pytest
from federation import wait_until

from flwr_frl import running

ROUNDS, LONGER = 2, 3


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
        if position + 7 + length > len(data):
            # This record is still being written.
            break
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            records.append(Record.FromString(record))
            record = b""
    return records


def accuracies(output: Path, tracker: str, uri: str) -> list[tuple[int, float]]:
    """Make a tracked run and continue it; return the accuracy of each round."""
    settings = {
        "clients": 5,
        "evaluate_every": 1,
        "head_epochs": 1,
        "backend": "inline",
    }
    settings |= {"classes_per_client": 2, "fraction": 1.0, "output": str(output)}
    settings |= {"tracker": tracker, "tracker_uri": uri}
    running.simulate("fedrep", rounds=ROUNDS, **settings)
    # W&B names files by the second.
    time.sleep(1)
    run = running.simulate("fedrep", rounds=LONGER, resume=str(output), **settings)
    return [(row["round"], row["accuracy"]) for row in run.rows]


@pytest.mark.e2e
def test_wandb_has_two_files_of_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    expected = accuracies(tmp_path, "wandb", "offline")
    paths = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(paths) == 2

    def records() -> list:
        return [record for path in paths for record in wandb_records(path)]

    def logged() -> list[float]:
        items = [item for record in records() for item in record.history.item]
        return [
            float(item.value_json)
            for item in items
            if (item.key or item.nested_key[0]) == "accuracy"
        ]

    # Another process writes the files.
    wait_until(lambda: len(logged()) == LONGER, 60, "all rounds")
    assert logged() == pytest.approx([accuracy for _, accuracy in expected])
    runs = [r.run.run_id for r in records() if r.WhichOneof("record_type") == "run"]
    assert len(set(runs)) == 1
