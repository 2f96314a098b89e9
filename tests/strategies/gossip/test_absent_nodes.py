"""Nodes that miss rounds, return, are lost, join late or change their id."""

from logging import ERROR, WARNING

import numpy as np
import pytest
from flwr.app import Error, Message, RecordDict
from gossip_network import GOSSIP, Lines, N, Network, name_of, relayed
from gossip_numpy import SQUARM

from flwr_frl.clients.client_app import make_app


def both_neighbours_of_2(*rounds: int) -> list[tuple[int, str]]:
    return [(r, name_of(j)) for r in rounds for j in (1, 3)]


@pytest.mark.parametrize("how", ["down", "gone", "lost", "error"])
def test_missed_messages_are_queued_delivered_once_and_cleared(how):
    """Down: no reply. Gone: not connected. Lost: the reply is lost."""
    network = Network("choco-sgd", compressor="sign", consensus_step=0.3)
    missed = (3, 4, 5)
    if how == "down":
        network.grid.down = lambda i, r: i == 2 and r in missed
    if how == "lost":
        network.grid.change = lambda i, r, reply: (
            None if i == 2 and r in missed else reply
        )
    if how == "error":
        network.grid.change = lambda i, r, reply: (
            Message(Error(2, "no"), reply_to=network.messages("train", r, 2)[0])
            if i == 2 and r in missed
            else reply
        )
    network.go(2, evaluate=True)
    context = network.grid.contexts[3]
    if how == "gone":
        del network.grid.contexts[3]
    network.go(3, evaluate=True)
    network.grid.contexts[3] = context
    rounds = [r for r, _, _ in network.strategy.relayed(2)]
    assert rounds == [2, 2, 3, 3, 4, 4, 5, 5]
    network.go(3, evaluate=True)
    if how != "gone":
        for r in (4, 5):
            (message,) = network.messages("train", r, 2)
            assert relayed(message) == both_neighbours_of_2(*range(2, r))
    for kind, r, rounds in (
        ("train", 3, (2,)),
        ("train", 6, (2, 3, 4, 5)),
        ("evaluate", 6, (6,)),
        ("train", 7, (6,)),
        ("evaluate", 7, (7,)),
        ("train", 8, (7,)),
    ):
        for message in network.messages(kind, r, 2):
            assert relayed(message) == both_neighbours_of_2(*rounds)
    rejected = [row["rejected"] for row in network.rows]
    unanswered = [row["unanswered"] for row in network.rows]
    expected = [0, 0, 1, 1, 1, 0, 0, 0]
    assert rejected == (expected if how == "error" else [0] * 8)
    assert unanswered == (expected if how in ("down", "lost") else [0] * 8)


@GOSSIP
@pytest.mark.parametrize("how", ["lost", "too long"])
def test_rejected_reply_equals_an_absence(algorithm, how):
    """The node trains, but is rolled back, as if it had been offline."""

    def lost(i: int, server_round: int, reply: Message) -> Message | None:
        if i != 2 or server_round not in (3, 4):
            return reply
        if how == "lost":
            return None
        reply.content.config_records["bytes"]["message"] += b"\0"
        return reply

    absent, rejected = (Network(algorithm, **SQUARM) for _ in range(2))

    absent.grid.down = lambda i, r: i == 2 and r in (3, 4)
    rejected.grid.change = lost
    for network in (absent, rejected):
        network.go(7, evaluate=True)
    if how == "too long":
        assert [row["rejected"] for row in rejected.rows] == [0, 0, 1, 1, 0, 0, 0]
    for node, other in zip(absent.nodes(), rejected.nodes(), strict=True):
        np.testing.assert_array_equal(node.x, other.x)
        for name, vector in node.saved.items():
            np.testing.assert_array_equal(vector, other.saved[name])


@GOSSIP
def test_node_that_is_offline_for_too_long_is_lost(algorithm, caplog):
    network = Network(
        algorithm, compressor="sign", consensus_step=0.3, max_missed_rounds=2
    )
    network.grid.down = lambda i, r: i == 2 and r >= 3
    with caplog.at_level(WARNING, "flwr"):
        network.go(9, evaluate=True)
    # Its last reply is that of round 2. It may miss two rounds and still return in
    # round 5.
    assert [row["lost"] for row in network.rows] == [0] * 5 + [1] * 4
    assert [row["unanswered"] for row in network.rows] == [0, 0, 1, 1, 1, 0, 0, 0, 0]
    assert [row["clients"] for row in network.rows] == [5, 5] + [4] * 7
    warnings = [r for r in caplog.records if "is lost" in r.getMessage()]
    assert len(warnings) == 1
    assert name_of(2) in warnings[0].getMessage()
    # It is not sent any messages.
    for r in range(6, 10):
        assert len(network.messages("train", r)) == 4
        assert len(network.messages("evaluate", r)) == 4
    # It returns too late, and the others continue without it.
    network.grid.down = lambda i, r: False
    network.go(2, evaluate=True)
    assert network.messages("train", 11, 2) == []
    assert network.rows[-1]["clients"] == 4
    assert np.isfinite([row["train-loss"] for row in network.rows]).all()


@GOSSIP
def test_node_without_its_state_is_rejected_and_then_lost(algorithm):
    # Its estimate is no longer the one that its neighbours have. This cannot be
    # repaired, so the run must report it.
    network = Network(algorithm, consensus_step=0.5)
    network.go(3)
    network.grid.contexts[3].state = RecordDict()
    network.go(6)
    assert [row["rejected"] for row in network.rows] == [0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert [row["lost"] for row in network.rows] == [0] * 4 + [1] * 5


def test_latecomers_are_not_part_of_the_graph(caplog):
    network = Network("choco-sgd", clients=4, consensus_step=0.5)
    assert network.strategy.names == [name_of(i) for i in range(4)]
    network.go(2)
    late = Lines(make_app(network.settings), N).contexts[N]
    network.grid.contexts[N] = late
    with caplog.at_level(WARNING, "flwr"):
        network.go(3, evaluate=True)
    assert [row["clients"] for row in network.rows] == [4] * 5
    assert network.rows[-1]["evaluated"] == 4
    logged = [r for r in caplog.records if "no place in the graph" in r.getMessage()]
    # By the server, once, and by the client
    assert [record.levelno for record in logged] == [WARNING, ERROR]
    asked = {
        m.metadata.message_type
        for m in network.grid.sent
        if m.metadata.dst_node_id == N
    }
    assert asked == {"query"}


@pytest.mark.parametrize("pause", [0, 2])
def test_node_with_a_new_id_keeps_its_place_in_the_graph(pause):
    usual, moved = (Network("squarm-sgd", **SQUARM) for _ in range(2))
    usual.grid.down = lambda i, r: i == 2 and 3 < r <= 3 + pause
    usual.go(6 + pause, evaluate=True)
    moved.go(3, evaluate=True)
    context = moved.grid.contexts.pop(3)
    moved.go(pause, evaluate=True)
    context.node_id = 77
    moved.grid.contexts[77] = context
    moved.go(3, evaluate=True)
    for row, other in zip(usual.rows, moved.rows, strict=True):
        for name in ("train-loss", "accuracy", "sent", "clients", "consensus-distance"):
            assert row[name] == other[name]
    assert moved.strategy.names == [name_of(i) for i in range(N)]
