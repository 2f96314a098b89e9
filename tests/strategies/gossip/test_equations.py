"""Gossip algorithms equal their equations in NumPy, also with absent nodes."""

import numpy as np
import pytest
from gossip_network import GOSSIP, RING, D, N, Network, away
from gossip_numpy import SQUARM, data_of, gradient, plain_dpsgd, plain_squarm


def test_dpsgd_equals_plain_numpy_step_by_step():
    network = Network("dpsgd")
    plain = plain_dpsgd(network, RING)
    for _ in range(10):
        models = network.go().models()
        np.testing.assert_allclose(models, next(plain), rtol=0, atol=1e-6)
    # The models have changed, and differ from each other.
    assert np.abs(models - network.initial()).max() > 0.05
    assert np.abs(models - models.mean(0)).max() > 0.01


def test_choco_with_identity_and_gamma_1_equals_dpsgd_step_by_step():
    choco, dpsgd = Network("choco-sgd"), Network("dpsgd")
    plain = plain_dpsgd(dpsgd, RING)
    for _ in range(10):
        models = choco.go().models()
        np.testing.assert_allclose(models, dpsgd.go().models(), rtol=0, atol=1e-6)
        np.testing.assert_allclose(models, next(plain), rtol=0, atol=1e-6)
    assert choco.rows[-1]["bits"] == dpsgd.rows[-1]["bits"] == 32 * D * N


@pytest.mark.parametrize("compressor", ["sign-top-k", "qsgd-top-k", "rand-k", "qsgd"])
def test_squarm_without_momentum_local_steps_and_trigger_equals_choco(compressor):
    # Small random batches are the same, too: both draw them with the same seeds.
    more = {
        "compressor": compressor,
        "compressor_k": 0.1,
        "batch_size": 8,
        "consensus_step": 0.2,
        "per_tensor": True,
    }
    squarm = Network("squarm-sgd", local_steps=1, trigger="0", **more)
    # CHOCO-SGD ignores local_steps and trigger.
    choco = Network("choco-sgd", local_steps=3, trigger="7", **more)
    squarm.go(6, evaluate=True)
    choco.go(6, evaluate=True)
    np.testing.assert_array_equal(squarm.models(), choco.models())
    for row, other in zip(squarm.rows, choco.rows, strict=True):
        assert row == other


def test_squarm_equals_algorithm_1_with_all_estimates():
    network = Network("squarm-sgd", **SQUARM)
    plain = plain_squarm(network)
    for _ in range(14):
        plain.round()
        nodes = network.go().nodes()
        for i, node in enumerate(nodes):
            np.testing.assert_allclose(node.x, plain.x[i], rtol=0, atol=1e-5)
            estimate, others = plain.public[i][i], plain.public[i]
            np.testing.assert_allclose(
                node.saved["estimate"], estimate, rtol=0, atol=1e-5
            )
            summed = sum(RING[i, j] * others[j] for j in others if j != i)
            np.testing.assert_allclose(
                node.saved["neighbours"], summed, rtol=0, atol=1e-5
            )
            np.testing.assert_allclose(
                node.saved["momentum"], plain.v[i], rtol=0, atol=1e-5
            )
    assert [row["sent"] for row in network.rows] == plain.sent
    # In some rounds no node sends, in some all do, and in others a part of them.
    assert {0, N} < set(plain.sent)


@GOSSIP
def test_exchanges_preserve_the_mean_as_in_equation_3_9(algorithm):
    """An exchange does not change the mean, whichever nodes are absent."""
    network = Network(algorithm, **SQUARM)
    network.grid.down = away
    former = np.tile(network.initial(), (N, 1))
    for server_round in range(1, 11):
        nodes = network.go().nodes()
        # x^{t+1/2}; absent nodes do not train.
        half = [
            former[i] if away(i, server_round) else node.half
            for i, node in enumerate(nodes)
        ]
        former = np.stack([node.x for node in nodes])
        np.testing.assert_allclose(former.mean(0), np.mean(half, 0), rtol=0, atol=1e-6)
    assert [row["unanswered"] for row in network.rows] == [0, 0, 1, 1, 2, 0, 0, 2, 0, 0]
    # The exchanges did change the models.
    assert np.abs(former - half).max() > 1e-3


def test_squarm_with_absent_nodes_equals_plain_numpy():
    network = Network("squarm-sgd", **SQUARM)
    network.grid.down = away
    plain = plain_squarm(network)
    for server_round in range(1, 13):
        plain.round(lambda i, r=server_round: not away(i, r))
        models = network.go().models()
        np.testing.assert_allclose(models, plain.x, rtol=0, atol=1e-5)
    assert [row["sent"] for row in network.rows] == plain.sent


def test_dpsgd_uses_only_the_edges_between_present_nodes():
    network = Network("dpsgd")
    network.grid.down = away
    data, x = data_of(network), np.tile(network.initial(), (N, 1))
    for server_round in range(1, 11):
        present = [i for i in range(N) if not away(i, server_round)]
        half = x.copy()
        for i in present:
            half[i] -= 0.1 * gradient(x[i], *data[i])
        x = half.copy()
        for i in present:
            x[i] += sum(RING[i, j] * (half[j] - half[i]) for j in present)
        np.testing.assert_allclose(network.go().models(), x, rtol=0, atol=1e-6)


def test_theoretical_consensus_step():
    network = Network(
        "choco-sgd", consensus_step="theory", compressor="top-k", compressor_k=0.1
    )
    network.go(1)
    # Theorem 2 on a ring of five: eigenvalues (1 + 2 cos(2 pi k / 5)) / 3.
    eigenvalues = [(1 + 2 * np.cos(2 * np.pi * k / 5)) / 3 for k in range(5)]
    delta = 1 - max(abs(e) for e in eigenvalues[1:])
    beta, omega = 1 - min(eigenvalues), 0.1
    gamma = (2 * delta * omega) / (
        64 * delta + delta**2 + 16 * beta**2 + 8 * delta * beta**2 - 16 * delta * omega
    )
    for message in network.messages("train", 1):
        assert message.content["config"]["consensus-step"] == pytest.approx(gamma)


@pytest.mark.parametrize(
    ("compressor", "share"),
    [
        # Fraction of the energy of Gaussian entries: signs with the mean magnitude have
        # 2/π, and the largest tenth has 0.1 + 2 z φ(z), z = 1.645.
        ({"compressor": "sign"}, 0.637),
        ({"compressor": "top-k", "compressor_k": 0.1}, 0.439),
        ({"compressor": "rand-k", "compressor_k": 0.1}, 0.1),
        ({"compressor": "identity"}, 1.0),
    ],
)
def test_automatic_consensus_step(compressor, share):
    network = Network("choco-sgd", consensus_step="auto", **compressor)
    network.go(1)
    expected = share / (2 - share)
    assert network.strategy.step == pytest.approx(expected, rel=0.1)


# Assumptions of the theorems


@pytest.mark.parametrize(
    ("algorithm", "steps"), [("dpsgd", 1), ("choco-sgd", 1), ("squarm-sgd", 4)]
)
def test_theory_schedule_is_the_learning_rate_of_the_theorems(algorithm, steps):
    more = {"momentum": 0.75, "num_server_rounds": 45, "local_steps": steps}
    schedule = {"learning_rate_schedule": "theory", "learning_rate": 7.0}
    network = Network(algorithm, **more, **schedule)
    # (1 - 0.75) sqrt(5 / 45), and half of that for four times the iterations
    rate = 0.25 / 3 / np.sqrt(steps)
    fixed = Network(algorithm, **more, learning_rate=float(rate))
    np.testing.assert_allclose(
        network.go(3).models(), fixed.go(3).models(), rtol=0, atol=1e-7
    )
