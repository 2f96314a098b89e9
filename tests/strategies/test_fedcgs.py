"""FedCGS and Fed3R compared with scikit-learn on the data of all clients together."""

import numpy as np
import pytest
from refusals import code_of
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge
from softmax_runs import CLASSES, DIMENSION, N, assert_near, draw, matrix, run

from flwr_frl.strategies import FedCGS

RIDGE = 0.1


def pooled(clients):
    x, y = zip(*map(draw, clients), strict=True)
    return np.concatenate(x), np.concatenate(y)


def with_prior(theta, counts):
    """Return θ of a Gaussian classifier with the smoothed prior of these counts."""
    prior = np.log((counts + 1) / (counts.sum() + len(counts)))
    return theta + np.eye(DIMENSION + 1)[-1] * prior[:, None]


def without_prior(x, y):
    """Return θ of the Gaussian classifier of the smoothed covariance."""
    covariance = sum(
        np.cov(x[y == c].T, bias=True) * np.mean(y == c) for c in range(CLASSES)
    )
    covariance += RIDGE * np.trace(covariance) / DIMENSION * np.eye(DIMENSION)
    means = np.stack([x[y == c].mean(0) for c in range(CLASSES)])
    w = np.linalg.solve(covariance, means.T).T
    return np.column_stack([w, -np.einsum("cd,cd->c", w, means) / 2])


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_heads_equal_those_of_the_pooled_data(fraction):
    how = {"rounds": 2, "fraction_train": fraction, "ridge": RIDGE}
    gaussian, least_squares = (run(name, **how) for name in ("fedcgs", "fed3r"))
    for clients, arrays in zip(gaussian.trained, gaussian.arrays, strict=True):
        x, y = pooled(clients)
        expected = with_prior(without_prior(x, y), np.bincount(y, minlength=CLASSES))
        assert_near(matrix(arrays), expected, 1e-4)
    for clients, arrays in zip(
        least_squares.trained, least_squares.arrays, strict=True
    ):
        x, y = pooled(clients)
        penalty = RIDGE * np.square(x).sum() / DIMENSION
        fitted = Ridge(alpha=penalty).fit(x, np.eye(CLASSES)[y])
        expected = np.column_stack([fitted.coef_, fitted.intercept_])
        assert_near(matrix(arrays), expected, 1e-4)


def test_small_ridge_equals_linear_discriminant_analysis():
    result = run("fedcgs", rounds=1, fraction_train=1.0, ridge=1e-9)
    x, y = pooled(range(N))
    analysis = LinearDiscriminantAnalysis(solver="lsqr").fit(x, y)
    found, expected = (
        matrix(result.arrays[0]),
        np.column_stack(
            [analysis.coef_, analysis.intercept_ - np.log(np.bincount(y) / len(y))]
        ),
    )
    expected = with_prior(expected, np.bincount(y))
    # The scores of the classes are equal up to a common term.
    assert_near(found - found[0], expected - expected[0], 1e-3)


@pytest.mark.parametrize("prior", ["client", "global"])
def test_deployed_heads_have_the_prior_of_the_client(prior):
    result = run("fedcgs", 1, fraction_train=1.0, ridge=RIDGE, class_prior=prior)
    x, y = pooled(range(N))
    for i in range(N):
        counts = np.bincount(draw(i)[1] if prior == "client" else y, minlength=CLASSES)
        client = result.client(i, 1)
        client._receive([*result.arrays[0].values()], client.config)
        for _ in range(2):  # A deployed model is computed anew each time.
            tensors = client.deployed_model().state_dict()
            theta = matrix({name: value.numpy() for name, value in tensors.items()})
            assert_near(theta, with_prior(without_prior(x, y), counts), 1e-4)


def test_class_without_examples_is_not_predicted():
    counts, sums = np.array([3.0, 2.0, 0.0]), np.array([[3.0, 0], [0, -2], [0, 0]])
    head = FedCGS(ridge=0.1).head(counts, sums, np.diag([4.0, 3.0]))
    assert (head["head.weight"][2] == 0).all()
    assert head["head.bias"][2] < head["head.bias"][:2].min() - 90
    assert all(np.isfinite(array).all() for array in head.values())


def test_other_weights_than_sums_are_refused():
    assert code_of(FedCGS, weighting="examples") == "weighting"
    assert code_of(FedCGS, aggregation="median") == "aggregation"
