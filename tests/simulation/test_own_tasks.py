"""Custom tasks on the command line: their metrics, and errors in them."""

import pytest
from command_line import ROOT, assert_refused, cases, json_of, rows_of, run

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

def headless(num_clients):
    return table(num_clients, model=lambda: nn.Sequential(nn.Linear(1, 1)), head="fc")

def unequal(num_clients):
    return table(num_clients, train=[ExampleSet(torch.ones(3, 1), torch.ones(2, 1))])

def doubles(num_clients):
    x = torch.ones(3, 1).double()
    return table(num_clients, train=[ExampleSet(x, x)])

def many(num_clients):
    return table(num_clients, loss=lambda x, y: (x - y).square())

def endless(num_clients):
    return table(num_clients, loss=lambda x, y: (x - y).sum() / 0)

def strange(num_clients):
    return table(num_clients, weights="strange.pth")

def fewer(num_clients):
    return table(2)

def taken(num_clients):
    return table(num_clients, metrics={"loss": lambda outputs, targets: 1.0})

def sized(num_clients):
    return table(num_clients, metrics={"bytes": lambda outputs, targets: 1.0})

def loss(outputs, targets):
    return 1.0

def listed_elsewhere(num_clients):
    task = table(num_clients)
    object.__setattr__(task, "metrics", [max])
    return task

def counted(num_clients):
    return table(num_clients, metrics={"auc-clients": lambda outputs, targets: 1.0})

def undefined(num_clients):
    # Targets are at most 7, 14 and 21.
    defined = lambda outputs, targets: 1.0 if targets.max() < 20 else torch.nan
    return table(num_clients, metrics={"defined": defined})

def listed(num_clients):
    return table(num_clients, metrics=[max])

def built(num_clients):
    return table(num_clients, model=SplitModel(nn.Linear(1, 2), nn.Linear(2, 1)))

def arrays(num_clients):
    x = torch.ones(3, 1)
    return table(num_clients, train=[ExampleSet(x.numpy(), x)])

def nothing(num_clients):
    pass
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
    assert "test loss" in table


def test_table_has_the_number_of_clients_behind_each_mean(tmp_path, write_module):
    path = f"{write_module('tables', TASK)}:undefined"
    flags = ("--task", path, "--clients", "3", "--rounds", "1")
    assert run(tmp_path, "fedavg", *flags) == 0
    (row,) = rows_of(tmp_path, "fedavg")
    assert (row["evaluated"], row["defined-clients"]) == (3, 2)
    assert "loss-clients" not in row
    summary = json_of(tmp_path / "summary.json")["algorithms"]["fedavg"]
    assert (summary["evaluated"], summary["defined-clients"]) == (3, 2)
    assert "| 1 (2 clients) |" in (tmp_path / "table.md").read_text()


BAD = """
nothing => ~made a NoneType without 'initial_model'
headless => ~the model Sequential has no head named 'fc'; its linear layers: 0
fewer => ~the task's train has examples of 2 clients
taken => ~a metric is called 'loss', which is a reserved name
counted => ~a metric is called 'auc-clients', which is a reserved name
sized => ~a metric is called 'bytes', which is a reserved name
listed_elsewhere => ~metrics is a list
listed => ~metrics is a list
built => ~model is a SplitModel; expected a function
arrays => ~inputs is of type ndarray
unequal => ~there are 3 inputs and 2 targets
doubles => ~the model refuses inputs of type float64 and shape (3, 1)
many => ~the loss of a batch is shape (8, 1)
endless => ~the loss of the first batch is
strange => ~weights is 'strange.pth'; there is no such file
table @ metrics='MODULE:loss' => ~a metric is called 'loss'
listed_elsewhere @ metrics='macro-f1' => ~metrics is a list
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


def test_fedrep_beats_fedavg_on_a_third_party_task(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests" / "guest")
    flags = ("--task", "guest.task:sensors", "--clients", "4", "--fraction", "1")
    assert run(tmp_path, "fedrep", "fedavg", *flags, "--rounds", "15") == 0
    summary = json_of(tmp_path / "summary.json")["algorithms"]
    # Devices differ, so a single model for all of them explains less variance.
    assert summary["fedrep"]["r2"] > summary["fedavg"]["r2"] + 0.1
