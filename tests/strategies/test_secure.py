"""Secure aggregation: equal to plain runs, also after kills; hostile clients."""

from pathlib import Path

import numpy as np
import pytest
from command_line import Killed, json_of
from flwr.app import ConfigRecord, RecordDict
from secure_runs import SECURED, Found, N, assert_same, lost, run

from flwr_frl.common.arrays import memory_record
from flwr_frl.common.errors import SettingsError
from flwr_frl.common.messages import ACKNOWLEDGED_ROUND
from flwr_frl.common.secure.fixed_point import Plan
from flwr_frl.common.secure.messages import SECURE, WORDS, digest
from flwr_frl.common.secure.protocol import BOX
from flwr_frl.strategies import Strategy
from flwr_frl.strategies.server import secure

# Algorithms that send changes, or more arrays than the model, are among these.
ALGORITHMS = (
    *("fedrep", "fedavg", "scaffold", "l2gd", "feddyn", "gpfl", "q-fedavg", "mimelite"),
)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_64_bits_equal_a_plain_run(tmp_path, algorithm):
    plain = run(tmp_path / "plain", algorithm)
    # h_k of q-FedAvg exceeds the default range.
    largest = 256.0 if algorithm == "q-fedavg" else 8.0
    assert_same(run(tmp_path, algorithm, **SECURED, secure_range=largest), plain)


@pytest.mark.parametrize("bits", [16, 32])
def test_a_round_is_off_by_half_a_quantum(tmp_path, bits):
    plain = run(tmp_path / "plain", num_server_rounds=1)
    found = run(
        tmp_path, num_server_rounds=1, secure_aggregation=True, secure_bits=bits
    )
    most = Plan(4, bits, 8.0, N).quantum / 2
    # Both are rounded to float32.
    assert np.abs(found.vector - plain.vector).max() <= most + 2.0**-24
    assert found.rows[0]["bytes-down"] > plain.rows[0]["bytes-down"]


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
    found = run(tmp_path, change=lost((1, step, 1), (1, step, 4)), **SECURED)
    # Heads continue as after the lost round.
    assert_same(found, plain)
    assert found.rows[0]["clients"] == 0
    assert found.rows[0]["rejected"] == N


def test_neighbours_on_a_ring(tmp_path):
    few = {"num_clients": 10, "num_server_rounds": 2}
    plain = run(tmp_path / "plain", change=lost((1, "train", 3)), **few)
    ring = {**few, **SECURED, "secure_neighbours": 4}
    assert_same(run(tmp_path, change=lost((1, "masked", 3)), **ring), plain)


# Kills and repeated rounds

SAVED = {"checkpoint_every": 1, "num_server_rounds": 3, **SECURED}


def killed(place: Path, patched: pytest.MonkeyPatch, change=None) -> None:
    """Kill a run in round 2 after the mean was computed, before it is used."""
    aggregate = Strategy.aggregate_train

    def die(strategy, server_round, replies):
        if server_round == 2:
            raise Killed
        return aggregate(strategy, server_round, replies)

    with patched.context() as patch:
        patch.setattr(Strategy, "aggregate_train", die)
        with pytest.raises(Killed):
            run(place, change=change, **SAVED)


def resumed(place: Path, change=None) -> Found:
    return run(place, change=change, resume=str(place), **SAVED)


def test_a_run_that_is_killed_while_clients_train_can_be_resumed(tmp_path):
    def die(round, step, node, reply):
        if (round, step, node) == (2, "masked", 3):
            raise Killed
        return reply()

    undisturbed = run(tmp_path / "undisturbed", **SAVED)
    with pytest.raises(Killed):
        run(tmp_path, change=die, **SAVED)
    assert_same(resumed(tmp_path), undisturbed)


def test_a_mean_that_was_computed_is_used_after_a_kill(tmp_path, monkeypatch):
    out = lost((2, "masked", 3))
    undisturbed = run(tmp_path / "undisturbed", change=out, **SAVED)
    killed(tmp_path, monkeypatch, out)
    # Client 3 would take part now.
    assert_same(resumed(tmp_path), undisturbed)


def test_no_round_is_unmasked_with_other_clients(tmp_path, monkeypatch):
    killed(tmp_path, monkeypatch)
    (tmp_path / "fedrep" / secure.FILE).unlink()
    found = resumed(tmp_path, lost((2, "masked", 3)))
    assert found.values("clients") == [N, 0, N]


def test_a_second_run_is_warned_of(tmp_path, caplog):
    for number in range(2):
        run(tmp_path, **SECURED)
        warned = "difference of two means" in caplog.text
        assert warned == (number == 1)


def test_masks_depend_on_all_that_clients_receive_alike():
    def digest_of(value: float, **config) -> str:
        arrays = memory_record({"w": np.array([value])})
        return digest(RecordDict({"arrays": arrays, "config": ConfigRecord(config)}))

    usual = digest_of(1.0, lr=0.1, run="a")
    assert usual == digest_of(1.0, run="a", lr=0.1, **{ACKNOWLEDGED_ROUND: 3})
    others = digest_of(2.0, lr=0.1, run="a"), digest_of(1.0, lr=0.2, run="a")
    assert usual not in others


def test_a_change_beyond_the_range_is_reported_with_its_layer(tmp_path):
    line = r"secure-range is 1e-06; .* the largest change of 'representation\."
    with pytest.raises(SettingsError, match=line):
        run(tmp_path, num_server_rounds=1, secure_range=1e-6, secure_aggregation=True)


# First replies, weights and noise


def test_srpfl_masks_the_words_of_the_first_replies(tmp_path):
    stages = {"initial_nodes": 3, "rounds_per_stage": "1", "speed_model": "fixed"}
    plain = run(tmp_path / "plain", "srpfl", **stages)
    assert plain.values("clients") == [3, N]
    assert_same(run(tmp_path, "srpfl", **stages, **SECURED), plain)


def test_means_are_weighted_by_examples(tmp_path):
    uneven = {"partition": "dirichlet", "weighting": "examples"}
    plain = run(tmp_path / "plain", "fedavg", **uneven)
    found = run(tmp_path, "fedavg", **uneven, **SECURED)
    assert np.allclose(found.vector, plain.vector, rtol=0, atol=1e-6)
    equal = run(tmp_path / "equal", "fedavg", partition="dirichlet")
    assert np.abs(equal.vector - plain.vector).max() > 1e-4


def test_clients_add_the_noise_that_is_accounted(tmp_path):
    private = {"server_dp_noise": 1.0, "server_dp_clip": 0.5, "server_dp_delta": 1e-3}
    few = {"num_server_rounds": 1, "evaluate_every": 0, "evaluate_last": 0}
    plain = run(tmp_path / "plain", "fedavg", **private, **few)
    found = run(tmp_path, "fedavg", **private, **few, secure_aggregation=True)
    assert found.values("epsilon") == plain.values("epsilon")
    account = json_of(tmp_path / "fedavg" / "privacy.json")
    assert account["mechanism"] == "skellam"
    # All 5 clients add the noise of which 4 would be enough: z C √(5/4) / 5.
    deviation = np.sqrt(0.5**2 * 5 / 4 + 0.5**2) / 5
    noise = np.std(found.vector - plain.vector)
    assert noise == pytest.approx(deviation, rel=0.1)


# One hostile client


@pytest.mark.parametrize("step", ["keys", "shares", "masked", "unmask"])
@pytest.mark.parametrize(
    "values",
    [
        {"1".zfill(20): "text"},
        {"one": b""},
        {"session": b"another"},
        {"step": "none"},
        {"9" * 20: b"x" * 64},
        {"9" * 5000: b""},
    ],
)
def test_a_hostile_client_costs_no_round(tmp_path, step, values):
    def lie(round, now, node, reply):
        message = reply()
        if now == step and node == 3:
            message.content[SECURE].update(values)
        return message

    found = run(tmp_path, "fedavg", lie, num_server_rounds=1, **SECURED)
    assert found.rows[0]["clients"] >= N - 1


@pytest.mark.parametrize(
    "words",
    [np.zeros(3, np.uint64), np.zeros(3, np.float32), np.zeros(0, np.uint32), None],
)
def test_words_of_another_kind_are_rejected(tmp_path, words):
    def lie(round, step, node, reply):
        message = reply()
        if (step, node) == ("masked", 3):
            del message.content[WORDS]
            if words is not None:
                message.content[WORDS] = memory_record({"words": words})
        return message

    found = run(tmp_path, "fedavg", lie, num_server_rounds=1, **SECURED)
    assert (found.rows[0]["clients"], found.rows[0]["rejected"]) == (N - 1, 1)


def test_a_sender_of_wrong_shares_is_left_out_after_one_round(tmp_path):
    def garble(round, step, node, reply):
        message = reply()
        if (step, node) == ("shares", 3):
            record = message.content[SECURE]
            names = [name for name in record if name.isdecimal()]
            record.update({name: bytes(BOX) + record[name][BOX:] for name in names})
        return message

    found = run(tmp_path, "fedavg", garble, num_server_rounds=3, **SECURED)
    assert found.values("clients") == [0, N - 1, N - 1]
