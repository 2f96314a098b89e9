"""SCAFFOLD compared with a NumPy implementation of server and clients."""

import numpy as np
import pytest
from paper_rounds import VARIANTS, run_variant
from softmax_runs import (
    RATE,
    STEPS,
    N,
    assert_near,
    gradient,
    matrix,
    normed,
    run,
    start,
)

EVERYBODY = list(range(N))


def numpy_scaffold(found, lost=(0, 0)):
    """Run Algorithm 1 with the clients that trained; return (x, c, all c_i) by round.

    c_i⁺ is the mean of the round's gradients, which equals option II. With momentum,
    the gradient of step t also moves y in later steps, by β, β², ... ``lost`` is the
    (round, client) in which c_i is lost; then c and all c_i become 0.
    """
    x, rounds, momentum = start(), [], found["momentum"]
    c, variates = np.zeros_like(x), [np.zeros_like(x)] * N
    for clients in found.trained:
        moves, changes, variates = [], [], list(variates)
        if len(rounds) + 1 == lost[0]:
            variates[lost[1]] = np.zeros_like(c)
        for i in clients:
            y, velocity, gradients, heed = x, 0.0, [], []
            for t in range(STEPS):
                gradients.append(gradient(y, i, found["weight_decay"]))
                heed.append(sum(momentum**later for later in range(STEPS - t)))
                velocity = momentum * velocity + gradients[-1] - variates[i] + c
                y = y - RATE * velocity
            new = np.average(gradients, axis=0, weights=heed)
            moves.append(y - x)
            changes.append(new - variates[i])
            variates[i] = new
        x = x + found["global_learning_rate"] * found.mean(moves, clients)
        c = c + len(clients) / N * found.mean(changes, clients)
        if len(rounds) + 1 == lost[0]:
            c, variates = np.zeros_like(c), [np.zeros_like(c)] * N
        rounds.append((x, c, variates))
    return rounds


def assert_all_near(found, expected):
    for arrays, kept, (x, c, variates) in zip(
        found.arrays, found.kept, expected, strict=True
    ):
        assert_near(matrix(arrays), x)
        assert_near(matrix(arrays, "control."), c)
        for state, c_i in zip(kept, variates, strict=True):
            assert_near(matrix(state, "own-control.") if state else 0 * c_i, c_i)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"global_learning_rate": 0.4},
        {"global_learning_rate": 1.7, **VARIANTS["momentum"]},
        VARIANTS["srpfl"],
    ],
    ids=["plain", "global rate", "momentum", "srpfl"],
)
def test_every_round_matches_the_paper(more):
    result = run_variant("scaffold", **more)
    assert_all_near(result, numpy_scaffold(result))
    # The corrections have an effect.
    plain = run("fedavg", **more)
    assert np.abs(matrix(result.arrays[-1]) - matrix(plain.arrays[-1])).max() > 1e-2


@pytest.mark.parametrize("late", [(), (0, 4)])
def test_c_remains_the_mean_of_all_c_i(late):
    # The c_i of latecomers are 0 until they train.
    result = run("scaffold", 6, late=late, spoilt={(1, 2), (3, 5)})
    assert not set(late) & {i for clients in result.trained[:2] for i in clients}
    for server_round, (arrays, kept) in enumerate(
        zip(result.arrays, result.kept, strict=True), 1
    ):
        here = [i for i in EVERYBODY if server_round > 2 or i not in late]
        parts = [matrix(kept[i], "own-control.") for i in here if kept[i]]
        expected = np.sum(parts, axis=0) / len(here)
        assert_near(matrix(arrays, "control."), expected, 1e-6)
    assert result.trained[-1]


def test_batch_norm_statistics_are_averaged_for_any_global_rate():
    # A step of 3 times the change of a variance could make it negative.
    usual = {"task": "softmax_runs:normed", "learning_rate": 0.01}
    result = run("scaffold", 1, global_learning_rate=3.0, **usual)
    plain = run("fedavg", 1, **usual)
    arrays, others = result.arrays[0], plain.arrays[0]
    for statistic in ("running_mean", "running_var", "num_batches_tracked"):
        name = f"representation.1.{statistic}"
        assert f"control.{name}" not in arrays
        np.testing.assert_allclose(arrays[name], others[name], atol=1e-6)
    # Parameters take the full global step.
    initial = {n: t.numpy() for n, t in normed(N).initial_state.items()}
    for name in ("head.weight", "representation.0.weight"):
        moved = arrays[name] - initial[name]
        assert_near(moved, 3 * (others[name] - initial[name]), 1e-6)
        assert np.abs(moved).max() > 1e-3


def test_lost_c_i_resets_all_control_variates(caplog):
    trained = run("scaffold", 7).trained
    # The client has trained before, and loses its state in round 4.
    forgetful = next(i for i in trained[3] if any(i in early for early in trained[:3]))
    result = run("scaffold", 7, lost={(forgetful, 4)})
    assert result.trained == trained
    expected = numpy_scaffold(result, lost=(4, forgetful))
    for arrays, (x, c, _) in zip(result.arrays, expected, strict=True):
        assert_near(matrix(arrays), x)
        assert_near(matrix(arrays, "control."), c)
    assert not matrix(result.arrays[3], "control.").any()
    anew = [r.message for r in caplog.records if "begins anew" in r.message]
    assert len(anew) == 1
    assert f"client {forgetful:06d}" in anew[0]


def test_c_does_not_grow_if_clients_lose_their_state_repeatedly():
    forgetful = {(i, r) for i in EVERYBODY for r in range(2, 5)}
    result = run("scaffold", fraction_train=1.0, lost=forgetful)
    controls = [matrix(arrays, "control.") for arrays in result.arrays]
    # A loss right after a reset has no effect.
    assert [control.any() for control in controls] == [True, False, True, False]
    variates = [matrix(state, "own-control.") for state in result.kept[2]]
    assert_near(controls[2], np.mean(variates, axis=0))


def test_double_precision_models_are_supported():
    result = run("scaffold", 2, task="softmax_runs:doubles")
    assert [row["rejected"] for row in result.rows] == [0, 0]
    assert {array.dtype for array in result.arrays[-1].values()} == {np.dtype("f8")}
    assert_all_near(result, numpy_scaffold(result))
