"""Clients that join later, refused clients, and an unchanged population."""

import pytest
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from function_clients import (
    Client,
    averaging,
    grid_of,
    honest,
    partition_of,
    train_once,
)
from participants import properties_of

from flwr_frl.strategies.base import Strategy
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server import clients


def come_and_go(strategy: Strategy, nodes: list[int]) -> list[int]:
    """Train with nodes 1 and 2 only, then identify the clients of ``nodes``."""
    others = dict.fromkeys(range(2, 5), "another")
    grid = grid_of(5, properties_of(structure=others))
    contexts, there = dict(grid.contexts), {1: grid.contexts[1], 2: grid.contexts[2]}
    grid.contexts.data = there
    if not strategy.ledger.acknowledged:
        train_once(strategy, grid)
    grid.contexts.data = {node: contexts[node] for node in nodes}
    return strategy.identify(grid)


@pytest.mark.parametrize(
    ("nodes", "fit"),
    [
        ([1, 2, 3, 4, 5], [1, 2]),
        ([1, 3, 4], [1]),
        ([3, 4, 5], []),
    ],
)
def test_clients_that_join_later_cannot_outvote_the_run(nodes, fit, caplog):
    strategy = averaging()
    assert come_and_go(strategy, nodes) == fit
    refused = [m for m in caplog.messages if "takes no part" in m]
    assert len(refused) == len(nodes) - len(fit)
    assert all("that the other clients have" in message for message in refused)
    # The same holds in a resumed run.
    resumed = averaging()
    resumed.restore(strategy.snapshot()())
    assert come_and_go(resumed, nodes) == fit


def test_refused_node_is_queried_less_and_less_often():
    asked = []

    def client(message: Message, context: Context) -> Message:
        reply = properties_of(refusal={0: "its data are gone"})(message, context)
        asked.extend([0] * (partition_of(context) == 0))
        if len(asked) > 4 and partition_of(context) == 0:
            reply.content.config_records["properties"].pop("refusal")
        return reply

    strategy, grid = averaging(), grid_of(2, client)
    at = []
    for i in range(25):
        before = len(asked)
        nodes = strategy.identify(grid)
        at += [i] * (len(asked) - before)
        assert nodes == ([2] if len(asked) <= 4 else [1, 2])
    # It is skipped 1, 3, 7 and 7 times between queries, and then takes part.
    assert at == [0, 2, 6, 14, 22]


def test_refused_nodes_are_notified_together():
    sizes = []

    class Counting(InlineGrid):
        def send_and_receive(self, messages, *, timeout=None):
            sizes.append(len(messages := list(messages)))
            return super().send_and_receive(messages)

    app = properties_of(structure={1: "another", 2: "a third"})
    assert averaging().identify(Counting(app, 6)) == [1, 4, 5, 6]
    assert sizes == [6, 2]


def settled(client: Client, num_clients: int) -> tuple[Strategy, InlineGrid]:
    """Return a strategy that has trained once, and its grid."""
    strategy, grid = averaging(), grid_of(num_clients, client)
    strategy.initialize(grid)
    train_once(strategy, grid)
    assert strategy.clients.state_dict()["model"]
    return strategy, grid


def test_unchanged_population_is_not_examined_again() -> None:
    strategy, grid = settled(honest, 3)
    examined: list[str] = []

    def refusal_of(client: clients.Client) -> str:
        examined.append(client.name)
        return "it is the third" if client.name == "000002" else ""

    strategy.clients.refusal_of = refusal_of
    late = grid.contexts.pop(2)
    # Callers may modify the returned list.
    strategy.identify(grid).clear()
    for _ in range(3):
        assert strategy.identify(grid) == [1]
    # The refused client is asked again after a pause, and then pauses for longer.
    assert examined == ["000000", "000002"] * 2
    grid.contexts[2] = late
    assert strategy.identify(grid) == [1, 2]
    assert strategy.identify(grid) == [1, 2]
    assert examined[4:] == ["000000", "000001"]


def test_refused_and_failing_nodes_of_an_unchanged_population_are_queried() -> None:
    asked: list[int] = []
    failing = {1: "refuses", 2: "fails"}

    def client(message: Message, context: Context) -> Message:
        if message.metadata.message_type != MessageType.QUERY:
            return honest(message, context)
        partition = partition_of(context)
        asked.append(partition)
        if failing.get(partition) == "fails":
            raise RuntimeError("not ready")
        if failing.get(partition) == "refuses":
            record = ConfigRecord({"client": "000001", "refusal": "no data"})
            return Message(RecordDict({"properties": record}), reply_to=message)
        return honest(message, context)

    strategy, grid = settled(client, 4)
    asked.clear()
    for _ in range(10):
        assert strategy.identify(grid) == [1, 4]
    # Both are skipped 3 or 7 times between queries.
    assert 1 <= asked.count(2) <= 3
    assert 1 <= asked.count(1) <= 3
    failing.clear()
    for _ in range(8):
        nodes = strategy.identify(grid)
    assert nodes == [1, 2, 3, 4]
    asked.clear()
    assert strategy.identify(grid) == [1, 2, 3, 4]
    assert asked == []


def test_name_of_a_busy_client_is_taken():
    class Partly(InlineGrid):
        connected, busy = frozenset({1, 2}), frozenset()

        def get_node_ids(self):
            return sorted(self.connected - self.busy)

    grid = Partly(properties_of(client={1: "same", 2: "same"}), 3)
    strategy = averaging()
    assert strategy.identify(grid) == [1, 2]
    # Node 2 still owes a reply when node 3 connects.
    grid.connected, grid.busy = frozenset({1, 2, 3}), frozenset({2})
    assert strategy.identify(grid) == [1]
    assert strategy.clients.name_of(2) == "same"
    assert strategy.clients.refused[3].twin == 2
    grid.connected = frozenset({1, 3})
    assert strategy.identify(grid) == [1, 3]
