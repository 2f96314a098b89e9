"""Logs call a client by the name that it has in the files of the run."""

import pytest

from flwr_frl import simulate
from flwr_frl.clients.device.codec import pack
from flwr_frl.task.training import TrainingDivergedError

TASK = """
import torch
from torch import nn
from flwr_frl.task import ExampleSet, ExampleTask, SplitModel

def draw(n, width=4):
    return ExampleSet(torch.randn(n, width), torch.arange(n) % 2)

def named():
    sizes = {"ann": 8, "bob": 8, "cat": 0, "dan": 8, "eve": 8}
    train = {name: draw(n, 3 if name == "dan" else 4) for name, n in sizes.items()}
    model = lambda: SplitModel(nn.Linear(4, 3), nn.Linear(3, 2))
    test = {name: draw(0 if name == "eve" else 6) for name in sizes}
    return ExampleTask(model, train, test, classes=("a", "b"))
"""


@pytest.mark.parametrize("algorithm", ["fedrep", "flute", "dpsgd"])
def test_logs_and_files_call_a_client_the_same(
    algorithm, write_module, tmp_path, monkeypatch, caplog
):
    def fail(message, client, *rest):
        if client._index == 1:
            raise TrainingDivergedError("the loss is inf")
        return pack(message, client, *rest)

    monkeypatch.setattr("flwr_frl.clients.client_app.pack", fail)
    caplog.set_level("INFO", logger="flwr")
    task = f"{write_module('named', TASK)}:named"
    options = {"clients": 5, "rounds": 2, "fraction": 1.0}
    run = simulate(algorithm, "inline", task=task, output=tmp_path, **options)
    assert "00000" not in caplog.text
    assert "reply of client bob is an error: TrainingDivergedError" in caplog.text
    assert [row["rejected-clients"] for row in run.rows] == [["bob"]] * 2
    assert '"client": "dan"' in (tmp_path / algorithm / "status.json").read_text()
