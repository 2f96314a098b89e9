"""FedProx compared with a NumPy implementation of server and clients."""

import numpy as np
from paper_rounds import EACH_VARIANT, SMALL_BATCHES, assert_same_arrays, run_variant
from softmax_runs import assert_near, matrix, run, start


def numpy_fedprox(found, mu):
    """Run Algorithm 2 with the clients that trained; return w by round."""
    w, rounds = start(), []
    for clients in found.trained:
        models = [found.descend(w, i, pull=mu, anchor=w) for i in clients]
        w = found.mean(models, clients)
        rounds.append(w)
    return rounds


@EACH_VARIANT
def test_every_round_matches_the_paper(more):
    result = run_variant("fedprox", proximal_mu=1.5, **more)
    expected = numpy_fedprox(result, 1.5)
    for arrays, w in zip(result.arrays, expected, strict=True):
        assert_near(matrix(arrays), w)
    # The proximal term has an effect.
    assert np.abs(expected[-1] - numpy_fedprox(result, 0.0)[-1]).max() > 1e-2


def test_mu_0_equals_fedavg_bitwise():
    prox = run("fedprox", proximal_mu=0.0, **SMALL_BATCHES)
    plain = run("fedavg", **SMALL_BATCHES)
    assert_same_arrays(prox, plain)
    losses = [[row["train-loss"] for row in r.rows] for r in (prox, plain)]
    assert losses[0] == losses[1]


def test_mu_is_sent_under_the_key_of_flower():
    result = run("fedprox", 2, proximal_mu=0.25)
    sent = [m.content["config"]["proximal-mu"] for m, _ in result.between("train")]
    assert sent == [0.25] * 6
    without = run("fedavg", 1).between("train")
    assert not any("proximal-mu" in m.content["config"] for m, _ in without)
