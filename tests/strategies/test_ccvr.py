"""CCVR compared with NumPy on the data of all clients together."""

import numpy as np
import pytest
from function_clients import reply_with
from scipy.linalg import sqrtm
from seen_replies import seen
from softmax_runs import (
    CLASSES,
    N,
    assert_near,
    assert_same,
    draw,
    matrix,
    normed_layers,
    run,
    shares_of,
    task_of,
)

from flwr_frl.strategies import CCVR
from flwr_frl.strategies.ccvr import VIRTUAL, pooled
from flwr_frl.strategies.server.replies import InvalidReplyError

ROUNDS, FEATURES, EPOCHS, BATCH, RATE = 3, 20, 2, 7, 0.2
HOW = {"ccvr_features": FEATURES, "ccvr_epochs": EPOCHS, "ccvr_learning_rate": RATE}
HOW |= {"num_server_rounds": ROUNDS, "batch_size": BATCH, "seed": 5}


def normed(num_clients):
    return task_of(normed_layers, classes=("a", "b", "c"))


def calibrated(theta, x, y):
    """Return the head θ after SGD on features drawn from the data's Gaussians."""
    rng = np.random.default_rng([5, VIRTUAL, ROUNDS])
    virtual, labels = [], []
    for c in range(CLASSES):
        count = round(FEATURES * CLASSES * np.mean(y == c))
        covariance = np.cov(x[y == c], rowvar=False)
        normal = rng.standard_normal((count, x.shape[1]))
        virtual.append(x[y == c].mean(0) + normal @ sqrtm(covariance).real)
        labels += [c] * count
    z = np.column_stack([np.concatenate(virtual), np.ones(len(labels))])
    for _ in range(EPOCHS):
        order = rng.permutation(len(labels))
        for rows in np.split(order, range(BATCH, len(order), BATCH)):
            errors = (
                shares_of(z[rows] @ theta.T) - np.eye(CLASSES)[np.array(labels)[rows]]
            )
            theta = theta - RATE * errors.T @ z[rows] / len(rows)
    return theta


def test_last_round_calibrates_the_model_of_fedavg():
    found = run("ccvr", ROUNDS, **HOW)
    expected = run("fedavg", ROUNDS, seed=5, batch_size=BATCH)
    for now in range(ROUNDS - 1):
        assert_near(matrix(found.arrays[now]), matrix(expected.arrays[now]), 1e-6)
    assert found.trained[-1] == [*range(N)]
    x, y = (np.concatenate(parts) for parts in zip(*map(draw, range(N)), strict=True))
    theta = calibrated(matrix(found.arrays[-2]), x, y)
    assert_near(matrix(found.arrays[-1]), theta)


def test_calibration_leaves_the_representation_unchanged():
    result = run("ccvr", ROUNDS, task=f"{__name__}:normed", **HOW)
    before, after = (
        {n: a for n, a in arrays.items() if n.startswith("representation")}
        for arrays in result.arrays[-2:]
    )
    assert_same(after, before)
    heads = [matrix(arrays) for arrays in result.arrays[-2:]]
    assert np.abs(heads[1] - heads[0]).max() > 0.01


def test_statistics_of_clients_are_those_of_the_pooled_data():
    rng = np.random.default_rng(0)
    # Client 0 has one example of class 0, and class 1 has one example in all.
    sets = [[rng.normal(size=(n, 3)) for n in counts] for counts in ([1, 1], [5, 0])]
    replies = []
    for of_classes in sets:
        counts = np.array([len(z) for z in of_classes])
        means = np.stack([z.sum(0) / max(len(z), 1) for z in of_classes])
        several = [np.cov(z.T) if len(z) > 1 else np.zeros((3, 3)) for z in of_classes]
        replies.append((counts, means, np.stack(several)))
    stacked = map(np.stack, zip(*replies, strict=True))
    counts, means, covariances = pooled(*stacked)
    every = np.concatenate([sets[0][0], sets[1][0]])
    assert counts.tolist() == [6, 1]
    assert_near(means, np.stack([every.mean(0), sets[0][1][0]]), 1e-12)
    assert_near(covariances, np.stack([np.cov(every.T), np.zeros((3, 3))]), 1e-12)


@pytest.mark.parametrize("name", ["counts", "means", "covariances"])
def test_impossible_statistics_are_rejected(name):
    result = run("ccvr", 1, num_server_rounds=1)
    message, reply = result.between("train")[0]
    arrays = {n: a.numpy().copy() for n, a in reply.content["arrays"].items()}
    metrics = {"num_examples": 6, "train_loss": 1.0}
    CCVR().check_reply(seen(reply_with(message, arrays, **metrics)))
    arrays[f"statistics.{name}"].flat[0] = -(10**13)
    with pytest.raises(InvalidReplyError):
        CCVR().check_reply(seen(reply_with(message, arrays, **metrics)))
