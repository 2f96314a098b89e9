"""IFCA compared with a NumPy implementation of server and clients."""

import numpy as np
import pytest
from function_clients import reply_with
from seen_replies import seen
from softmax_runs import (
    DIMENSION,
    RATE,
    STEPS,
    N,
    assert_near,
    gradient,
    loss_of,
    mean,
    run,
    start,
    weights,
)

from flwr_frl.clients.ifca import initial_models
from flwr_frl.strategies import IFCA
from flwr_frl.strategies.server.replies import InvalidReplyError

CLUSTERS = 3


def matrices(arrays) -> list[np.ndarray]:
    """Return θ = [W | b] of each cluster."""
    weight, bias = (arrays[f"clusters.head.{name}"] for name in ("weight", "bias"))
    return [
        np.column_stack(pair).astype(float) for pair in zip(weight, bias, strict=True)
    ]


def chosen_by(models, i: int) -> int:
    return int(np.argmin([loss_of(theta, i, test=False) for theta in models]))


def numpy_ifca(models, trained, weighting):
    """Yield all models and the chosen clusters of each round."""
    for clients in trained:
        chosen = {i: chosen_by(models, i) for i in clients}
        after = []
        for j, theta in enumerate(models):
            members = [i for i in clients if chosen[i] == j]
            moved = []
            for i in members:
                w = theta
                for _ in range(STEPS):
                    w = w - RATE * gradient(w, i)
                moved.append(w)
            after.append(mean(moved, weights(members, weighting)) if members else theta)
        models = after
        yield models, chosen


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_every_round_matches_the_paper(weighting):
    more = {"num_clusters": CLUSTERS, "weighting": weighting}
    result = run("ifca", 5, evaluate=True, **more)
    assert [len(clients) for clients in result.trained] == [3] * 5
    first, _ = result.between("train")[0]
    models = matrices({n: a.numpy() for n, a in first.content["arrays"].items()})
    expected = numpy_ifca(models, result.trained, weighting)
    everywhere = set()
    for now, (models, chosen) in enumerate(expected):
        for theta, other in zip(matrices(result.arrays[now]), models, strict=True):
            assert_near(theta, other, 1e-6)
        assert result.rows[now]["clusters"] == len(set(chosen.values()))
        everywhere |= set(chosen.values())
        for i in range(N):
            # Includes clients that were not sampled.
            tested = loss_of(models[chosen_by(models, i)], i)
            assert result.metrics[now][i]["loss"] == pytest.approx(tested, abs=1e-6)
    assert len(everywhere) > 1


def test_first_model_is_that_of_the_task_and_others_are_random():
    result = run("ifca", 1, num_clusters=CLUSTERS)
    stacked = initial_models(result.client(0, 1).task, CLUSTERS)
    models = matrices({f"clusters.{n}": t.numpy() for n, t in stacked.items()})
    assert_near(models[0], start(), 0)
    bound = 1 / np.sqrt(DIMENSION)
    for theta, other in zip(models, [*models[1:], models[0]], strict=True):
        assert np.abs(theta - other).max() > 0.1
        assert np.abs(theta).max() <= bound


@pytest.mark.parametrize("cluster", [-1, 0.5, 2, None])
def test_reply_with_an_invalid_cluster_is_rejected(cluster):
    strategy = IFCA(num_clusters=2)
    result = run("ifca", 1, num_clusters=2)
    message, reply = result.between("train")[0]
    metrics = {"num_examples": 6, "train_loss": 1.0}
    named = {} if cluster is None else {"cluster": cluster}
    arrays = reply.content["arrays"]
    strategy.check_reply(seen(reply_with(message, arrays, **metrics, cluster=1)))
    with pytest.raises(InvalidReplyError):
        strategy.check_reply(seen(reply_with(message, arrays, **metrics, **named)))
