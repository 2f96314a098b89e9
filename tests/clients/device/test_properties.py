"""Properties of simulated clients: by default, only the first client is built."""

import pytest
import torch
from client_messages import context_of
from flwr.app import ConfigRecord, Message, RecordDict
from torch import nn

from flwr_frl.clients.algorithms import client_setup
from flwr_frl.clients.client_app import make_app
from flwr_frl.clients.device import properties
from flwr_frl.clients.device.setup import build_client
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


@pytest.fixture
def built(monkeypatch):
    indices, build = [], properties.build_client

    def counted(context, setup, config):
        indices.append(context.node_config["partition-id"])
        return build(context, setup, config)

    monkeypatch.setattr(properties, "build_client", counted)
    return indices


def test_each_client_reports_its_own_examples(built):
    reports, _ = reported()
    assert built == [0]
    expected = {
        "num-examples": [1, 2, 3, 4],
        "num-test-examples": [1, 2, 3, 4],
        "class-counts": [[1], [2], [3], [4]],
        "held-classes": [["a"], ["b"], ["a"], ["b"]],
        "client": [f"{i:06d}" for i in range(4)],
    }
    assert {name: [p[name] for p in reports] for name in expected} == expected


@pytest.mark.parametrize("algorithm", ["fedavg", "fedrep", "scaffold", "flute"])
def test_properties_equal_those_of_a_built_client(algorithm):
    reports, config = reported(algorithm)
    for i, held in enumerate(reports):
        context = context_of(i, 4)
        client = build_client(context, client_setup(context, config), {})
        expected = client.get_properties({})
        assert {name: held[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        # FLUTE clients report a mask of their classes.
        ("flute", {}),
        # Class weights depend on the client's examples.
        ("fedavg", {"class-weights": "balanced"}),
        # Clients report the rounds of their saved states.
        ("fedrep", {"checkpoint-every": 1}),
    ],
)
def test_clients_that_differ_in_more_than_examples_are_built(
    algorithm, settings, built, tmp_path
):
    reported(algorithm, output=str(tmp_path), **settings)
    assert built == [0, 1, 2, 3]


def test_count_multiple_rounds_the_counts_of_all_clients():
    reports, _ = reported(**{"count-multiple": 3})
    # The counts 1 to 4, rounded to multiples of 3, but at least 3
    assert [p["num-examples"] for p in reports] == [3, 3, 3, 3]


def test_a_client_whose_examples_do_not_fit_is_refused(built):
    reports, _ = reported(task="wrong")
    assert built == [0]
    assert ["refusal" in p for p in reports] == [False, False, False, True]
