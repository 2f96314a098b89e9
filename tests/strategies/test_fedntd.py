"""FedNTD compared with a NumPy implementation of server and clients."""

import numpy as np
import pytest
import torch
from paper_rounds import assert_near_arrays
from softmax_runs import (
    CLASSES,
    RATE,
    STEPS,
    assert_near,
    draw,
    matrix,
    run,
    scores_of,
    shares_of,
    slope,
    start,
)

from flwr_frl.clients.fedntd import not_true

BETA, TAU = 2.0, 0.7


def trained(theta, i):
    true, w = np.eye(CLASSES)[draw(i)[1]], theta

    def not_true_shares(model):
        return shares_of(np.where(true, -np.inf, scores_of(model, i) / TAU))

    for _ in range(STEPS):
        # The derivative of the divergence of two softmaxes is their difference.
        extra = BETA / TAU * (not_true_shares(w) - not_true_shares(theta))
        w = w - RATE * slope(scores_of(w, i), i, extra)
    return w


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_every_round_matches_the_paper(weighting):
    terms = {"ntd_beta": BETA, "ntd_temperature": TAU}
    result, theta = run("fedntd", weighting=weighting, **terms), start()
    for clients, arrays in zip(result.trained, result.arrays, strict=True):
        theta = result.mean([trained(theta, i) for i in clients], clients)
        assert_near(matrix(arrays), theta)


def test_beta_zero_gives_fedavg():
    more = {"batch_size": 4, "momentum": 0.5}
    assert_near_arrays(run("fedntd", ntd_beta=0.0, **more), run("fedavg", **more))


def test_logits_of_the_target_are_left_out():
    # Two sequences of two positions with three classes; one target is ignored.
    outputs, targets = (
        torch.arange(12.0).view(2, 3, 2),
        torch.tensor([[2, -100], [0, 1]]),
    )
    assert not_true(outputs, targets).tolist() == [[0, 2], [8, 10], [7, 11]]
