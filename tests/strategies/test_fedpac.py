"""FedPAC compared with a NumPy implementation of server and clients."""

from itertools import combinations

import numpy as np
import pytest
from flwr.app import Array
from layered import (
    WIDTH,
    average_classes,
    class_means,
    features,
    gradients,
    loss_of,
    parts,
    start,
)
from seen_replies import seen
from softmax_runs import CLASSES, RATE, STEPS, N, assert_near, draw, mean, run, weights

from flwr_frl.strategies.fedpac import combination_weights
from flwr_frl.strategies.server.replies import InvalidReplyError

TASK = {"task": "layered:layered", "fedpac_head_epochs": 2}
LAMBDA = 2.0
MEANS, COUNTS = "prototypes.means", "prototypes.counts"


def statistics(a, i):
    z, (means, counts) = features(a, draw(i)[0]), class_means(a, i)
    h = means * counts[:, None] / len(z)
    return h, (np.square(z).sum() / len(z) - np.square(h).sum()) / len(z)


def trained(a, w, i, centroids, known, head_rate):
    def pull(z, y):
        return 2 * LAMBDA * (z - centroids[y]) * known[y][:, None] / z.size

    for _ in range(TASK["fedpac_head_epochs"]):
        w = w - head_rate * gradients(a, w, i)[1]
    for _ in range(STEPS):
        a = a - RATE * gradients(a, w, i, extra=pull)[0]
    return a, w


def smallest(matrix):
    """Return the minimum over the simplex, the best affine minimum of any support."""
    n, best = len(matrix), None
    for size in range(1, n + 1):
        for support in combinations(range(n), size):
            part = matrix[np.ix_(support, support)]
            inverse = np.linalg.pinv(part) @ np.ones(size)
            alpha = np.zeros(n)
            alpha[list(support)] = inverse / inverse.sum()
            if (alpha >= -1e-12).all():
                value = alpha @ matrix @ alpha
                if best is None or value < best[0]:
                    best = value, alpha
    return best[1]


@pytest.mark.parametrize(
    ("weighting", "more", "head_rate"),
    [
        ("uniform", {}, 10 * RATE),
        ("examples", {"fedpac_head_learning_rate": RATE / 2}, RATE / 2),
    ],
)
def test_every_round_matches_the_paper(weighting, more, head_rate):
    more = {"fedpac_lambda": LAMBDA, "weighting": weighting, **more}
    outcome = run("fedpac", 5, evaluate=True, **more, **TASK)
    assert [len(clients) for clients in outcome.trained] == [3] * 5
    a, w = start()
    heads = [w] * N
    centroids, known = np.zeros((CLASSES, WIDTH)), np.zeros(CLASSES, bool)
    for now, clients in enumerate(outcome.trained):
        sent = [statistics(a, i) for i in clients]
        results = [
            trained(a, heads[i], i, centroids, known, head_rate) for i in clients
        ]
        a = mean([own for own, _ in results], weights(clients, weighting))
        for i, (h, _) in zip(clients, sent, strict=True):
            away = np.array([(h - other).ravel() for other, _ in sent])
            alpha = smallest(np.diag([v for _, v in sent]) + away @ away.T)
            heads[i] = mean([head for _, head in results], alpha)
        own = [class_means(r[0], i) for i, r in zip(clients, results, strict=True)]
        average_classes(centroids, known, own, weighting)
        arrays = {**outcome.arrays[now], **outcome.strategy.initial_head}
        assert_near(parts(arrays)[0], a, 2e-6)
        np.testing.assert_allclose(arrays[MEANS], centroids, atol=2e-6)
        assert ((arrays[COUNTS] > 0) == known).all()
        for i in range(N):
            loss = outcome.metrics[now][i]["loss"]
            assert loss == pytest.approx(loss_of(a, heads[i], i), abs=1e-5)
    for i in range(N):
        head = outcome.strategy.per_client(f"{i:06d}")
        assert_near(parts({**arrays, **head})[1], heads[i], 2e-6)


def test_the_weights_minimise_the_estimated_loss():
    rng = np.random.default_rng(0)
    for n in (1, 2, 5, 8):
        for _ in range(20):
            # The clients' scales may differ widely.
            scales = 10.0 ** rng.integers(-4, 5, n)
            h = rng.standard_normal((n, 2, 3)) * scales[:, None, None]
            variances = rng.random(n) * scales**2 / 10
            for i, alpha in enumerate(combination_weights(h, variances)):
                away = (h - h[i]).reshape(n, -1)
                matrix = away @ away.T + np.diag(variances)
                assert alpha.min() >= 0
                assert alpha.sum() == pytest.approx(1)
                least = smallest(matrix)
                assert alpha @ matrix @ alpha <= (1 + 1e-9) * (least @ matrix @ least)


def test_only_client_with_a_class_keeps_its_head():
    # The features are far apart and have no variance, so no other head helps.
    h = np.zeros((3, 3, 2))
    h[range(3), range(3)] = 1.0
    np.testing.assert_allclose(combination_weights(h, np.zeros(3)), np.eye(3))
    # Without any statistics, each client keeps its own head.
    np.testing.assert_allclose(combination_weights(h * 0, np.zeros(3)), np.eye(3))


@pytest.mark.parametrize(
    ("name", "value"), [("statistics.variance", -1), ("statistics.features", 2e6)]
)
def test_reply_with_impossible_statistics_is_rejected(name, value):
    result = run("fedpac", 1, **TASK)
    _, reply = result.between("train")[0]
    strategy = result.strategy
    strategy.check_reply(seen(reply))
    like = reply.content["arrays"][name].numpy()
    reply.content["arrays"][name] = Array(np.full_like(like, value))
    with pytest.raises(InvalidReplyError):
        strategy.check_reply(seen(reply))


def test_schedule_changes_both_learning_rates():
    common = {"learning_rate": 0.1, "learning_rate_schedule": "step"}
    common |= {"num_server_rounds": 2}
    for rate, expected in ((0.0, 0.1), (0.4, 0.04)):
        more = {**common, "fedpac_head_learning_rate": rate}
        client = run("fedpac", 0, **more, **TASK).client(0, 1, trains=True)
        rate = client.settings.learning_rate
        assert rate == pytest.approx(0.01)
        assert client.head_ratio * rate == pytest.approx(expected)


def test_newcomer_trains_its_head_with_the_learning_rate_of_heads():
    client = run("fedpac", 1, newcomer_epochs=3, **TASK).client(0, 1)
    client.model.load(client.task.initial_state)
    client.personalize()
    a, w = start()
    for _ in range(3):
        w = w - 10 * RATE * gradients(a, w, 0)[1]
    arrays = {n: value.numpy() for n, value in client.model.state_dict().items()}
    for found, expected in zip(parts(arrays), (a, w), strict=True):
        assert_near(found, expected, 1e-5)
