"""FedProx against a few lines of NumPy, server and clients."""

import numpy as np
import pytest
from softmax_runs import (
    RATE,
    STEPS,
    assert_near,
    assert_same,
    gradient,
    matrix,
    mean,
    run,
    start,
    weights,
)


def numpy_fedprox(trained, mu, momentum=0.0, decay=0.0, weighting="uniform"):
    """Algorithm 2 over the clients that counted in each round; w after each round."""
    w, found = start(), []
    for clients in trained:
        models = []
        for i in clients:
            own, velocity = w, 0.0
            for _ in range(STEPS):
                step = gradient(own, i, decay) + mu * (own - w)
                velocity = momentum * velocity + step
                own = own - RATE * velocity
            models.append(own)
        w = mean(models, weights(clients, weighting))
        found.append(w)
    return found


@pytest.mark.parametrize(
    "more",
    [
        {"proximal_mu": 1.5},
        {"proximal_mu": 0.8, "momentum": 0.6, "weight_decay": 0.05},
        {"proximal_mu": 1.5, "weighting": "examples"},
    ],
    ids=["plain", "momentum", "examples"],
)
@pytest.mark.parametrize("srpfl", [False, True])
def test_every_round_is_that_of_the_paper(more, srpfl):
    found = run("fedprox", srpfl=srpfl, **more)
    assert [len(c) for c in found.trained] == ([1, 1, 2, 2] if srpfl else [3] * 4)
    expected = numpy_fedprox(
        found.trained,
        more["proximal_mu"],
        more.get("momentum", 0.0),
        more.get("weight_decay", 0.0),
        more.get("weighting", "uniform"),
    )
    for arrays, w in zip(found.arrays, expected, strict=True):
        assert_near(matrix(arrays), w)
    # The term is felt: without it the models are others.
    other = numpy_fedprox(found.trained, 0.0)[-1]
    assert np.abs(matrix(found.arrays[-1]) - other).max() > 1e-2


def test_a_reply_that_does_not_count_is_left_out():
    # Round 2 samples these three.
    clients = run("fedprox", 2).trained[1]
    found = run("fedprox", spoilt={(clients[0], 2)}, proximal_mu=1.0)
    assert found.trained[1] == clients[1:]
    for arrays, w in zip(found.arrays, numpy_fedprox(found.trained, 1.0), strict=True):
        assert_near(matrix(arrays), w)


def test_mu_0_is_fedavg_to_the_last_bit():
    # Small batches in random order, momentum and decay.
    usual = {"batch_size": 4, "momentum": 0.5, "weight_decay": 1e-3}
    prox = run("fedprox", proximal_mu=0.0, **usual)
    plain = run("fedavg", **usual)
    for arrays, others in zip(prox.arrays, plain.arrays, strict=True):
        assert_same(arrays, others)
    losses = [[row["train-loss"] for row in r.rows] for r in (prox, plain)]
    assert losses[0] == losses[1]


def test_one_step_from_the_global_model_does_not_feel_the_term():
    # μ (w − wᵗ) is 0 at w = wᵗ.
    prox = run("fedprox", proximal_mu=3.0, representation_epochs=1)
    plain = run("fedavg", representation_epochs=1)
    assert_near(matrix(prox.arrays[-1]), matrix(plain.arrays[-1]), 1e-7)


def test_a_step_with_rate_times_mu_1_by_hand():
    # w − η ∇F(w) − ηµ (w − wᵗ) = wᵗ − η ∇F(w): each step begins at wᵗ again.
    found = run("fedprox", 1, proximal_mu=1 / RATE, representation_epochs=2)
    w, clients = start(), found.trained[0]
    first = [w - RATE * gradient(w, i) for i in clients]
    second = [w - RATE * gradient(v, i) for v, i in zip(first, clients, strict=True)]
    assert_near(matrix(found.arrays[0]), np.mean(second, axis=0))


def test_mu_travels_under_flower_s_key():
    found = run("fedprox", 2, proximal_mu=0.25)
    told = [m.content["config"]["proximal-mu"] for m, _ in found.between("train")]
    assert told == [0.25] * 6
    silent = run("fedavg", 1).between("train")
    assert not any("proximal-mu" in m.content["config"] for m, _ in silent)
