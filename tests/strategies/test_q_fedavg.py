"""q-FedAvg compared with a NumPy implementation of server and clients."""

import numpy as np
import pytest
from refusals import code_of
from softmax_runs import RATE, assert_near, loss_of, matrix, run, start, weights


def numpy_q_fedavg(found, q):
    """Return w by round, computed with the clients that trained."""
    w, rounds, lipschitz = start(), [], 1 / RATE
    for clients in found.trained:
        steps, normalizers = [], []
        for i in clients:
            delta = lipschitz * (w - found.descend(w, i))
            loss = loss_of(w, i, test=False)
            steps.append(loss**q * delta)
            normalizers.append(
                q * loss ** (q - 1) * (delta**2).sum() + lipschitz * loss**q
            )
        shares = weights(clients, found["weighting"])
        w = w - np.tensordot(shares, steps, 1) / (shares @ normalizers)
        rounds.append(w)
    return rounds


@pytest.mark.parametrize("q", [0.5, 3.0])
@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_every_round_matches_the_paper(q, weighting):
    result = run("q-fedavg", q_fedavg_q=q, weighting=weighting)
    for arrays, w in zip(result.arrays, numpy_q_fedavg(result, q), strict=True):
        assert_near(matrix(arrays), w)


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_q_zero_gives_fedavg_with_the_same_weights(weighting):
    more = {"weighting": weighting, "momentum": 0.5, "batch_size": 4}
    found, other = run("q-fedavg", q_fedavg_q=0.0, **more), run("fedavg", **more)
    for arrays, expected in zip(found.arrays, other.arrays, strict=True):
        assert_near(matrix(arrays), matrix(expected), 1e-6)


@pytest.mark.parametrize("q", [0.0, 2.0])
def test_statistics_of_batch_norms_become_the_mean(q):
    task = {"task": "softmax_runs:normed"}
    found, other = run("q-fedavg", 1, q_fedavg_q=q, **task), run("fedavg", 1, **task)
    for name, value in other.arrays[0].items():
        if q == 0 or name.endswith(("running_mean", "running_var", "tracked")):
            assert_near(found.arrays[0][name], value, 1e-6)


def test_negative_loss_is_refused(monkeypatch):
    client = run("q-fedavg", 1).client(0, 1)
    monkeypatch.setattr("flwr_frl.clients.q_fedavg.received_loss", lambda client: -0.1)
    assert code_of(client.update) == "training-loss"
