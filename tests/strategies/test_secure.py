"""Secure aggregation: equal to plain runs, also if clients drop out."""

import numpy as np
import pytest
from secure_runs import SECURED, N, assert_same, lost, run

from flwr_frl.common.secure.fixed_point import Plan

# Algorithms that send changes, or more arrays than the model, are among these.
ALGORITHMS = ("fedrep", "fedavg", "scaffold", "l2gd", "feddyn", "gpfl")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_64_bits_equal_a_plain_run(tmp_path, algorithm):
    plain = run(tmp_path / "plain", algorithm)
    assert_same(run(tmp_path, algorithm, **SECURED), plain)


@pytest.mark.parametrize("bits", [16, 32])
def test_a_round_is_off_by_half_a_quantum(tmp_path, bits):
    plain = run(tmp_path / "plain", num_server_rounds=1)
    secure = run(
        tmp_path, num_server_rounds=1, secure_aggregation=True, secure_bits=bits
    )
    most = Plan(4, bits, 8.0, N).quantum / 2
    for name, array in plain.arrays.items():
        # Both are rounded to float32.
        assert np.abs(secure.arrays[name] - array).max() <= most + 2.0**-24
    assert secure.rows[0]["bytes-down"] > plain.rows[0]["bytes-down"]


def test_clients_that_train_together_send_the_same(tmp_path):
    # As rows of matrices, by default
    plain = run(tmp_path / "plain", cohort="auto")
    assert_same(run(tmp_path, cohort="auto", **SECURED), plain)


def test_batch_norms_are_averaged(tmp_path):
    few = {"model": "resnet20", "num_server_rounds": 1, "evaluate_every": 0}
    few |= {"evaluate_last": 0, "batch_size": 150}
    plain = run(tmp_path / "plain", "fedavg", **few)
    assert any(array.dtype.kind == "i" for array in plain.arrays.values())
    assert_same(run(tmp_path, "fedavg", **few, **SECURED), plain)


# Drop-outs


@pytest.mark.parametrize("step", ["keys", "shares", "masked"])
def test_a_client_that_drops_out_is_not_in_the_mean(tmp_path, step):
    plain = run(tmp_path / "plain", change=lost((1, "train", 3)))
    assert_same(run(tmp_path, change=lost((1, step, 3)), **SECURED), plain)
    assert plain.rows[0]["clients"] == N - 1


def test_a_client_that_drops_out_in_the_last_step_is_in_the_mean(tmp_path):
    plain = run(tmp_path / "plain")
    assert_same(run(tmp_path, change=lost((1, "unmask", 3)), **SECURED), plain)


@pytest.mark.parametrize("step", ["keys", "shares", "masked", "unmask"])
def test_a_round_below_the_threshold_is_as_a_lost_one(tmp_path, step):
    everybody = [(1, "train", node) for node in range(1, N + 1)]
    plain = run(tmp_path / "plain", change=lost(*everybody))
    secure = run(tmp_path, change=lost((1, step, 1), (1, step, 4)), **SECURED)
    # Heads continue as after the lost round.
    assert_same(secure, plain)
    assert secure.rows[0]["clients"] == 0
    assert secure.rows[0]["rejected"] == N


def test_neighbours_on_a_ring(tmp_path):
    few = {"num_clients": 10, "num_server_rounds": 2}
    plain = run(tmp_path / "plain", change=lost((1, "train", 3)), **few)
    ring = {**few, **SECURED, "secure_neighbours": 4}
    assert_same(run(tmp_path, change=lost((1, "masked", 3)), **ring), plain)
