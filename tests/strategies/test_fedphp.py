"""FedPHP compared with a NumPy implementation of server and clients."""

import numpy as np
import pytest
from layered import features, gradients, loss_of, parts, start
from softmax_runs import RATE, STEPS, N, assert_near, draw, mean, run

TASK = {"task": "layered:layered"}
LAMBDA, MU, ROUNDS = 0.6, 0.8, 6
TERMS = {"fedphp_lambda": LAMBDA, "fedphp_mu": MU, "num_server_rounds": ROUNDS}


def slope_of_mmd(z, other):
    """Return the derivative of the squared discrepancy by z, with a fixed width."""
    both, sign = np.vstack([z, other]), np.repeat([1.0, -1.0], len(z)) / len(z)
    away = both[:, None] - both[None]
    squares = (away**2).sum(2)
    width = squares.sum() / (squares.size - len(both)) + 1e-8
    slope = 0.0
    for k in (0.25, 0.5, 1, 2, 4):
        kernel = np.outer(sign, sign) * np.exp(-squares / (k * width))
        slope -= 4 / (k * width) * (kernel[:, :, None] * away).sum(1)
    return slope[: len(z)]


def trained(a, w, i, private):
    x, _ = draw(i)
    towards = features(private, x)
    ratio = LAMBDA / (1 - LAMBDA)

    def extra(z, y):
        return ratio * slope_of_mmd(z, towards)

    for _ in range(STEPS):
        of_a, of_w, _ = gradients(a, w, i, extra=extra)
        a, w = a - RATE * (1 - LAMBDA) * of_a, w - RATE * (1 - LAMBDA) * of_w
    return a, w


def test_every_round_matches_the_paper():
    outcome = run("fedphp", ROUNDS, evaluate=True, **TERMS, **TASK)
    assert [len(clients) for clients in outcome.trained] == [3] * ROUNDS
    shared, private, counts = start(), [start()] * N, [0] * N
    for now, clients in enumerate(outcome.trained):
        local = {i: trained(*shared, i, private[i][0]) for i in clients}
        shared = tuple(
            mean([m[p] for m in local.values()], np.ones(3) / 3) for p in (0, 1)
        )
        for i, model in local.items():
            # Half of the clients train in each of the rounds.
            mu = MU * min(counts[i] / (ROUNDS / 2), 1)
            private[i] = tuple(
                mu * old + (1 - mu) * new
                for old, new in zip(private[i], model, strict=True)
            )
            counts[i] += 1
        for i in range(N):
            model = private[i] if counts[i] else shared
            loss = outcome.metrics[now][i]["loss"]
            assert loss == pytest.approx(loss_of(*model, i), abs=1e-5)
            if kept := outcome.kept[now][i]:
                assert kept["count.trainings"] == counts[i]
                for found, expected in zip(parts(kept, "model."), model, strict=True):
                    assert_near(found, expected, 5e-6)
        for found, expected in zip(parts(outcome.arrays[now]), shared, strict=True):
            assert_near(found, expected, 5e-6)
    assert max(counts) > 3


def test_without_the_discrepancy_the_messages_are_those_of_fedavg():
    found, expected = (
        run(name, 3, **more, **TASK).arrays[-1]
        for name, more in (("fedphp", {"fedphp_lambda": 0.0}), ("fedavg", {}))
    )
    for name, array in expected.items():
        assert_near(found[name], array, 1e-6)
