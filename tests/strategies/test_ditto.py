"""Ditto against a few lines of NumPy, server and clients."""

import numpy as np
import pytest
from softmax_runs import (
    RATE,
    STEPS,
    N,
    assert_near,
    assert_same,
    gradient,
    loss_of,
    matrix,
    mean,
    run,
    start,
    weights,
)

PERSONAL_STEPS = 2


def descend(theta, i, steps, momentum, decay, pull=0.0, anchor=0.0):
    velocity = 0.0
    for _ in range(steps):
        slope = gradient(theta, i, decay) + pull * (theta - anchor)
        velocity = momentum * velocity + slope
        theta = theta - RATE * velocity
    return theta


def numpy_ditto(trained, pull, momentum=0.0, decay=0.0, weighting="uniform"):
    """Algorithm 1 over the clients that counted; w and all v_k after each round."""
    w, found = start(), []
    personal = [w] * N
    for clients in trained:
        models = [descend(w, i, STEPS, momentum, decay) for i in clients]
        for i in clients:
            steps = PERSONAL_STEPS, momentum, decay
            v = descend(personal[i], i, *steps, pull, w)
            personal = [v if j == i else personal[j] for j in range(N)]
        w = mean(models, weights(clients, weighting))
        found.append((w, personal))
    return found


def assert_all_near(found, expected):
    rounds = zip(found.arrays, found.kept, expected, strict=True)
    for arrays, kept, (w, personal) in rounds:
        assert_near(matrix(arrays), w)
        for state, v in zip(kept, personal, strict=True):
            assert_near(matrix(state, "model.") if state else start(), v)


@pytest.mark.parametrize(
    "more",
    [
        {"ditto_lambda": 0.7},
        {"ditto_lambda": 1.2, "momentum": 0.6, "weight_decay": 0.05},
        {"ditto_lambda": 0.7, "weighting": "examples"},
    ],
    ids=["plain", "momentum", "examples"],
)
@pytest.mark.parametrize("srpfl", [False, True])
def test_every_round_is_that_of_the_paper(more, srpfl):
    found = run("ditto", srpfl=srpfl, personal_epochs=PERSONAL_STEPS, **more)
    assert [len(c) for c in found.trained] == ([1, 1, 2, 2] if srpfl else [3] * 4)
    expected = numpy_ditto(
        found.trained,
        more["ditto_lambda"],
        more.get("momentum", 0.0),
        more.get("weight_decay", 0.0),
        more.get("weighting", "uniform"),
    )
    assert_all_near(found, expected)
    # The pull to w is felt.
    i = found.trained[-1][0]
    alone = numpy_ditto(found.trained, 0.0)[-1][1][i]
    assert np.abs(matrix(found.kept[-1][i], "model.") - alone).max() > 1e-2


def test_a_reply_that_does_not_count_moves_neither_w_nor_v():
    # A client of round 2 that trains in round 3 as well.
    first = run("ditto", 3)
    lost = next(i for i in first.trained[1] if i in first.trained[2])
    more = {"ditto_lambda": 0.7, "personal_epochs": PERSONAL_STEPS}
    found = run("ditto", 5, spoilt={(lost, 2)}, **more)
    assert lost not in found.trained[1]
    assert_all_near(found, numpy_ditto(found.trained, 0.7))


def test_the_global_model_is_fedavg_s_to_the_last_bit():
    # Small batches in random order, momentum and decay; λ does not matter.
    usual = {"batch_size": 4, "momentum": 0.5, "weight_decay": 1e-3}
    plain = run("fedavg", **usual)
    for pull in (0.0, 2.0):
        found = run("ditto", ditto_lambda=pull, **usual)
        for arrays, others in zip(found.arrays, plain.arrays, strict=True):
            assert_same(arrays, others)


def test_lambda_0_is_local_training():
    usual = {"momentum": 0.5, "weight_decay": 1e-3}
    found = run("ditto", ditto_lambda=0.0, personal_epochs=STEPS, **usual)
    alone = run("local", **usual)
    assert found.trained == alone.trained
    for i in {i for clients in found.trained for i in clients}:
        v, own = found.kept[-1][i], alone.kept[-1][i]
        assert_near(matrix(v, "model."), matrix(own), 1e-6)


def test_a_step_with_rate_times_lambda_1_by_hand():
    # v − η (∇F(v) + λ (v − w)) = w − η ∇F(v): a step from w, however far v was.
    found = run("ditto", 3, ditto_lambda=1 / RATE)
    for i in found.trained[2]:
        before = found.kept[1][i]
        v = matrix(before, "model.") if before else start()
        expected = matrix(found.arrays[1]) - RATE * gradient(v, i)
        assert_near(matrix(found.kept[2][i], "model."), expected)


def test_a_larger_lambda_keeps_nearer_to_w():
    distances = []
    for pull in (0.0, 0.5, 3.0):
        found = run("ditto", ditto_lambda=pull, personal_epochs=20)
        distances.append(
            np.mean(
                [
                    np.abs(
                        matrix(found.kept[-1][i], "model.") - matrix(found.arrays[2])
                    )
                    for i in found.trained[-1]
                ]
            )
        )
    assert distances[1] < distances[0] / 1.5
    assert distances[2] < distances[1] / 1.5


def test_no_personal_epochs_keep_the_initial_model():
    found = run("ditto", 2, personal_epochs=0)
    for i in found.trained[-1]:
        assert_near(matrix(found.kept[-1][i], "model."), start(), 1e-7)


def test_clients_are_tested_with_v_beside_w():
    found = run("ditto", 3, evaluate=True, ditto_lambda=0.7, personal_epochs=2)
    w, personal = numpy_ditto(found.trained, 0.7)[-1]
    for i, metrics in enumerate(found.metrics[-1]):
        # A client that never trained has the initial model.
        assert metrics["loss"] == pytest.approx(loss_of(personal[i], i), abs=1e-5)
        assert metrics["loss"] != pytest.approx(loss_of(w, i), abs=1e-3)


def test_the_accuracy_of_w_is_fedavg_s():
    found, plain = run("ditto", evaluate=True), run("fedavg", evaluate=True)
    for metrics, others in zip(found.metrics, plain.metrics, strict=True):
        told = [m["accuracy-global"] for m in metrics]
        assert told == [m["accuracy"] for m in others]
        assert told != [m["accuracy"] for m in metrics]


def test_v_does_not_leave():
    found = run("ditto", 3)
    for message, reply in found.between("train"):
        assert list(message.content["arrays"]) == ["head.weight", "head.bias"]
        assert list(reply.content["arrays"]) == ["head.weight", "head.bias"]
        assert set(reply.content) == {"arrays", "metrics"}
