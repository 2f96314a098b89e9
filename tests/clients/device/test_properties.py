"""Properties of simulated clients: by default, only the first client is built."""

import torch
from flwr.app import ConfigRecord, Message, RecordDict
from torch import nn

from flwr_frl.clients.client_app import make_app
from flwr_frl.common.run_cache import begin_run
from flwr_frl.common.settings import resolve
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.task import ExampleSet, ExampleTask, SplitModel


def sized(num_clients: int) -> ExampleTask:
    """Return a task in which client i has i + 1 examples, all of class i % 2."""
    sets = [
        ExampleSet(torch.ones(n, 2), torch.full((n,), (n - 1) % 2))
        for n in range(1, num_clients + 1)
    ]
    model = lambda: SplitModel(nn.Linear(2, 3), nn.Linear(3, 2))  # noqa: E731
    return ExampleTask(model, sets, sets, classes=("a", "b"))


def wrong(num_clients: int) -> ExampleTask:
    """Return a task whose last client has an example of an undefined class."""
    task = sized(num_clients)
    sets = [*task.train[:-1], ExampleSet(torch.ones(2, 2), torch.tensor([0, 2]))]
    return ExampleTask(task.model, sets, sets, classes=("a", "b"))


def reported(algorithm="fedavg", task="sized", num_clients=4, **settings):
    """Return the properties that each client reports, and the settings."""
    begin_run()
    run = {"algorithm": algorithm, "task": f"{__name__}:{task}", "device": "cpu"}
    config = resolve({**run, "num-clients": num_clients, **settings})
    grid = InlineGrid(make_app(config), num_clients)
    content = RecordDict({"config": ConfigRecord({"run": "r"})})
    queries = [Message(content, node, "query") for node in grid.get_node_ids()]
    replies = list(grid.send_and_receive(queries))
    return [dict(reply.content["properties"]) for reply in replies], config


def test_each_client_reports_its_own_examples():
    reports, _ = reported()
    expected = {
        "num-examples": [1, 2, 3, 4],
        "num-test-examples": [1, 2, 3, 4],
        "class-counts": [[1], [2], [3], [4]],
        "held-classes": [["a"], ["b"], ["a"], ["b"]],
        "client": [f"{i:06d}" for i in range(4)],
    }
    assert {name: [p[name] for p in reports] for name in expected} == expected


def test_a_client_whose_examples_do_not_fit_is_refused():
    reports, _ = reported(task="wrong")
    assert ["refusal" in p for p in reports] == [False, False, False, True]
