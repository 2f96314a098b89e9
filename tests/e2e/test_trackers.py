"""Files of W&B receive the metrics of a run that is continued."""

import time
from pathlib import Path

import pytest
from federation import wait_until

from flwr_frl import simulate


@pytest.mark.e2e
def test_wandb_has_two_files_of_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    settings = {"clients": 5, "evaluate_every": 1, "head_epochs": 1, "fraction": 1.0}
    settings |= {"backend": "inline", "output": str(tmp_path)}
    settings |= {"tracker": "wandb", "tracker_uri": "offline"}
    simulate("fedrep", rounds=2, **settings)
    # W&B names files by the second.
    time.sleep(1)
    run = simulate("fedrep", rounds=3, resume=str(tmp_path), **settings)
    paths = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(paths) == 2
    # Files are named by the run, and hold metrics as JSON.
    assert len({path.stem for path in paths}) == 1
    accuracies = [str(row["accuracy"]).encode() for row in run.rows]

    def all_are_logged() -> bool:
        data = b"".join(path.read_bytes() for path in paths)
        return all(accuracy in data for accuracy in accuracies)

    # Another process writes the files.
    wait_until(all_are_logged, 60, "all rounds")
