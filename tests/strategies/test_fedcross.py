"""FedCross compared with a NumPy implementation of the server."""

import numpy as np
import pytest
from softmax_runs import assert_near, loss_of, matrix, run, start

from flwr_frl.strategies import FedCross

ALPHA = 0.7


def partner(models, k, kind, turn):
    if kind == "in-order":
        return (k + turn % (len(models) - 1) + 1) % len(models)
    sign = 1 if kind == "highest" else -1
    flat = [m.ravel() / np.linalg.norm(m) for m in models]
    return max(set(range(len(models))) - {k}, key=lambda j: sign * flat[k] @ flat[j])


@pytest.mark.parametrize("kind", ["lowest", "highest", "in-order"])
def test_every_round_matches_the_paper(kind):
    more = {"fedcross_alpha": ALPHA, "fedcross_partner": kind}
    result = run("fedcross", 5, evaluate=True, **more)
    models, orders = [start()] * 3, set()
    sent = {
        (m.content["config"]["server-round"], m.metadata.dst_node_id - 1): matrix(
            {n: a.numpy() for n, a in m.content["arrays"].items()}
        )
        for m, _ in result.between("train")
    }
    for now, clients in enumerate(result.trained):
        received = [sent[now + 1, i] for i in clients]
        away = [[np.abs(model - theta).max() for model in models] for theta in received]
        places = np.argmin(away, axis=1).tolist()
        if not now:  # All models are equal.
            order = run("fedcross", 1).strategy._assigned
            places = [int(order[f"{i:06d}"]) for i in clients]
        assert sorted(places) == [0, 1, 2]
        orders.add(tuple(places))
        trained = [start()] * 3
        for i, k in zip(clients, places, strict=True):
            assert_near(sent[now + 1, i], models[k], 1e-6)
            trained[k] = result.descend(models[k], i)
        models = [
            ALPHA * v + (1 - ALPHA) * trained[partner(trained, k, kind, now)]
            for k, v in enumerate(trained)
        ]
        shared = np.mean(models, axis=0)
        assert_near(matrix(result.arrays[now]), shared, 1e-6)
        for i, metrics in enumerate(result.metrics[now]):
            assert metrics["loss"] == pytest.approx(loss_of(shared, i), abs=1e-6)
    assert len(orders) > 1


def test_two_models_with_equal_weights_are_fedavg():
    pair = {"fraction_train": 0.34}
    found = run("fedcross", 4, fedcross_alpha=0.5, **pair)
    expected = run("fedavg", 4, **pair)
    assert [len(clients) for clients in found.trained] == [2] * 4
    assert_near(matrix(found.arrays[-1]), matrix(expected.arrays[-1]), 1e-6)


def test_a_model_without_a_reply_is_mixed_as_it_was():
    more = {"fedcross_alpha": 0.9, "fedcross_partner": "in-order"}
    first = run("fedcross", 1, **more).trained[0][0]
    result = run("fedcross", 1, spoilt=[(first, 1)], **more)
    places = {int(k): int(i) for i, k in result.strategy._assigned.items()}
    silent = next(k for k, i in places.items() if i == first)
    partner = result.descend(start(), places[(silent + 1) % 3])
    found = matrix(result.strategy.models[str(silent)])
    assert_near(found, 0.9 * start() + 0.1 * partner, 1e-6)


def test_a_single_model_is_its_own_partner():
    assert FedCross().partners([{"a": np.ones(2)}], 5) == [0]
