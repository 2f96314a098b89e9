"""A run of an earlier version can be resumed, and its clients' states can be used."""

import json
import shutil
from pathlib import Path

import pytest

from flwr_frl import cli
from flwr_frl.clients.predict import load_run
from flwr_frl.task.checkpoint import read_about
from flwr_frl.task.settings import resolve
from flwr_frl.task.tasks import build_task

# tests/data/README.md says how this run was written, and by which version.
OLD_RUN = Path(__file__).parent / "data" / "old-run"
CLIENTS = json.loads((OLD_RUN / "fedrep" / "clients.json").read_text())
TRAINED = [name for name, about in CLIENTS.items() if about["last-round"] > 0]
SETTINGS = """
model="digits-cnn" num-clients=4 classes-per-client=5 checkpoint-every=1
evaluate-every=1 head-epochs=2 learning-rate=0.05 cohort="off"
"""


def rounds_of(output: Path, rounds: int, *, resume: bool) -> list[dict]:
    config = SETTINGS + (f" resume={json.dumps(str(output))}" if resume else "")
    arguments = ["fedrep", "--backend", "inline", "--rounds", str(rounds)]
    arguments += ["--output", str(output), "--run-config", config]
    assert cli.main(arguments) == 0
    lines = (output / "fedrep" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_an_old_run_resumes_with_the_saved_heads_of_its_clients(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(OLD_RUN, old)
    rows = rounds_of(old, 3, resume=True)
    assert [row["round"] for row in rows] == [1, 2, 3]
    # Without the clients' files, the accuracy would be 0.53 instead of 0.74.
    expected = rounds_of(new, 3, resume=False)[-1]
    assert rows[-1]["accuracy"] == pytest.approx(expected["accuracy"], abs=0.05)
    assert rows[-1]["train-loss"] == pytest.approx(expected["train-loss"], abs=0.05)


@pytest.mark.parametrize("client", TRAINED)
@pytest.mark.parametrize("on_device", [False, True])
def test_an_old_head_has_its_former_accuracy(tmp_path, client, on_device):
    run = OLD_RUN / "fedrep"
    state_dir = ""
    if on_device:
        # A device keeps the same files in a folder named after the run.
        about = read_about(run / "checkpoint.safetensors")
        directory = tmp_path / f"run-{about['values']['run']}" / client
        shutil.copytree(run / "clients" / client, directory)
        state_dir = str(tmp_path)
    classifier, _ = load_run(run, client, state_dir)
    task = build_task(resolve({"num-clients": 4, "classes-per-client": 5}), 4)
    examples = task.test_examples(int(client))
    correct = classifier(examples.inputs).argmax(1) == examples.targets
    accuracy = correct.float().mean().item()
    assert accuracy == pytest.approx(CLIENTS[client]["accuracy"], abs=0.02)
