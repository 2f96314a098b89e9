"""FedAMP compared with a NumPy implementation of server and clients."""

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

NAMES = [f"{i:06d}" for i in range(N)]
ALPHA, LAMBDA = 2.0, 0.6
COSINE = {"fedamp_scale": 3.0, "fedamp_self_weight": 0.3}
EXPONENTIAL = {"fedamp_attention": "exponential", "fedamp_sigma": 4.0}
# With α/σ = 10, the weights of the other clients would sum to more than 1.
LARGE = {"fedamp_attention": "exponential", "fedamp_sigma": 0.2}


def attention(models, i, attention="cosine", sigma=1.0, scale=0.0, self_weight=0.0):
    """Return ξ_ij of the clients that have trained, by client j."""
    others = [j for j in models if j != i]
    if attention == "exponential":
        squares = {j: np.square(models[i] - models[j]).sum() for j in others}
        xi = {j: ALPHA / sigma * np.exp(-squares[j] / sigma) for j in others}
        if (total := sum(xi.values())) > 1:
            xi = {j: value / total for j, value in xi.items()}
    else:
        change = {j: (models[j] - start()).ravel() for j in models}
        lengths = {j: np.linalg.norm(c) for j, c in change.items()}
        xi = {
            j: np.exp(scale * change[i] @ change[j] / (lengths[i] * lengths[j]))
            for j in others
        }
        total = sum(xi.values())
        xi = {j: (1 - self_weight) * value / total for j, value in xi.items()}
    return {**xi, i: 1 - sum(xi.values())}


def trained(u, i):
    """Return w_i after steps on F_i and λ/(2 α) ‖w − u‖², starting from u."""
    w = u
    for _ in range(STEPS):
        w = w - RATE * (gradient(w, i) + LAMBDA / ALPHA * (w - u))
    return w


@pytest.mark.parametrize(
    "more", [COSINE, EXPONENTIAL, LARGE], ids=["cos", "exp", "cap"]
)
def test_every_round_matches_the_paper(more):
    constants = {"fedamp_alpha": ALPHA, "fedamp_lambda": LAMBDA}
    result = run("fedamp", 5, evaluate=True, **more, **constants)
    assert [len(clients) for clients in result.trained] == [3] * 5
    options = {name.removeprefix("fedamp_"): value for name, value in more.items()}
    models, shared = {}, start()
    for now, clients in enumerate(result.trained):
        sent = {}
        for i in clients:
            if i in models:
                xi = attention(models, i, **options)
                assert sum(xi.values()) == pytest.approx(1)
                assert min(xi.values()) > -1e-12
                sent[i] = sum(xi[j] * models[j] for j in models)
            else:
                sent[i] = shared
        models |= {i: trained(u, i) for i, u in sent.items()}
        shared = np.mean([models[i] for i in clients], axis=0)
        assert_near(matrix(result.arrays[now]), shared, 1e-6)
        for i in range(N):
            # A client that has not trained yet is tested with the mean.
            tested = loss_of(models.get(i, shared), i)
            assert result.metrics[now][i]["loss"] == pytest.approx(tested, abs=1e-6)
    for i, theta in models.items():
        assert_near(matrix(result.strategy.models[NAMES[i]]), theta, 1e-6)
    if more is LARGE:
        i = result.trained[-1][0]
        assert attention(models, i, **options)[i] == pytest.approx(0)
