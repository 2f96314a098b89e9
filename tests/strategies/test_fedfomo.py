"""FedFomo compared with a NumPy implementation of server and clients."""

import numpy as np
import pytest
from softmax_runs import (
    RATE,
    STEPS,
    N,
    assert_near,
    draw,
    gradient,
    loss_of,
    matrix,
    run,
    start,
)

from flwr_frl.strategies import FedFomo
from flwr_frl.strategies.server.round import Round

NAMES = [f"{i:06d}" for i in range(N)]
WHOLE = {"fomo_validation": 0.0}


def weigh(candidates, before, i):
    """Return (L(θ_before) − L(θ_n)) / ‖θ_n − θ_before‖ of each candidate."""
    gains = [
        loss_of(before, i, test=False) - loss_of(theta, i, test=False)
        for theta in candidates
    ]
    distances = [np.linalg.norm(theta - before) for theta in candidates]
    return [g / (d + 1e-5) for g, d in zip(gains, distances, strict=True)]


def candidates_of(message):
    arrays = {n: a.numpy() for n, a in message.content["arrays"].items()}
    weight, bias = (arrays[f"candidates.head.{name}"] for name in ("weight", "bias"))
    return [
        np.column_stack(pair).astype(float) for pair in zip(weight, bias, strict=True)
    ]


def test_every_round_matches_the_paper():
    more = {"fomo_models": 2, "fomo_epsilon": 0.0, **WHOLE}
    result = run("fedfomo", 6, evaluate=True, **more)
    assert [len(clients) for clients in result.trained] == [3] * 6
    own, before, kept = [start()] * N, [start()] * N, {}
    affinity = np.zeros((N, N))
    sent = {}
    for message, _ in result.between("train"):
        place = int(message.content["config"]["server-round"]), message.metadata
        sent[place[0], message.metadata.dst_node_id - 1] = candidates_of(message)
    mixed = 0
    for now, clients in enumerate(result.trained):
        replied, grown = {}, affinity.copy()
        for i in clients:
            received = sent[now + 1, i]
            others = [j for j in kept if j != i]
            assert len(received) == min(2, len(others))
            # These have the largest p_ij; ties may be in any order.
            chosen = []
            for theta in received:
                near = min(others, key=lambda j: np.abs(kept[j] - theta).max())
                assert_near(theta, kept[near], 1e-6)
                chosen.append(near)
            if chosen:
                rest = [affinity[i, j] for j in others if j not in chosen]
                assert min(affinity[i, chosen]) >= max(rest, default=-np.inf) - 1e-6
                candidates = [*(kept[j] for j in chosen), own[i]]
                weights = weigh(candidates, before[i], i)
                grown[i, chosen] += weights[:-1]
                positive = np.maximum(weights, 0)
                if positive.sum() > 0:
                    shares = positive / positive.sum()
                    own[i] = np.tensordot(shares, np.array(candidates), axes=1)
                    mixed += shares[-1] < 1
            before[i] = own[i]
            for _ in range(STEPS):
                own[i] = own[i] - RATE * gradient(own[i], i)
            replied[i] = own[i]
        kept |= replied
        affinity = grown
        for i in range(N):
            if state := result.kept[now][i]:
                assert_near(matrix(state, "model."), own[i], 1e-5)
                assert_near(matrix(state, "before."), before[i], 1e-5)
            tested = loss_of(own[i], i)
            assert result.metrics[now][i]["loss"] == pytest.approx(tested, abs=1e-5)
    # Models of other clients have been used.
    assert mixed > 5
    for i, row in enumerate(affinity):
        row_sent = result.strategy.affinity.get(NAMES[i], {})
        for j, value in enumerate(row):
            assert row_sent.get(NAMES[j], 0.0) == pytest.approx(value, abs=1e-4)


def test_validation_examples_are_not_trained_on():
    result = run("fedfomo", 1, fomo_validation=0.5)
    client = result.client(3, 1)
    train, validation = client.split()
    again, _ = client.split()
    assert (len(train), len(validation)) == (7, 8)
    rows = [set(part.rows.tolist()) for part in (train, validation)]
    assert rows[0] | rows[1] == set(range(15))
    assert not rows[0] & rows[1]
    assert set(again.rows.tolist()) == rows[0]
    for part in (train, validation):
        assert part.targets.tolist() == draw(3)[1][part.rows].tolist()


def test_models_with_the_largest_affinity_are_chosen_without_exploration():
    strategy, explorer, always = (
        FedFomo(fomo_models=3, fomo_epsilon=epsilon, fomo_epsilon_decay=decay)
        for epsilon, decay in ((0.0, 0.0), (1.0, 0.5), (1.0, 0.0))
    )
    for each in (strategy, explorer, always):
        each.models.update({name: {} for name in "abcdef"})
        each.affinity["a"] = {"b": -1.0, "c": 2.0, "d": 3.0, "e": -0.5}
    for server_round in range(1, 5):
        assert strategy.choose("a", server_round) == ["d", "c", "f"]
    assert len({tuple(always.choose("a", r)) for r in range(1, 9)}) > 1
    assert always.choose("a", 1) == explorer.choose("a", 1)
    assert explorer.choose("a", 3) == ["d", "c", "f"]
    # An unknown client receives any models, in an order that differs between rounds.
    orders = {tuple(strategy.choose("z", r)) for r in range(1, 9)}
    assert len(orders) > 1
    assert all(len(set(order)) == 3 for order in orders)


def test_evaluation_sends_no_models_except_to_newcomers():
    result = run("fedfomo", 3, evaluate=True, fomo_models=2)
    for message, _ in result.between("evaluate"):
        assert candidates_of(message) == []
    sent, strategy = result.between("evaluate")[0][0].content, result.strategy
    about = sent["arrays"], sent["config"], [1], "evaluate.newcomer"
    (message,) = strategy._open_round(Round(strategy, 3, *about), result.grid)
    assert len(candidates_of(message)) == 2
