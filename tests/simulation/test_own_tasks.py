"""Custom tasks on the command line: their metrics, and errors in them."""

import pytest
from command_line import assert_refused, cases, json_of, rows_of, run

TASK = """
import torch
from torch import nn
from flwr_frl.task import ExampleSet, ExampleTask, SplitModel

def table(num_clients, **change):
    x = torch.arange(8.0)[:, None]
    sets = [ExampleSet(x, x * (1 + i)) for i in range(num_clients)]
    build = lambda: SplitModel(nn.Linear(1, 2), nn.Linear(2, 1))
    own = {"worst": lambda outputs, targets: (outputs - targets).abs().max()}
    more = {"loss": nn.functional.l1_loss, "metrics": own, **change}
    return ExampleTask(**{"model": build, "train": sets, "test": sets, **more})

def taken(num_clients):
    return table(num_clients, metrics={"loss": lambda outputs, targets: 1.0})

def undefined(num_clients):
    # Targets are at most 7, 14 and 21.
    defined = lambda outputs, targets: 1.0 if targets.max() < 20 else torch.nan
    return table(num_clients, metrics={"defined": defined})
"""


def test_custom_metrics_are_in_the_files_and_the_table(tmp_path, write_module, capsys):
    path = f"{write_module('tables', TASK)}:table"
    flags = ("--task", path, "--clients", "3", "--rounds", "2")
    assert run(tmp_path, "fedrep", "fedavg", *flags, evaluate_every=1) == 0
    table = capsys.readouterr().out
    for name in ("fedrep", "fedavg"):
        values = [row["worst"] for row in rows_of(tmp_path, name)]
        summary = json_of(tmp_path / "summary.json")["algorithms"][name]
        assert summary["worst"] == pytest.approx(sum(values) / 2)
        of_clients = json_of(tmp_path / name / "clients.json").values()
        mean = sum(client["worst"] for client in of_clients) / 3
        assert values[-1] == pytest.approx(mean)
        # The largest distance is at least the mean one.
        assert values[-1] >= rows_of(tmp_path, name)[-1]["loss"]
        assert f"{summary['worst']:.4g}" in table
    assert "worst" in table
    assert " loss " in table


def test_table_has_the_number_of_clients_behind_each_mean(tmp_path, write_module):
    path = f"{write_module('tables', TASK)}:undefined"
    flags = ("--task", path, "--clients", "3", "--rounds", "1")
    assert run(tmp_path, "fedavg", *flags) == 0
    (row,) = rows_of(tmp_path, "fedavg")
    assert (row["evaluated"], row["defined-clients"]) == (3, 2)
    assert "loss-clients" not in row
    summary = json_of(tmp_path / "summary.json")["algorithms"]["fedavg"]
    assert (summary["evaluated"], summary["defined-clients"]) == (3, 2)
    assert "1 (2 clients)" in (tmp_path / "report.html").read_text()


BAD = """
taken => ~a metric is called 'loss'
table @ metrics='MODULE:nothing' => metrics
"""


@pytest.mark.parametrize(("arguments", "expected"), cases(BAD))
def test_invalid_custom_tasks_are_refused(
    arguments, expected, write_module, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    module, (name, *settings) = write_module("tables", TASK), arguments
    more = [text.replace("MODULE", module) for text in settings]
    command = ["fedrep", "--task", f"{module}:{name}", "--clients", "3", *more]
    assert_refused(command, expected, tmp_path)
