"""MOON compared with a NumPy implementation of server and clients."""

import numpy as np
import pytest
from layered import descend, features, loss_of, parts, start
from softmax_runs import N, assert_near, draw, mean, run, weights

TASK = {"task": "layered:layered"}
MU, TAU = 3.0, 0.7
TERMS = {"moon_mu": MU, "moon_temperature": TAU}


def similarity(z, other):
    """Return cosine similarities, and their derivatives by z."""
    lengths, others = (np.linalg.norm(m, axis=1, keepdims=True) for m in (z, other))
    cosine = (z * other).sum(1, keepdims=True) / (lengths * others)
    return cosine, (other / others - cosine * z / lengths) / lengths


def trained(a, w, i, previous):
    x, _ = draw(i)
    z_global, z_previous = features(a, x), features(previous, x)

    def contrast(z, y):
        (to_global, by_global), (to_previous, by_previous) = (
            similarity(z, other) for other in (z_global, z_previous)
        )
        wrong = 1 / (1 + np.exp((to_global - to_previous) / TAU))
        return MU * wrong * (by_previous - by_global) / TAU / len(z)

    return descend(a, w, i, extra=contrast)


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_every_round_matches_the_paper(weighting):
    outcome = run("moon", evaluate=True, weighting=weighting, **TERMS, **TASK)
    assert [len(clients) for clients in outcome.trained] == [3] * 4
    a, w = start()
    previous = [a] * N
    for now, clients in enumerate(outcome.trained):
        results = {i: trained(a, w, i, previous[i]) for i in clients}
        shares = weights(clients, weighting)
        a, w = (mean([r[part] for r in results.values()], shares) for part in (0, 1))
        for i, (representation, _) in results.items():
            previous[i] = representation
        assert_near(parts(outcome.arrays[now])[0], a, 2e-6)
        assert_near(parts(outcome.arrays[now])[1], w, 2e-6)
        for i in range(N):
            loss = outcome.metrics[now][i]["loss"]
            assert loss == pytest.approx(loss_of(a, w, i), abs=1e-5)
            if kept := outcome.kept[now][i]:
                weight, bias = kept["previous.0.weight"], kept["previous.0.bias"]
                assert_near(np.column_stack([weight, bias]), previous[i], 2e-6)
