"""Malformed and hostile messages do not affect other nodes."""

from collections.abc import Callable
from logging import WARNING

import numpy as np
import pytest
from flwr.app import Message
from gossip_network import ALGORITHMS, FULL_BATCH, RING, D, Lines, N, Network, name_of

from flwr_frl.clients.client_app import make_app
from flwr_frl.clients.gossip.base import Node
from flwr_frl.common.errors import SettingsError
from flwr_frl.common.settings import resolve
from flwr_frl.strategies import ChocoSGD
from flwr_frl.strategies.grids.simulation import InlineGrid


def changed(edit: Callable) -> Callable:
    """Edit node 1's replies of rounds 3 and 4."""

    def change(i: int, server_round: int, reply: Message) -> Message:
        if i == 1 and server_round in (3, 4):
            edit(reply.content)
        return reply

    return change


def replaced(data: object) -> Callable:
    def edit(content) -> None:
        record = content["bytes"]
        record["message"] = data(record["message"]) if callable(data) else data

    return changed(edit)


def without(record: str, name: str = "") -> Callable:
    return changed(lambda c: c[record].pop(name) if name else c.pop(record))


def refused_metric(value: float) -> Callable:
    return changed(lambda content: content["metrics"].update(refused=value))


@pytest.mark.parametrize(
    "change",
    [
        replaced(lambda d: d + b"\0"),
        replaced(lambda d: d * 1000),
        replaced("text"),
        without("bytes"),
        without("metrics"),
        without("arrays"),
        refused_metric(float("nan")),
    ],
)
def test_invalid_replies_are_rejected(change):
    network = Network("choco-sgd", compressor="sign", consensus_step=0.3)
    network.grid.change = change
    for server_round in range(1, 7):
        network.go(evaluate=server_round in (3, 6))
        rejections = network.strategy._run.round.rejections
        if server_round in (3, 4):
            assert [name for name, _ in rejections] == [name_of(1)]
        else:
            assert rejections == []
    assert [row["rejected"] for row in network.rows] == [0, 0, 1, 1, 0, 0]
    assert [row["sent"] for row in network.rows] == [5, 5, 4, 4, 5, 5]
    assert [row["refused"] for row in network.rows] == [0] * 6
    assert np.isfinite(network.models()).all()
    # Nothing of it was relayed: nodes' sums equal their neighbours' own estimates.
    nodes = network.nodes()
    for i, node in enumerate(nodes):
        expected = sum(
            RING[i, j] * nodes[j].saved["estimate"] for j in range(N) if j != i
        )
        np.testing.assert_allclose(
            node.saved["neighbours"], expected, rtol=0, atol=1e-6
        )


NAN, MINUS, INF = (np.float32(v).tobytes() for v in (np.nan, -1.0, np.inf))
BAD = {
    "identity": [NAN + bytes(4 * D - 4), bytes(4 * D - 4) + INF],
    "sign": [lambda d: NAN + d[4:], lambda d: INF + d[4:], lambda d: MINUS + d[4:]],
    "sign-top-k": [
        # Indices that do not increase, and a norm that is NaN
        lambda d: bytes(len(d)),
        lambda d: b"\xff" * len(d),
    ],
    "top-k": [lambda d: bytes(len(d)), lambda d: d[:-4] + NAN],
    "rand-k": [lambda d: d[:-4] + INF],
    "qsgd-top-k": [lambda d: bytes(len(d)), lambda d: b"\xff" * len(d)],
}


@pytest.mark.parametrize(
    ("algorithm", "compressor", "data"),
    [
        (algorithm, compressor, data)
        for compressor, all_data in BAD.items()
        for data in all_data
        for algorithm in ALGORITHMS
        # D-PSGD does not compress its messages.
        if algorithm != "dpsgd" or compressor == "identity"
    ],
)
def test_invalid_messages_of_the_right_length_are_refused_by_neighbours(
    algorithm, compressor, data, caplog
):
    network = Network(
        algorithm, compressor=compressor, compressor_k=0.1, consensus_step=0.2
    )
    network.grid.change = replaced(data)
    with caplog.at_level(WARNING, "flwr"):
        network.go(3)
        # These evaluations deliver the messages, too.
        network.go(3, evaluate=True)
    # Nodes 0 and 2 refuse the messages of rounds 3 and 4, and report it a round later.
    assert [row["refused"] for row in network.rows] == [0, 0, 0, 2, 2, 0]
    assert [row["rejected"] for row in network.rows] == [0] * 6
    assert f"message of neighbour {name_of(1)} refused" in caplog.text
    assert np.isfinite(network.models()).all()
    assert network.rows[-1]["evaluated"] == N
    losses = [row["train-loss"] for row in network.rows]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("magnitude", [9e5, 1.1e6, 1e30, 3e38])
def test_huge_finite_numbers_do_not_stop_the_neighbours(magnitude):
    """Entries above 1e6 are refused, and smaller ones cannot overflow."""
    network = Network("choco-sgd", compressor="sign", consensus_step=0.2)
    signs = b"\xff" * (D // 8) + bytes([0xFF << (-D % 8) & 0xFF])
    data = np.float32(magnitude).tobytes() + signs

    def change(i: int, server_round: int, reply: Message) -> Message:
        if i == 1 and server_round >= 3:
            reply.content["bytes"]["message"] = data
        return reply

    network.grid.change = change
    network.go(9, evaluate=True)
    assert [row["clients"] for row in network.rows] == [N] * 9
    assert [row["evaluated"] for row in network.rows] == [N] * 9
    refused = 2 if magnitude > 1e6 else 0
    assert [row["refused"] for row in network.rows] == [0] * 3 + [refused] * 6
    models = network.models()
    assert np.isfinite(models).all()
    if refused:
        assert np.abs(models).max() < 10


@pytest.mark.parametrize(
    "sketch",
    [b"", b"123", "text", np.full(256, np.nan, np.float32).tobytes(), bytes(8), None],
)
def test_invalid_sketches_are_ignored(sketch):
    class Sketchy(Lines):
        def send_and_receive(self, messages, *, timeout=None):
            replies = super().send_and_receive(messages, timeout=timeout)
            for reply in replies:
                node = reply.metadata.src_node_id
                if reply.metadata.message_type == "evaluate" and node == 2:
                    if sketch is None:
                        del reply.content["bytes"]
                    else:
                        reply.content["bytes"]["sketch"] = sketch
            return replies

    network = Network("dpsgd")
    network.go(3)
    network.grid.__class__ = Sketchy
    network.go(1, evaluate=True)
    models = network.models()[[0, 2, 3, 4]]
    exact = np.square(models - models.mean(0)).sum(1).mean()
    assert network.rows[-1]["consensus-distance"] == pytest.approx(exact, rel=0.45)
    assert network.rows[-1]["evaluated"] == N


def test_other_clients_are_rejected():
    settings = resolve({**FULL_BATCH, "algorithm": "fedavg"})
    with pytest.raises(SettingsError, match="no client reports message-bytes"):
        ChocoSGD().initialize(InlineGrid(make_app(settings), N))


@pytest.mark.parametrize(
    "lie",
    [
        {"message-bytes": [7]},
        {"message-bytes": 7},
        {"message-bytes": []},
        {"omega": 0.0},
        {"typical-omega": 2.0},
    ],
)
def test_message_format_is_decided_by_majority(lie, monkeypatch):
    honest = Node.get_properties

    def lies(self, config):
        return {**honest(self, config), **(lie if self._index == 0 else {})}

    monkeypatch.setattr(Node, "get_properties", lies)
    network = Network("choco-sgd", compressor="sign", consensus_step="auto")
    assert network.strategy._message_lengths != frozenset({7})
    assert network.strategy.step == pytest.approx(0.637 / (2 - 0.637), rel=0.1)
