"""pFedMe compared with a NumPy implementation of server and clients."""

import numpy as np
import pytest
from paper_rounds import VARIANTS, assert_losses, assert_rounds, run_variant
from softmax_runs import STEPS, N, run, start

K = 4
PLAIN = {"pfedme_lambda": 2.0, "pfedme_eta": 0.1, "pfedme_steps": K}


def numpy_pfedme(found):
    """Run Algorithm 1 with the clients that trained; return (w, all θ_i) by round."""
    w, rounds, personal = start(), [], [start()] * N
    pull, eta, beta = (found[f"pfedme_{name}"] for name in ("lambda", "eta", "beta"))
    for clients in found.trained:
        models, personal = [], list(personal)
        for i in clients:
            local = theta = w
            for _ in range(STEPS):
                theta = found.descend(theta, i, K, pull, local)
                local = local - eta * pull * (local - theta)
            models.append(local)
            personal[i] = theta
        w = (1 - beta) * w + beta * found.mean(models, clients)
        rounds.append((w, personal))
    return rounds


@pytest.mark.parametrize(
    "more",
    [
        {},
        VARIANTS["momentum"],
        {"pfedme_beta": 1.7, **VARIANTS["examples"]},
        VARIANTS["srpfl"],
    ],
    ids=["plain", "momentum", "beta", "srpfl"],
)
def test_every_round_matches_the_paper(more):
    result = run_variant("pfedme", evaluate={4}, **PLAIN, **more)
    expected = numpy_pfedme(result)
    assert_rounds(result, expected)
    assert_losses(result, expected[-1][1])


def test_batch_norm_statistics_are_averaged_for_any_beta():
    # With β = 3, an extrapolated variance would be negative.
    more = {"task": "softmax_runs:scaled", **PLAIN}
    result, plain = (run("pfedme", 1, pfedme_beta=b, **more) for b in (3.0, 1.0))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        name = f"representation.{name}"
        models = [result.kept[0][i] for i in result.trained[0]]
        values = [np.asarray(kept[f"model.{name}"], float) for kept in models]
        np.testing.assert_allclose(
            result.arrays[0][name], np.mean(values, 0), atol=1e-6
        )
        np.testing.assert_allclose(result.arrays[0][name], plain.arrays[0][name])
    assert result.arrays[0]["representation.num_batches_tracked"] == STEPS * K
