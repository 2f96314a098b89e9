"""Who is there, who is sampled, and whose model the run begins with."""

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from function_clients import (
    START,
    Client,
    averaging,
    grid_of,
    honest,
    partition_of,
    train_once,
)
from malformed import crash
from participants import properties_of

from flwr_frl.strategies import FedAvg
from flwr_frl.strategies.base import BaseStrategy
from flwr_frl.strategies.grids import nodes as grid_nodes
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server import client_manager
from flwr_frl.strategies.server.queries import query_arrays
from flwr_frl.strategies.server.replies import to_record
from flwr_frl.strategies.server.rounds import run_rounds
from flwr_frl.strategies.server_app import run
from flwr_frl.task.settings import SettingsError, resolve


def names_sampled(
    strategy: BaseStrategy, grid: InlineGrid, rounds: int
) -> list[list[str]]:
    nodes = strategy.identify(grid)
    return [
        [strategy.name_of(node) for node in strategy.sample(r, nodes)]
        for r in range(1, rounds + 1)
    ]


def test_sampling_follows_seed_and_names_and_not_node_ids():
    n, rounds = 12, 20
    ids = np.random.default_rng(3).integers(1, 2**62, n).tolist()
    mapping = dict(
        zip(ids, np.random.default_rng(4).permutation(n).tolist(), strict=True)
    )
    plain = names_sampled(FedAvg(fraction_train=0.25, seed=1), grid_of(n), rounds)
    mixed = names_sampled(
        FedAvg(fraction_train=0.25, seed=1), grid_of(n, partitions=mapping), rounds
    )
    other = names_sampled(FedAvg(fraction_train=0.25, seed=2), grid_of(n), rounds)
    assert plain == mixed
    assert plain != other
    assert {len(names) for names in plain} == {3}
    assert all(names == sorted(set(names)) for names in plain)
    # Rounds differ, and with 60 draws everyone gets a turn but for luck of 1e-7.
    assert len({tuple(names) for names in plain}) > 10
    assert len({name for names in plain for name in names}) == n


def test_sampling_is_even():
    strategy = FedAvg(fraction_train=0.3)
    counts = np.zeros(10)
    for r in range(1, 1001):
        counts[strategy.sample(r, list(range(10)))] += 1
    # Binomial(1000, 0.3): standard deviation 14.5.
    assert np.all(np.abs(counts - 300) < 5 * 14.5)


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
def test_how_many_are_sampled(fraction, least, nodes, expected):
    strategy = FedAvg(fraction_train=fraction, min_train_nodes=least)
    assert len(strategy.sample(1, list(range(nodes)))) == expected


def test_a_fraction_that_samples_nobody():
    line = "fraction-train is 0.05: of 10 clients it samples nobody; expected at"
    with pytest.raises(SettingsError, match=f"{line} least 0.1"):
        FedAvg(fraction_train=0.05).check_clients(10)


def test_one_that_leaves_before_round_1_does_not_end_the_run(tmp_path):
    class Leaving(InlineGrid):
        looks = 0

        def get_node_ids(self):
            self.looks += 1
            # Two are for the initial arrays and for who is there.
            return list(range(1, 21 if self.looks <= 2 else 20))

        def get_nodes(self):
            return []

    given = {"algorithm": "fedavg", "output": str(tmp_path), "num-server-rounds": 1}
    # Of 20 clients one trains; of 19 it is none.
    settings = resolve({**given, "fraction-train": 0.05})
    assert run(Leaving(honest, 20), settings)["rounds"] == 1
    few = {**settings, "output": str(tmp_path / "few")}
    with pytest.raises(SettingsError, match=r"of 19 clients it samples nobody"):
        run(InlineGrid(honest, 19), few)
    assert not (tmp_path / "few").exists()


# Who is there


def test_each_node_is_asked_once():
    asked = []

    def client(message: Message, context: Context) -> Message:
        if message.metadata.message_type == MessageType.QUERY:
            asked.append(context.node_id)
        return honest(message, context)

    strategy, grid = FedAvg(), grid_of(3, client)
    for _ in range(3):
        assert strategy.identify(grid) == [1, 2, 3]
    assert asked == [1, 2, 3]


def test_a_node_that_does_not_answer_is_asked_again():
    silent = {2}

    def client(message: Message, context: Context) -> Message:
        if context.node_id in silent:
            raise RuntimeError("not ready")
        return honest(message, context)

    strategy, grid = FedAvg(), grid_of(3, client)
    assert strategy.identify(grid) == [1, 3]
    silent.clear()
    assert strategy.identify(grid) == [1, 2, 3]


class Coming(InlineGrid):
    """Devices, not calls in one process: at each look those of the next set are here.

    The last set stays.
    """

    in_process = False

    def __init__(self, app: Client, looks: list[set[int]]) -> None:
        super().__init__(app, 4)
        self.looks, self.forgiven = looks, 0

    def get_node_ids(self) -> list[int]:
        return sorted(self.looks.pop(0) if len(self.looks) > 1 else self.looks[0])

    def get_nodes(self) -> list[object]:
        # Not a look; none has a registered name.
        return []

    def forgive(self) -> None:
        self.forgiven += 1


def refusing(message: Message, context: Context) -> Message:
    if message.metadata.message_type == MessageType.QUERY and context.node_id == 3:
        content = {"properties": ConfigRecord({"client": "c", "refusal": "no data"})}
        return Message(RecordDict(content), reply_to=message)
    return honest(message, context)


def test_those_who_take_no_part_use_up_no_rounds(monkeypatch, caplog):
    monkeypatch.setattr(grid_nodes, "POLL_INTERVAL", 0.0)
    monkeypatch.setattr(grid_nodes, "WAITING_INTERVAL", 0.0)
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
    assert "of the nodes that are here none takes part: 3" in caplog.text
    # Who was only silent is asked again.
    assert grid.forgiven > 0


def test_nobody_is_waited_for_who_is_here_already(monkeypatch):
    def never(self, grid, until):
        raise AssertionError("waited for nobody")

    monkeypatch.setattr(client_manager.ClientManager, "wait_for_others", never)
    grid, strategy = Coming(refusing, [{3}]), averaging()
    # As after a resume of which the only client is refused by now.
    strategy.ledger.acknowledged = {"c": 4}
    config = ConfigRecord()
    assert list(strategy.configure_train(5, to_record(START), config, grid)) == []


def test_a_round_waits_no_longer_than_a_round_may(monkeypatch):
    monkeypatch.setattr(grid_nodes, "POLL_INTERVAL", 0.0)
    grid, strategy = Coming(refusing, [{3}]), averaging()
    strategy.ledger.acknowledged = {"000000": 4, "c": 4}
    strategy.clients.round_timeout = 0.5
    config = ConfigRecord()
    assert list(strategy.configure_train(5, to_record(START), config, grid)) == []
    assert grid.forgiven > 0


def test_in_one_process_nobody_is_waited_for():
    strategy, grid = averaging(), grid_of(4, refusing)
    train_once(strategy, grid)
    grid.get_node_ids = lambda: [3]
    assert (
        list(strategy.configure_train(2, to_record(START), ConfigRecord(), grid)) == []
    )


def test_nodes_are_ordered_by_name():
    grid = grid_of(4, partitions={40: 2, 10: 3, 30: 0, 20: 1})
    strategy = FedAvg()
    assert strategy.identify(grid) == [30, 20, 40, 10]
    assert strategy.name_of(10) == "000003"
    assert strategy.name_of(77) == "77"


def test_two_nodes_of_the_same_name():
    grid = grid_of(4, properties_of(client={1: "same", 3: "same"}))
    strategy = FedAvg()
    # The one with the smaller id keeps the name; the other stays out.
    for _ in range(2):
        assert strategy.identify(grid) == [1, 3, 2]
    assert [strategy.name_of(n) for n in (1, 3, 2)] == ["000000", "000002", "same"]


def test_one_with_a_taken_name_rests_until_the_other_has_gone(caplog):
    asked = []

    def client(message: Message, context: Context) -> Message:
        if message.metadata.message_type == MessageType.QUERY:
            asked.append(context.node_id)
        return properties_of(client={1: "same", 2: "same"})(message, context)

    grid, strategy = grid_of(3, client), FedAvg()
    for _ in range(20):
        assert strategy.identify(grid) == [1, 2]
    # As refused nodes are: after 1, 3, 7 and 7 times.
    assert (asked.count(2), asked.count(3)) == (1, 4)
    assert [m for m in caplog.messages if "'same'" in m] == [
        "client 3 takes no part: it calls itself 'same', as another does"
    ]
    # Of the first one there is no more: it takes its place at once.
    del grid.contexts[2]
    assert strategy.identify(grid) == [1, 3]
    assert strategy.name_of(3) == "same"
    assert strategy.clients.refusals == {}


def test_a_client_that_comes_back_as_another_node():
    grid, strategy = grid_of(3), FedAvg()
    strategy.identify(grid)
    strategy.ledger.acknowledged = {"000001": 4}
    grid.contexts[99] = grid.contexts.pop(2)
    assert strategy.identify(grid) == [1, 99, 3]
    assert strategy.name_of(99) == "000001"
    content = strategy.content(99, to_record(START), ConfigRecord({"server-round": 5}))
    assert content.config_records["config"]["acknowledged-round"] == 4


def test_a_minority_with_another_model_stays_out():
    grid = grid_of(5, properties_of(structure={0: "other", 3: "third"}))
    strategy = averaging()
    assert strategy.identify(grid) == [2, 3, 5]
    arrays, metrics = train_once(strategy, grid)
    # Clients 1, 2 and 4 add 2, 3 and 5.
    assert arrays["b"].numpy().tolist() == [np.float32(10 / 3)] * 4
    assert metrics["clients"] == 3
    assert sorted(strategy.clients.refusals) == [1, 4]


def test_a_tie_between_structures_is_decided_alike():
    for who in ({0: "a", 1: "b"}, {0: "b", 1: "a"}):
        grid = grid_of(2, properties_of(structure=who))
        (node,) = FedAvg().identify(grid)
        assert who[node - 1] == "a"


def test_nobody_answers():
    grid = grid_of(3, crash)
    assert FedAvg().identify(grid) == []
    line = (
        "no client has sent its arrays; the last to fail was node 3: "
        "ZeroDivisionError: no examples"
    )
    with pytest.raises(SettingsError, match=line):
        FedAvg().initialize(grid)


def test_enough_nodes_are_waited_for(monkeypatch):
    grid = grid_of(3)
    late = grid.contexts.pop(3)
    waited = []

    def arrive(seconds: float) -> None:
        waited.append(seconds)
        grid.contexts[3] = late

    monkeypatch.setattr("flwr_frl.strategies.grids.nodes.time.sleep", arrive)
    assert FedAvg(min_available_nodes=3).identify(grid) == [1, 2, 3]
    assert len(waited) == 1


def test_a_refusal_names_its_real_cause(caplog):
    said = {
        "structure": {1: "classes", 2: "inputs", 3: "shapes"},
        "classes-digest": dict.fromkeys(range(6), "abc") | {1: "abd"},
        "num-classes": dict.fromkeys(range(6), 10) | {1: 11},
        "channels": dict.fromkeys(range(6), 1),
        "height": dict.fromkeys(range(6), 28) | {2: 32},
        "width": dict.fromkeys(range(6), 28),
    }
    assert FedAvg().identify(grid_of(6, properties_of(**said))) == [1, 5, 6]
    reasons = dict(
        m.removeprefix("client ").split(" takes no part: ")
        for m in caplog.messages
        if "takes no part" in m
    )
    assert reasons == {
        "000001": "its 11 classes are not those of the other clients, who have 10: "
        "names and their order must be the same",
        "000002": "its inputs are 1 x 32 x 28 and those of the other clients are "
        "1 x 28 x 28 (channels, height, width)",
        "000003": "its shared arrays are not of the names and shapes that the "
        "other clients have, or the model that it begins with is another one",
    }


def test_clients_go_by_their_folders_and_nobody_by_another_s_name():
    labels = {0: "anna", 1: "anna", 2: "000000", 3: "bob", 4: "two\nlines"}

    def client(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        if message.metadata.message_type == MessageType.QUERY:
            label = labels[partition_of(context)]
            reply.content.config_records["properties"]["own-name"] = label
        return reply

    strategy, grid = FedAvg(), grid_of(5, client)
    strategy.identify(grid)
    found = [strategy.clients.label(f"{i:06d}") for i in range(5)]
    assert found == ["anna", "000001", "000002", "bob", "000004"]


def test_statistics_have_as_much_time_as_a_round_and_the_silent_are_named(caplog):
    times = []

    class Patient(InlineGrid):
        def send_and_receive(self, messages, *, timeout=None):
            times.append(timeout)
            replies = super().send_and_receive(messages)
            return [r for r in replies if r.metadata.src_node_id != 2]

    strategy, grid = FedAvg(), grid_of(3)
    nodes = strategy.identify(grid)
    strategy.clients.round_timeout = 7200.0
    silent = Patient(honest, 3)
    for action in ("statistics", "arrays"):
        answers = query_arrays(strategy.clients, silent, nodes, action)
        assert [name for name, _ in answers] == ["000000", "000002"]
        assert f"no {action} of 000001" in caplog.text
    assert times == [7200.0, 600.0]
