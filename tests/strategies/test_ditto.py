"""Ditto compared with a NumPy implementation of server and clients."""

import numpy as np
from paper_rounds import (
    EACH_VARIANT,
    SMALL_BATCHES,
    assert_losses,
    assert_rounds,
    assert_same_arrays,
    run_variant,
)
from softmax_runs import N, loss_of, run, start

OWN = {"ditto_lambda": 0.7, "personal_epochs": 2}


def numpy_ditto(found, pull=0.7):
    """Run Algorithm 1 with the clients that trained; return (w, all v_k) by round."""
    w, rounds, personal = start(), [], [start()] * N
    for clients in found.trained:
        models = [found.descend(w, i) for i in clients]
        personal = [
            found.descend(v, i, found["personal_epochs"], pull, w)
            if i in clients
            else v
            for i, v in enumerate(personal)
        ]
        w = found.mean(models, clients)
        rounds.append((w, personal))
    return rounds


@EACH_VARIANT
def test_every_round_matches_the_paper(more):
    result = run_variant("ditto", evaluate={4}, **OWN, **more)
    expected = numpy_ditto(result)
    assert_rounds(result, expected)
    # A client that never trained is tested with the initial model.
    w, personal = expected[-1]
    assert_losses(result, personal)
    assert max(abs(loss_of(v, i) - loss_of(w, i)) for i, v in enumerate(personal)) > 0.1
    # The pull towards w has an effect.
    i = result.trained[-1][0]
    assert np.abs(personal[i] - numpy_ditto(result, 0.0)[-1][1][i]).max() > 1e-2


def test_global_model_equals_that_of_fedavg_bitwise():
    plain = run("fedavg", 3, evaluate=True, **SMALL_BATCHES)
    for pull in (0.0, 2.0):
        result = run("ditto", 3, evaluate=True, ditto_lambda=pull, **SMALL_BATCHES)
        assert_same_arrays(result, plain)
        for metrics, others in zip(result.metrics, plain.metrics, strict=True):
            reported = [m["accuracy-global"] for m in metrics]
            assert reported == [m["accuracy"] for m in others]
            assert reported != [m["accuracy"] for m in metrics]
