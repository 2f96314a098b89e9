"""MOON compared with a NumPy implementation of server and clients."""

import numpy as np
import pytest
from layered import features, gradients, loss_of, parts, start
from softmax_runs import (
    RATE,
    STEPS,
    N,
    assert_near,
    assert_same,
    draw,
    mean,
    run,
    weights,
)

from flwr_frl.clients import MOONClient
from flwr_frl.common.settings import SettingsError

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

    for _ in range(STEPS):
        of_a, of_w, _ = gradients(a, w, i, extra=contrast)
        a, w = a - RATE * of_a, w - RATE * of_w
    return a, w


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


def test_mu_0_equals_fedavg_bitwise():
    usual = {"batch_size": 4, "momentum": 0.5, "weight_decay": 1e-3}
    plain = run("fedavg", evaluate=True, **usual, **TASK)
    result = run("moon", evaluate=True, moon_mu=0.0, **usual, **TASK)
    for arrays, others in zip(result.arrays, plain.arrays, strict=True):
        assert_same(arrays, others)
    assert result.metrics == plain.metrics


def test_contrastive_loss_has_no_gradient_in_the_first_round():
    # The previous model equals the received one, so both similarities are equal.
    result, plain = (run(name, 2, **TASK) for name in ("moon", "fedavg"))
    for name, array in plain.arrays[0].items():
        np.testing.assert_allclose(result.arrays[0][name], array, atol=1e-6)
    pairs = [(result.arrays[1][n], a) for n, a in plain.arrays[1].items()]
    assert max(np.abs(a - b).max() for a, b in pairs) > 1e-4


@pytest.mark.parametrize(
    ("setting", "value"), [("moon_mu", -1.0), ("moon_temperature", 0.0)]
)
def test_invalid_value_is_rejected(setting, value):
    with pytest.raises(SettingsError) as error:
        MOONClient._settings_type(**{setting: value})
    assert error.value.code == setting.replace("_", "-")
