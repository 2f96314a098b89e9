"""AFL compared with a NumPy implementation of server and clients."""

import numpy as np
import pytest
from paper_rounds import assert_same_arrays
from scipy.optimize import brentq
from softmax_runs import N, assert_near, loss_of, matrix, mean, run, start

from flwr_frl.common.simplex import nearest_in_simplex


def nearest(values):
    """Return the nearest point of the simplex: max(v - θ, 0), where θ is a root."""
    root = brentq(
        lambda theta: np.maximum(values - theta, 0).sum() - 1,
        values.min() - 1,
        values.max(),
        xtol=1e-15,
    )
    return np.maximum(values - root, 0)


def numpy_afl(found, rate, late):
    """Return w and λ by round, computed with the clients that trained."""
    w, rounds, mixture, former = start(), [], np.zeros(N), []
    for number, clients in enumerate(found.trained, 1):
        seen = [i for i in range(N) if number > 2 or i not in late]
        new = [i for i in seen if i not in former]
        mixture = mixture * len(former) / len(seen)
        mixture[new] = 1 / len(seen)
        g = np.zeros(N)
        g[clients] = [loss_of(w, i, test=False) for i in clients]
        models, shares = [found.descend(w, i) for i in clients], mixture[clients]
        if shares.any():
            w = mean(models, shares / shares.sum())
        moved = mixture + rate * len(seen) / len(clients) * g
        mixture, former = np.zeros(N), seen
        mixture[seen] = nearest(moved[seen])
        rounds.append((w, mixture))
    return rounds


@pytest.mark.parametrize(("rate", "late"), [(0.05, ()), (2.0, ()), (0.05, (4, 5))])
def test_every_round_matches_the_paper(rate, late):
    result = run("afl", 5, afl_rate=rate, late=late)
    expected = numpy_afl(result, rate, late)
    for arrays, (w, _) in zip(result.arrays, expected, strict=True):
        assert_near(matrix(arrays), w)
    state = result.strategy.state["mixture"]
    assert sum(state.values()) == pytest.approx(1)
    assert_near(np.array([state[f"{i:06d}"] for i in range(N)]), expected[-1][1])


def test_rate_zero_gives_fedavg():
    more = {"batch_size": 4, "momentum": 0.5}
    assert_same_arrays(run("afl", afl_rate=0.0, **more), run("fedavg", **more))


@pytest.mark.parametrize("values", [[0.2, 0.3, 0.5], [3, -1, 0.5], [0.4, 0.9, 0.8, 0]])
def test_projection_equals_the_root(values):
    values = np.array(values)
    found = nearest_in_simplex(values[None])[0]
    np.testing.assert_allclose(found, nearest(values), atol=1e-12)


def test_projection_of_a_huge_loss_sums_to_one():
    points = nearest_in_simplex(np.array([[3e38, 0.2, 0.2], [-3e38, 0.2, 0.4]]))
    np.testing.assert_allclose(points, [[1, 0, 0], [0, 0.4, 0.6]], atol=1e-12)
