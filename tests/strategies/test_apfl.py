"""APFL against a few lines of NumPy, server and clients."""

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


def numpy_apfl(
    trained, alpha, adaptive=True, momentum=0.0, decay=0.0, weighting="uniform"
):
    """Algorithm 1 over the clients that counted; w, all v_i and α_i after each round.

    v̄ = α v + (1 − α) w; ∇_v f(v̄) = α ∇f(v̄); ∂f(v̄)/∂α = ⟨v − w, ∇f(v̄)⟩.
    """
    w, found = start(), []
    personal, alphas = [w] * N, [alpha] * N
    for clients in trained:
        models = []
        for i in clients:
            own, v, a = w, personal[i], alphas[i]
            velocity_w = velocity_v = 0.0
            for t in range(STEPS):
                slope = gradient(a * v + (1 - a) * own, i)
                decay_v = gradient(v, i, decay) - gradient(v, i)
                velocity_w = momentum * velocity_w + gradient(own, i, decay)
                velocity_v = momentum * velocity_v + a * slope + decay_v
                if adaptive and t == 0:
                    a = float(np.clip(a - RATE * np.sum((v - own) * slope), 0, 1))
                own, v = own - RATE * velocity_w, v - RATE * velocity_v
            models.append(own)
            personal = [v if j == i else personal[j] for j in range(N)]
            alphas = [a if j == i else alphas[j] for j in range(N)]
        w = mean(models, weights(clients, weighting))
        found.append((w, personal, alphas))
    return found


def alpha_of(state, initial):
    return float(state["alpha.value"][0]) if state else initial


def assert_all_near(found, expected, alpha):
    rounds = zip(found.arrays, found.kept, expected, strict=True)
    for arrays, kept, (w, personal, alphas) in rounds:
        assert_near(matrix(arrays), w)
        for state, v, a in zip(kept, personal, alphas, strict=True):
            assert_near(matrix(state, "model.") if state else start(), v)
            assert alpha_of(state, alpha) == pytest.approx(a, abs=1e-5)


@pytest.mark.parametrize(
    "more",
    [
        {"apfl_alpha": 0.5},
        {"apfl_alpha": 0.3, "momentum": 0.6, "weight_decay": 0.05},
        {"apfl_alpha": 0.8, "weighting": "examples"},
        {"apfl_alpha": 0.4, "apfl_adaptive": False},
    ],
    ids=["plain", "momentum", "examples", "fixed"],
)
@pytest.mark.parametrize("srpfl", [False, True])
def test_every_round_is_that_of_the_paper(more, srpfl):
    found = run("apfl", 5, srpfl=srpfl, **more)
    assert [len(c) for c in found.trained] == ([1, 1, 2, 2, 3] if srpfl else [3] * 5)
    alpha, adaptive = more["apfl_alpha"], more.get("apfl_adaptive", True)
    expected = numpy_apfl(
        found.trained,
        alpha,
        adaptive,
        more.get("momentum", 0.0),
        more.get("weight_decay", 0.0),
        more.get("weighting", "uniform"),
    )
    assert_all_near(found, expected, alpha)
    moved = np.abs(np.array(expected[-1][2]) - alpha).max()
    assert moved > 1e-2 if adaptive else moved == 0


def test_a_reply_that_does_not_count_moves_neither_w_nor_v_nor_alpha():
    # A client of round 2 that trains in round 3 as well.
    first = run("apfl", 3)
    lost = next(i for i in first.trained[1] if i in first.trained[2])
    found = run("apfl", 5, spoilt={(lost, 2)})
    assert lost not in found.trained[1]
    assert_all_near(found, numpy_apfl(found.trained, 0.5), 0.5)


def test_the_global_model_is_fedavg_s_to_the_last_bit():
    # Small batches in random order, momentum and decay; α does not matter.
    usual = {"batch_size": 4, "momentum": 0.5, "weight_decay": 1e-3}
    plain = run("fedavg", **usual)
    for alpha in (0.0, 0.7):
        found = run("apfl", apfl_alpha=alpha, **usual)
        for arrays, others in zip(found.arrays, plain.arrays, strict=True):
            assert_same(arrays, others)


def test_alpha_0_uses_the_global_model():
    own = {"apfl_alpha": 0.0, "apfl_adaptive": False}
    found = run("apfl", evaluate=True, cohort="off", **own)
    plain = run("fedavg", evaluate=True, cohort="off")
    for metrics, others in zip(found.metrics, plain.metrics, strict=True):
        for told, other in zip(metrics, others, strict=True):
            assert told["loss"] == pytest.approx(other["loss"], abs=1e-7)
            assert told["accuracy"] == told["accuracy-global"] == other["accuracy"]
            assert told["alpha"] == 0
    # Nothing has moved v.
    for i in found.trained[-1]:
        assert_near(matrix(found.kept[-1][i], "model."), start(), 1e-7)


def test_alpha_1_is_local_training():
    usual = {"momentum": 0.5, "weight_decay": 1e-3, "evaluate": True}
    found = run("apfl", apfl_alpha=1.0, apfl_adaptive=False, **usual)
    alone = run("local", **usual)
    assert found.trained == alone.trained
    for i in range(N):
        v, own = found.kept[-1][i], alone.kept[-1][i]
        if v:
            assert_near(matrix(v, "model."), matrix(own), 1e-6)
        loss = alone.metrics[-1][i]["loss"]
        assert found.metrics[-1][i]["loss"] == pytest.approx(loss, abs=1e-6)


def second_visit(found):
    """A client, the round of its first visit and that of its second."""
    for i in range(N):
        rounds = [r for r, clients in enumerate(found.trained) if i in clients]
        if len(rounds) > 1 and rounds[1] > rounds[0]:
            return i, rounds[0], rounds[1]
    raise AssertionError("nobody trained twice")


def alpha_gradient(found, i, before, now, alpha):
    """⟨v − w, ∇f(v̄)⟩ at the beginning of a round."""
    w, v = matrix(found.arrays[now - 1]), matrix(found.kept[before][i], "model.")
    return np.sum((v - w) * gradient(alpha * v + (1 - alpha) * w, i))


@pytest.mark.parametrize("epochs", [1, 4])
def test_alpha_moves_by_one_step_a_round(epochs):
    found = run("apfl", apfl_alpha=0.6, representation_epochs=epochs)
    i, first, second = second_visit(found)
    # v is w in the first visit of round 1 only; α is known after the first visit.
    alpha = alpha_of(found.kept[first][i], 0.6)
    slope = alpha_gradient(found, i, first, second, alpha)
    after = alpha_of(found.kept[second][i], 0.6)
    assert after == pytest.approx(alpha - RATE * slope, abs=1e-5)
    assert abs(after - alpha) > 1e-3


def test_the_first_round_leaves_alpha_alone():
    # v = w: the inner product is 0.
    found = run("apfl", 1, apfl_alpha=0.25)
    for i in found.trained[0]:
        assert alpha_of(found.kept[0][i], 0.0) == 0.25


def test_alpha_stays_within_0_and_1():
    found = run("apfl", 6, apfl_alpha=0.5, learning_rate=40.0)
    alphas = [alpha_of(state, 0.5) for kept in found.kept for state in kept if state]
    assert min(alphas) == 0
    assert max(alphas) == 1


def test_clients_are_tested_with_the_mixture():
    found = run("apfl", 3, evaluate=True)
    w, personal, alphas = numpy_apfl(found.trained, 0.5)[-1]
    for i, metrics in enumerate(found.metrics[-1]):
        # A client that never trained mixes the initial model with w.
        mixed = alphas[i] * personal[i] + (1 - alphas[i]) * w
        assert metrics["loss"] == pytest.approx(loss_of(mixed, i), abs=1e-5)
        assert metrics["loss"] != pytest.approx(loss_of(w, i), abs=1e-3)
        assert metrics["alpha"] == pytest.approx(alphas[i], abs=1e-5)
    mean_alpha = np.mean(alphas)
    assert found.rows[-1]["alpha"] == pytest.approx(mean_alpha, abs=1e-5)


def test_v_and_alpha_do_not_leave_with_a_training_reply():
    found = run("apfl", 3)
    for message, reply in found.between("train"):
        assert list(message.content["arrays"]) == ["head.weight", "head.bias"]
        assert list(reply.content["arrays"]) == ["head.weight", "head.bias"]
        assert set(reply.content) == {"arrays", "metrics"}
        told = {"train-loss", "num-examples", "server-round"}
        assert set(reply.content["metrics"]) == told
