"""Gossip checkpoints include the queued messages."""

import json

import numpy as np
import pytest
from command_line import Killed, die_in
from gossip_network import GOSSIP, RING, N, Network, name_of, round_of

from flwr_frl import cli, running
from flwr_frl.results.results import read_rows
from flwr_frl.strategies import build_strategy
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.checkpoint import State


class Leaky(InlineGrid):
    """A grid on which node 2 is offline in rounds 4 to 6."""

    def send_and_receive(self, messages, *, timeout=None):
        there = [
            m
            for m in messages
            if m.metadata.dst_node_id != 3 or round_of(m) not in (4, 5, 6)
        ]
        return super().send_and_receive(there, timeout=timeout)


def rows_after(output, algorithm: str, rounds: int, resume: bool = False) -> list[dict]:
    config = (
        "model='logistic' consensus-step=0.3 compressor-k=0.2 trigger='300' "
        "batch-size=20 momentum=0.9 learning-rate=0.05 evaluate-every=1 "
        "local-steps=2 checkpoint-every=5"
    )
    if resume:
        config += f" resume='{output}'"
    arguments = [algorithm, "--backend", "inline", "--clients", str(N)]
    arguments += ["--rounds", str(rounds), "--output", str(output)]
    assert cli.main([*arguments, "--run-config", config]) == 0
    return read_rows(output / algorithm / "metrics.jsonl")


@GOSSIP
def test_run_with_queued_messages_resumes_after_a_stop_or_a_crash(
    algorithm, tmp_path, monkeypatch
):
    monkeypatch.setattr(running, "InlineGrid", Leaky)
    uninterrupted = rows_after(tmp_path / "a", algorithm, 9)
    assert [row["unanswered"] for row in uninterrupted] == [0, 0, 0, 1, 1, 1, 0, 0, 0]
    rows_after(tmp_path / "b", algorithm, 5)
    stopped = rows_after(tmp_path / "b", algorithm, 9, resume=True)
    # After a crash in round 8, the run resumes from round 5.
    with monkeypatch.context() as patched:
        die_in(patched, 8)
        with pytest.raises(Killed):
            rows_after(tmp_path / "c", algorithm, 9)
    crashed = rows_after(tmp_path / "c", algorithm, 9, resume=True)
    for rows in (stopped, crashed):
        assert [row["round"] for row in rows] == list(range(1, 10))
        for row, other in zip(rows, uninterrupted, strict=True):
            assert row.keys() == other.keys()
            names = "unanswered-clients"
            assert row.get(names) == other.get(names)
            for name in row.keys() - {"seconds", "bytes-down", "bytes-evaluate", names}:
                assert row[name] == pytest.approx(other[name], rel=0, abs=1e-12), name


def test_queued_messages_are_part_of_the_state():
    network = Network(
        "choco-sgd", compressor="sign", consensus_step=0.3, max_missed_rounds=4
    )
    network.grid.down = lambda i, r: (i == 2 and r >= 2) or (i == 0 and r >= 5)
    network.go(7)
    arrays, values = network.strategy._snapshot()
    other = build_strategy(network.settings)
    other._restore(State(arrays, json.loads(json.dumps(values))))
    # Nodes 1 and 4 may have sent in rounds 4 to 7; its last reply was in round 4.
    assert other.relayed(0) == network.strategy.relayed(0)
    assert len(other.relayed(0)) == 8
    assert other.lost == network.strategy.lost == {name_of(2)}
    assert other.names == network.strategy.names
    weights = other.mixing_weights
    np.testing.assert_array_equal(weights, network.strategy.mixing_weights)


def test_resumed_run_keeps_its_saved_graph(tmp_path):
    file = tmp_path / "edges.txt"
    file.write_text("0 1\n1 2\n2 3\n3 4\n4 0\n")
    network = Network("choco-sgd", graph=str(file))
    network.go(1)
    arrays, values = network.strategy._snapshot()
    kept = json.loads(json.dumps(values))
    same = build_strategy(network.settings)
    same._restore(State(arrays, kept))
    file.write_text("0 1\n0 2\n0 3\n0 4\n")
    other = build_strategy(network.settings)
    other._restore(State(arrays, kept))
    file.unlink()
    without = build_strategy(network.settings)
    without._restore(State(arrays, kept))
    for strategy in (same, other, without):
        np.testing.assert_allclose(strategy.mixing_weights, RING)
