"""Nodes that run together, as rows of matrices, equal nodes that run one by one."""

import numpy as np
import pytest
from flwr.app import ArrayRecord
from gossip_network import GOSSIP, Network, away

from flwr_frl.clients.device.state import PREFIX
from flwr_frl.clients.gossip import together
from flwr_frl.clients.gossip.together import NodeRecord
from flwr_frl.task.tasks.image import ImageTask

SMALL = {
    "batch_size": 8,
    "momentum": 0.9,
    "weight_decay": 0.01,
    "local_steps": 3,
    "compressor": "sign-top-k",
    "compressor_k": 0.2,
    "consensus_step": 0.3,
    "learning_rate": 0.05,
}
COUNTED = ("sent", "bits", "refused", "clients", "bytes-down", "bytes-up", "lost")


def records(network: Network) -> list[ArrayRecord]:
    """Return the newest version of each node's state."""
    states = [context.state for context in network.grid.contexts.values()]
    newest = [max(int(name.removeprefix(PREFIX)) for name in state) for state in states]
    return [
        state[f"{PREFIX}{server_round}"]
        for state, server_round in zip(states, newest, strict=True)
    ]


def assert_equal(one: Network, other: Network, rtol: float) -> None:
    """Compare the nodes' vectors, and the counts and losses of each round."""
    for a, b in zip(one.nodes(), other.nodes(), strict=True):
        scale = np.abs(b.x).max()
        np.testing.assert_allclose(a.x, b.x, rtol=0, atol=rtol * scale)
        for name, vector in b.saved.items():
            scale = np.abs(vector).max()
            np.testing.assert_allclose(a.saved[name], vector, rtol=0, atol=rtol * scale)
    for row, expected in zip(one.rows, other.rows, strict=True):
        assert {n: row[n] for n in COUNTED} == {n: expected[n] for n in COUNTED}
        assert row["train-loss"] == pytest.approx(expected["train-loss"], rel=1e-5)


def both(algorithm: str, **more) -> tuple[Network, Network]:
    grouped = Network(algorithm, **{**SMALL, "cohort": "auto", **more})
    return grouped, Network(algorithm, **{**SMALL, "cohort": "off", **more})


@GOSSIP
@pytest.mark.parametrize("compressor", ["sign-top-k", "qsgd"])
def test_nodes_together_equal_nodes_one_by_one(algorithm, compressor):
    grouped, alone = both(algorithm, compressor=compressor)
    grouped.go(8)
    alone.go(8)
    assert all(isinstance(record, NodeRecord) for record in records(grouped))
    assert not any(isinstance(record, NodeRecord) for record in records(alone))
    assert_equal(grouped, alone, 1e-5)


@GOSSIP
def test_nodes_replay_missed_rounds_alone_and_then_rejoin_the_others(algorithm):
    grouped, alone = both(algorithm)
    for network in (grouped, alone):
        network.grid.down = away
        network.go(10)
    assert_equal(grouped, alone, 1e-5)
    assert all(isinstance(record, NodeRecord) for record in records(grouped))


@GOSSIP
def test_nodes_with_fewer_examples_than_a_batch_train_together(algorithm):
    more = {"partition": "dirichlet", "dirichlet_alpha": 0.2, "batch_size": 300}
    grouped, alone = both(algorithm, **more)
    sizes = [len(grouped.task.train_examples(i)) for i in range(grouped.n)]
    assert min(sizes) < 300 < max(sizes)
    grouped.go(4)
    alone.go(4)
    assert_equal(grouped, alone, 1e-5)


def test_diverged_node_keeps_its_state_and_the_others_continue(monkeypatch):
    gradients = together.Nodes.gradients

    def spoilt(self, groups):
        for g, losses in gradients(self, groups):
            if self.round == 2:
                g[1] = float("nan")
            yield g, losses

    monkeypatch.setattr(together.Nodes, "gradients", spoilt)
    grouped, alone = both("choco-sgd")
    grouped.go(4)
    alone.go(4)
    # All nodes have repeated the round one by one, where the gradient is finite.
    assert_equal(grouped, alone, 1e-5)


def test_nodes_run_alone_if_they_cannot_run_together(monkeypatch, caplog):
    def failing(self, groups):
        raise RuntimeError("cannot batch this")

    monkeypatch.setattr(together.Nodes, "gradients", failing)
    grouped, alone = both("dpsgd")
    grouped.go(2)
    alone.go(2)
    assert_equal(grouped, alone, 1e-5)
    assert caplog.text.count("cannot batch this") == 1


def test_a_node_without_readable_examples_does_not_end_the_round(monkeypatch):
    read = ImageTask.train_examples

    def failing(self, client):
        if client == 1:
            raise OSError("no disk")
        return read(self, client)

    network = Network("dpsgd", **SMALL, cohort="auto")
    monkeypatch.setattr(ImageTask, "train_examples", failing)
    network.go()
    assert (network.rows[0]["clients"], network.rows[0]["rejected"]) == (4, 1)
