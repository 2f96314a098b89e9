"""Identification, refusal and sampling of clients."""

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from function_clients import START, Client, averaging, grid_of, honest, train_once
from malformed import crash
from participants import properties_of

from flwr_frl.common.errors import SettingsError
from flwr_frl.common.settings import resolve
from flwr_frl.strategies import FedAvg, base
from flwr_frl.strategies.base import Strategy
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.loop import run_rounds
from flwr_frl.strategies.server.replies import to_record
from flwr_frl.strategies.server_app import serve


def names_sampled(strategy: Strategy, grid: InlineGrid, rounds: int) -> list[list[str]]:
    nodes = strategy._identify(grid)
    return [
        [strategy._run.clients.name_of(node) for node in strategy.sample(r, nodes)]
        for r in range(1, rounds + 1)
    ]


def test_sampling_depends_on_seed_and_names_but_not_on_node_ids():
    n, rounds = 12, 20
    ids = np.random.default_rng(3).integers(1, 2**62, n).tolist()
    partitions = np.random.default_rng(4).permutation(n).tolist()
    moved = grid_of(n, partitions=dict(zip(ids, partitions, strict=True)))
    plain, mixed, other = (
        names_sampled(FedAvg(fraction_train=0.25, seed=seed), grid, rounds)
        for seed, grid in ((1, grid_of(n)), (1, moved), (2, grid_of(n)))
    )
    assert plain == mixed
    assert plain != other
    assert {len(names) for names in plain} == {3}
    assert all(names == sorted(set(names)) for names in plain)
    # Rounds differ, and with this seed each client is sampled at least once.
    assert len({tuple(names) for names in plain}) > 10
    assert len({name for names in plain for name in names}) == n


@pytest.mark.parametrize(
    ("fraction", "least", "nodes", "expected"),
    [
        (1.0, 1, 7, 7),
        (0.5, 1, 7, 3),
        (0.1, 1, 100, 10),
        (0.3, 1, 10, 3),
        (0.07, 1, 100, 7),
        (0.29, 1, 100, 29),
        (0.1, 4, 10, 4),
        (0.01, 2, 10, 2),
        (0.5, 20, 10, 10),
        (0.5, 1, 0, 0),
    ],
)
def test_number_of_sampled_clients(fraction, least, nodes, expected):
    strategy = FedAvg(fraction_train=fraction, min_train_nodes=least)
    assert len(strategy.sample(1, list(range(nodes)))) == expected


def test_client_that_leaves_before_round_1_does_not_end_the_run(tmp_path):
    class Leaving(InlineGrid):
        looks = 0

        def get_node_ids(self):
            self.looks += 1
            # The first two calls are made before round 1.
            return list(range(1, 21 if self.looks <= 2 else 20))

        def get_nodes(self):
            return []

    values = {"algorithm": "fedavg", "output": str(tmp_path), "num-server-rounds": 1}
    # The fraction samples one of 20 clients, and none of 19.
    settings = resolve({**values, "fraction-train": 0.05})
    assert serve(Leaving(honest, 20), settings)["rounds"] == 1
    few = {**settings, "output": str(tmp_path / "few")}
    with pytest.raises(SettingsError, match=r"of 19 clients it samples nobody"):
        serve(InlineGrid(honest, 19), few)
    assert not (tmp_path / "few").exists()


# Identification


def test_failing_node_is_queried_in_every_fourth_round(caplog):
    asked, failing = [], {2}

    def client(message: Message, context: Context) -> Message:
        if context.node_id in failing:
            asked.append(context.node_id)
            raise RuntimeError("not ready")
        return honest(message, context)

    strategy, grid = FedAvg(), grid_of(3, client)
    counts = []
    for _ in range(20):
        assert strategy._identify(grid) == [1, 3]
        counts.append(len(asked))
    # It is queried by the calls 1, 2, 6, 10, 14 and 18.
    assert counts == [1, *([2] * 4), *([3] * 4), *([4] * 4), *([5] * 4), 6, 6, 6]
    assert caplog.text.count("client 2 takes no part: error: ") == 1
    failing.clear()
    assert [1, 2, 3] in [strategy._identify(grid) for _ in range(8)]


class Coming(InlineGrid):
    """A grid of devices: each call of `get_node_ids` returns the next set of nodes.

    The last set is then returned by all further calls.
    """

    in_process = False

    def __init__(self, app: Client, looks: list[set[int]]) -> None:
        super().__init__(app, 4)
        self.looks = looks

    def get_node_ids(self) -> list[int]:
        return sorted(self.looks.pop(0) if len(self.looks) > 1 else self.looks[0])

    def get_nodes(self) -> list[object]:
        # Does not use up a set. No node has a registered name.
        return []


def refusing(message: Message, context: Context) -> Message:
    if message.metadata.message_type == MessageType.QUERY and context.node_id == 3:
        content = {"properties": ConfigRecord({"client": "c", "refusal": "no data"})}
        return Message(RecordDict(content), reply_to=message)
    return honest(message, context)


def test_run_waits_for_participants_while_only_refused_nodes_are_here(
    monkeypatch, caplog
):
    monkeypatch.setattr(base, "NOBODY_INTERVAL", 0.0)
    here, refused_alone = {1, 2, 3}, [{3}] * 9
    grid = Coming(refusing, [here, here, here, *refused_alone, {2, 3}])
    strategy, rows = averaging(), []
    caplog.set_level("INFO", logger="flwr")
    run_rounds(
        strategy,
        grid,
        strategy.initialize(grid),
        range(1, 6),
        evaluated=lambda server_round: False,
        after_round=lambda server_round, arrays, metrics: rows.append(metrics),
    )
    assert [row["clients"] for row in rows] == [2, 2, 1, 1, 1]
    assert "of the nodes that are here none takes part: c" in caplog.text


def test_waiting_for_participants_ends_after_the_round_timeout(monkeypatch):
    monkeypatch.setattr(base, "NOBODY_INTERVAL", 0.0)
    grid, strategy = Coming(refusing, [{3}]), averaging()
    strategy._run.clients.acknowledged = {"000000": 4, "c": 4}
    strategy._run.clients.round_timeout = 0.5
    config = ConfigRecord()
    assert list(strategy.configure_train(5, to_record(START), config, grid)) == []


def test_node_with_a_taken_name_is_refused_until_the_other_leaves(caplog):
    asked = []

    def client(message: Message, context: Context) -> Message:
        if message.metadata.message_type == MessageType.QUERY:
            asked.append(context.node_id)
        return properties_of(client={1: "same", 2: "same"})(message, context)

    grid, strategy = grid_of(3, client), FedAvg()
    for _ in range(20):
        assert strategy._identify(grid) == [1, 2]
    # Like all refused nodes, node 3 is asked twice, and then in every fourth round.
    assert (asked.count(2), asked.count(3)) == (1, 6)
    assert [m for m in caplog.messages if "'same'" in m] == [
        "client 3 takes no part: calls itself 'same', as another does; choose "
        "another name, or wait until the other is offline"
    ]
    # Once node 2 has left, node 3 takes its place.
    del grid.contexts[2]
    assert [1, 3] in [strategy._identify(grid) for _ in range(4)]
    assert strategy._run.clients.name_of(3) == "same"
    assert not strategy._run.clients.known[3].refusal


def test_minority_with_another_model_is_refused():
    grid = grid_of(5, properties_of(structure={0: "other", 3: "third"}))
    strategy = averaging()
    assert strategy._identify(grid) == [2, 3, 5]
    arrays, metrics = train_once(strategy, grid)
    # Clients 1, 2 and 4 add 2, 3 and 5.
    assert arrays["b"].numpy().tolist() == [np.float32(10 / 3)] * 4
    assert metrics["clients"] == 3
    rows = strategy._run.clients._rows
    assert [node for node in sorted(rows) if rows[node].refusal] == [1, 4]


def test_run_without_any_reply_fails():
    grid = grid_of(3, crash)
    assert FedAvg()._identify(grid) == []
    line = (
        "no client has sent its arrays; the last to fail was client 3: error: "
        "ZeroDivisionError: no examples"
    )
    with pytest.raises(SettingsError, match=line):
        FedAvg().initialize(grid)


def test_identify_waits_for_min_available_nodes(monkeypatch):
    grid = grid_of(3)
    late = grid.contexts.pop(3)
    waited = []

    def arrive(seconds: float) -> None:
        waited.append(seconds)
        grid.contexts[3] = late

    monkeypatch.setattr("flwr_frl.strategies.server.clients.time.sleep", arrive)
    assert FedAvg(min_available_nodes=3)._identify(grid) == [1, 2, 3]
    assert len(waited) == 1


def test_refusal_names_its_cause(caplog):
    properties = {
        "structure": {1: "classes", 2: "inputs", 3: "shapes"},
        "classes-digest": dict.fromkeys(range(6), "abc") | {1: "abd"},
        "num-classes": dict.fromkeys(range(6), 10) | {1: 11},
        "channels": dict.fromkeys(range(6), 1),
        "height": dict.fromkeys(range(6), 28) | {2: 32},
        "width": dict.fromkeys(range(6), 28),
    }
    assert FedAvg()._identify(grid_of(6, properties_of(**properties))) == [1, 5, 6]
    reasons = [m for m in caplog.messages if "takes no part" in m]
    for reason, cause in zip(reasons, ("11", "32", "shared arrays"), strict=True):
        assert cause in reason


def test_folder_name_is_the_label_unless_another_client_has_it():
    labels = {0: "anna", 1: "anna", 2: "000000", 3: "bob", 4: "two\nlines"}
    strategy, grid = FedAvg(), grid_of(5, properties_of(**{"own-name": labels}))
    strategy._identify(grid)
    shown = [strategy._run.clients.label(f"{i:06d}") for i in range(5)]
    assert shown == ["000000", "000001", "000002", "bob", "000004"]
