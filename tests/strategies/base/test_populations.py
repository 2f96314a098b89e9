"""Clients that join later, refused clients, and an unchanged population."""

import pytest
from function_clients import averaging, grid_of, train_once
from participants import properties_of

from flwr_frl.strategies.base import Strategy
from flwr_frl.strategies.grids.simulation import InlineGrid


def come_and_go(strategy: Strategy, nodes: list[int]) -> list[int]:
    """Train with nodes 1 and 2 only, then identify the clients of ``nodes``."""
    others = dict.fromkeys(range(2, 5), "another")
    grid = grid_of(5, properties_of(structure=others))
    contexts, there = dict(grid.contexts), {1: grid.contexts[1], 2: grid.contexts[2]}
    grid.contexts.data = there
    if not strategy._run.clients.acknowledged:
        train_once(strategy, grid)
    grid.contexts.data = {node: contexts[node] for node in nodes}
    return strategy._identify(grid)


@pytest.mark.parametrize(
    ("nodes", "fit"), [([1, 2, 3, 4, 5], [1, 2]), ([1, 3, 4], [1]), ([3, 4, 5], [])]
)
def test_clients_that_join_later_cannot_outvote_the_run(nodes, fit, caplog):
    strategy = averaging()
    assert come_and_go(strategy, nodes) == fit
    refused = [m for m in caplog.messages if "takes no part" in m]
    assert len(refused) == len(nodes) - len(fit)
    # The same holds in a resumed run.
    resumed = averaging()
    resumed._restore(strategy._snapshot())
    assert come_and_go(resumed, nodes) == fit


def test_name_of_a_busy_client_is_taken():
    class Partly(InlineGrid):
        connected, busy = frozenset({1, 2}), frozenset()

        def get_node_ids(self):
            return sorted(self.connected - self.busy)

    grid = Partly(properties_of(client={1: "same", 2: "same"}), 3)
    strategy = averaging()
    assert strategy._identify(grid) == [1, 2]
    # Node 2 still owes a reply when node 3 connects.
    grid.connected, grid.busy = frozenset({1, 2, 3}), frozenset({2})
    assert strategy._identify(grid) == [1]
    assert strategy._run.clients.name_of(2) == "same"
    grid.connected = frozenset({1, 3})
    assert [1, 3] in [strategy._identify(grid) for _ in range(4)]
