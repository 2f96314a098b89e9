"""Metrics of gossip: bits, losses and the consensus distance."""

import numpy as np
import pytest
from gossip_network import COMPRESSORS, GOSSIP, RING, D, N, Network
from gossip_numpy import PlainSQuARM, data_of

from flwr_frl.common.compression import CompressionSettings, from_settings
from flwr_frl.common.settings import build


@pytest.mark.parametrize("per_tensor", [False, True])
@pytest.mark.parametrize("compressor", [*COMPRESSORS, "qsgd"])
def test_bits_equal_the_lengths_of_the_messages(compressor, per_tensor):
    network = Network(
        "choco-sgd",
        compressor=compressor,
        compressor_k=0.05,
        compressor_levels=40,
        per_tensor=per_tensor,
        consensus_step=0.1,
    )
    settings = build(CompressionSettings, network.settings)
    operator = from_settings(settings, (640, 10))
    network.grid.down = lambda i, r: i == 3 and r == 2
    network.go(3)
    assert [row["sent"] for row in network.rows] == [5, 4, 5]
    for row in network.rows:
        assert row["bits"] == 8 * operator.num_bytes(D) * row["sent"]
    for row, r in zip(network.rows, (1, 2, 3), strict=True):
        carried = sum(
            len(data)
            for m in network.messages("train", r)
            for data in m.content["config"].get("relayed-data", [])
        )
        assert row["bytes-down"] >= carried
        assert 8 * row["bytes-up"] >= row["bits"]


@pytest.mark.parametrize("trigger", ["1e30", "inf"])
def test_round_without_messages_has_no_bits(trigger):
    network = Network("squarm-sgd", local_steps=2, trigger=trigger)
    network.go(3, evaluate=True)
    for row in network.rows:
        assert (row["sent"], row["bits"]) == (0, 0)
        assert row["clients"] == N
        assert row["rejected"] == 0
    # Nothing is relayed, so each node has trained alone.
    assert not any(
        "relayed-data" in m.content["config"] for m in network.messages("train", 3)
    )
    plain = PlainSQuARM(
        data_of(network),
        network.initial(),
        RING,
        rate=lambda t: 0.1,
        step=1.0,
        compress=lambda x: x,
        local_steps=2,
        trigger=lambda t: 1e30,
    )
    for _ in range(3):
        plain.round()
    np.testing.assert_allclose(network.models(), plain.x, rtol=0, atol=1e-6)


@pytest.mark.parametrize("seed", range(6))
@GOSSIP
def test_consensus_distance_is_estimated_within_its_error(algorithm, seed):
    """The tolerance of 45 % is five times the largest standard error, 9 %.

    A sketch's signs and places are fixed, so each seed is one draw. A correct estimate
    fails with a probability below 10^-4 (10^-6 if its error is Gaussian).
    """
    network = Network(
        algorithm, seed=seed, compressor="top-k", compressor_k=0.3, consensus_step=0.2
    )
    network.go(4)
    network.go(1, evaluate=True)
    models = network.models().astype(float)
    exact = np.square(models - models.mean(0)).sum(1).mean()
    assert exact > 1e-3
    assert network.rows[-1]["consensus-distance"] == pytest.approx(exact, rel=0.45)
    step = network.rows[-1].get("consensus-step")
    assert step == (None if algorithm == "dpsgd" else 0.2)
