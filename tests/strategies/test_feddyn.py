"""FedDyn compared with a NumPy implementation of server and clients."""

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
)

ALPHA = 0.3


def trained(theta, own, i):
    w = theta
    for _ in range(STEPS):
        w = w - RATE * (gradient(w, i) - own + ALPHA * (w - theta))
    return w


def numpy_feddyn(rounds, lost=(0, 0)):
    """Run Algorithm 1 with the clients that trained; return (θ, h, all λ_k) by round.

    ``lost`` is the (round, client) in which λ_k is lost; then h and all λ_k become 0.
    """
    theta = start()
    h, gradients, states = np.zeros_like(theta), [np.zeros_like(theta)] * N, []
    for number, clients in enumerate(rounds, 1):
        if number == lost[0]:
            gradients = [g * (i != lost[1]) for i, g in enumerate(gradients)]
        models = {i: trained(theta, gradients[i], i) for i in clients}
        gradients = [
            gradients[i] - ALPHA * (models[i] - theta) if i in models else gradients[i]
            for i in range(N)
        ]
        h = h - ALPHA / N * sum(model - theta for model in models.values())
        if number == lost[0]:
            h, gradients = np.zeros_like(h), [np.zeros_like(h)] * N
        theta = np.mean(list(models.values()), axis=0) - h / ALPHA
        states.append((theta, h, gradients))
    return states


def assert_all_near(found, expected):
    for arrays, kept, (theta, _, gradients) in zip(
        found.arrays, found.kept, expected, strict=True
    ):
        assert_near(matrix(arrays), theta, 2e-6)
        for state, gradient_of in zip(kept, gradients, strict=True):
            if state:
                assert_near(matrix(state, "gradient."), gradient_of, 2e-6)
            else:
                assert not gradient_of.any()
    gradient = found.strategy.state["gradients"]
    assert_near(matrix(gradient) / N, expected[-1][1], 2e-6)


def test_every_round_matches_the_paper():
    result = run("feddyn", 5, evaluate=True, feddyn_alpha=ALPHA)
    assert [len(clients) for clients in result.trained] == [3] * 5
    expected = numpy_feddyn(result.trained)
    assert_all_near(result, expected)
    for i, metrics in enumerate(result.metrics[-1]):
        loss = loss_of(expected[-1][0], i)
        assert metrics["loss"] == pytest.approx(loss, abs=1e-5)


def test_lost_gradient_resets_the_gradients_of_all_clients(caplog):
    first = run("feddyn", 5, feddyn_alpha=ALPHA)
    i = next(i for i in first.trained[2] if i in first.trained[0] + first.trained[1])
    result = run("feddyn", 5, feddyn_alpha=ALPHA, lost={(i, 3)})
    assert f"begins anew: client {i:06d}" in caplog.text
    for now, (theta, _, _) in enumerate(numpy_feddyn(result.trained, (3, i))):
        assert_near(matrix(result.arrays[now]), theta, 2e-6)
