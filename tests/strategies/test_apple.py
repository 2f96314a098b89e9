"""APPLE compared with a NumPy implementation of server and clients."""

import numpy as np
import pytest
from softmax_runs import (
    RATE,
    STEPS,
    N,
    assert_near,
    gradient,
    loss_of,
    matrix,
    run,
    start,
    weights,
)

from flwr_frl.strategies import APPLE

TERMS = {"apple_learning_rate": 0.05, "apple_mu": 0.4, "apple_rounds": 0.5}
P0 = weights([*range(N)], "examples")
ROUNDS = 6


def schedule(turn):
    return (np.cos(np.pi * turn / 3) + 1) / 2 if turn < 3 else 0.0


def arrays_of(message):
    return {n: a.numpy().astype(float) for n, a in message.content["arrays"].items()}


def received(message):
    """Return the other clients whose core models a message has, by their p_0."""
    pairs = arrays_of(message)["relations.values"]
    return [int(np.abs(P0 - p0).argmin()) for p0 in pairs[1:, 1]]


@pytest.mark.parametrize("count", [2, 9])
def test_every_round_matches_the_paper(count):
    more = {"num_server_rounds": ROUNDS, "apple_models": count, **TERMS}
    result = run("apple", ROUNDS, evaluate=True, **more)
    sent = {
        (int(m.content["config"]["server-round"]), m.metadata.dst_node_id - 1): m
        for m, _ in result.between("train")
    }
    cores, own, p = [start()] * N, {}, np.tile(P0, (N, 1))
    met = [set() for _ in range(N)]
    for now, clients in enumerate(result.trained):
        new = {}
        for i in clients:
            others = received(sent[now + 1, i])
            assert len({*others} - {i}) == min(count, N - 1)
            # Models that were never received come first.
            unmet = {*range(N)} - met[i] - {i}
            assert len(unmet & {*others}) == min(len(unmet), len(others))
            met[i] |= {*others}
            learned = np.isin(np.arange(N), [i, *others])
            models, q = np.array(cores), p[i].copy()
            for _ in range(STEPS):
                slope = gradient(np.tensordot(q, models, 1), i)
                pull = schedule(now) * TERMS["apple_mu"] * (q - P0)
                by_q = np.tensordot(models, slope, 2) + pull
                models[i] = models[i] - RATE * q[i] * slope
                q = q - TERMS["apple_learning_rate"] * by_q * learned
            new[i], p[i], own[i] = models[i], q, np.tensordot(q, models, 1)
        cores = [new.get(i, core) for i, core in enumerate(cores)]
        shared = np.tensordot(P0, np.array(cores), 1)
        assert_near(matrix(result.arrays[now], "rest."), shared, 1e-6)
        for i in range(N):
            tested = loss_of(own.get(i, shared), i)
            assert result.metrics[now][i]["loss"] == pytest.approx(tested, abs=1e-5)
            if kept := result.kept[now][i]:
                assert_near(matrix(kept, "model."), own[i], 5e-6)
                assert_near(matrix(kept, "core."), cores[i], 5e-6)
    for i in own:
        found = result.strategy.relations[f"{i:06d}"]
        for name, value in found.items():
            assert value == pytest.approx(p[i, int(name)], abs=1e-5)
    assert np.abs(p - P0).max() > 0.01


def test_without_other_models_it_is_local_training():
    result = run("apple", 0, apple_learning_rate=0.0)
    client, theta = result.client(0, 0), result.descend(start(), 0)
    shared = client._initial_arrays(client.shared)
    alone = {n: np.zeros_like(value) for n, value in shared.items()}
    alone["relations.values"] = np.ones((1, 2), np.float32)
    client._receive([*alone.values()], {"server-round": 1})
    client.update()
    saved = {name: value.numpy() for name, value in client.saved.items()}
    for group in ("core.", "model."):
        assert_near(matrix(saved, group), theta)


def test_models_with_large_relations_are_drawn_more_often():
    strategy = APPLE(apple_models=1)
    strategy.relations["a"] = {"a": 0.5, "b": 0.0, "c": -9.0, "d": 0.1}
    drawn = [strategy.choose("a", [*"abcd"], r) for r in range(30)]
    assert drawn.count(["c"]) > 25
    assert strategy.choose("a", [*"abcde"], 1) == ["e"]
