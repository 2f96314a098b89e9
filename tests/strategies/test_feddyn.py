"""FedDyn compared with a NumPy implementation of server and clients."""

import numpy as np
import pytest
from function_clients import grid_of, honest
from softmax_runs import (
    RATE,
    STEPS,
    N,
    assert_near,
    gradient,
    loss_of,
    matrix,
    run,
    start,
)

from flwr_frl.common.settings import SettingsError
from flwr_frl.strategies import FedDyn

ALPHA = 0.3


def trained(theta, own, i):
    w = theta
    for _ in range(STEPS):
        w = w - RATE * (gradient(w, i) - own + ALPHA * (w - theta))
    return w


def numpy_feddyn(rounds, lost=(0, 0)):
    """Run Algorithm 1 with the clients that trained; return (θ, h, all λ_k) by round.

    ``lost`` is the (round, client) in which λ_k is lost; then h and all λ_k become 0.
    """
    theta = start()
    h, gradients, states = np.zeros_like(theta), [np.zeros_like(theta)] * N, []
    for number, clients in enumerate(rounds, 1):
        if number == lost[0]:
            gradients = [g * (i != lost[1]) for i, g in enumerate(gradients)]
        models = {i: trained(theta, gradients[i], i) for i in clients}
        gradients = [
            gradients[i] - ALPHA * (models[i] - theta) if i in models else gradients[i]
            for i in range(N)
        ]
        h = h - ALPHA / N * sum(model - theta for model in models.values())
        if number == lost[0]:
            h, gradients = np.zeros_like(h), [np.zeros_like(h)] * N
        theta = np.mean(list(models.values()), axis=0) - h / ALPHA
        states.append((theta, h, gradients))
    return states


def assert_all_near(found, expected):
    for arrays, kept, (theta, _, gradients) in zip(
        found.arrays, found.kept, expected, strict=True
    ):
        assert_near(matrix(arrays), theta, 2e-6)
        for state, gradient_of in zip(kept, gradients, strict=True):
            if state:
                assert_near(matrix(state, "gradient."), gradient_of, 2e-6)
            else:
                assert not gradient_of.any()
    assert_near(matrix(found.strategy.gradient), expected[-1][1], 2e-6)


def test_every_round_matches_the_paper():
    result = run("feddyn", 5, evaluate=True, feddyn_alpha=ALPHA)
    assert [len(clients) for clients in result.trained] == [3] * 5
    expected = numpy_feddyn(result.trained)
    assert_all_near(result, expected)
    for i, metrics in enumerate(result.metrics[-1]):
        loss = loss_of(expected[-1][0], i)
        assert metrics["loss"] == pytest.approx(loss, abs=1e-5)


def test_h_is_the_mean_gradient_of_all_clients():
    more = {"batch_size": 4, "momentum": 0.5, "weight_decay": 1e-3}
    result = run("feddyn", 6, feddyn_alpha=0.1, **more)
    assert len({i for clients in result.trained for i in clients}) == N
    gradients = [matrix(state, "gradient.") for state in result.kept[-1]]
    h = matrix(result.strategy.gradient)
    assert_near(h, np.mean(gradients, axis=0), 1e-6)
    assert np.abs(h).max() > 1e-3


def test_first_round_moves_by_the_mean_change_plus_its_share():
    # With h = 0, θ moves by the mean change, and through −h/α by |P|/m of it again.
    dyn = run("feddyn", 1, feddyn_alpha=ALPHA)
    prox = run("fedprox", 1, proximal_mu=ALPHA)
    moved, mean = (matrix(result.arrays[0]) - start() for result in (dyn, prox))
    assert_near(moved, 1.5 * mean, 1e-6)


def test_rejected_reply_has_no_effect():
    first = run("feddyn", 5, feddyn_alpha=ALPHA)
    i = next(i for i in first.trained[1] if i in first.trained[0])
    result = run("feddyn", 5, feddyn_alpha=ALPHA, spoilt={(i, 2)})
    assert i not in result.trained[1]
    assert_all_near(result, numpy_feddyn(result.trained))


def test_lost_gradient_resets_the_gradients_of_all_clients(caplog):
    first = run("feddyn", 5, feddyn_alpha=ALPHA)
    i = next(i for i in first.trained[2] if i in first.trained[0] + first.trained[1])
    result = run("feddyn", 5, feddyn_alpha=ALPHA, lost={(i, 3)})
    assert f"client {i:06d} lacks the one in h" in caplog.text
    for now, (theta, _, _) in enumerate(numpy_feddyn(result.trained, (3, i))):
        assert_near(matrix(result.arrays[now]), theta, 2e-6)


@pytest.mark.parametrize(
    ("setting", "value"), [("feddyn_alpha", 0.0), ("weighting", "examples")]
)
def test_invalid_value_is_rejected(setting, value):
    with pytest.raises(SettingsError) as error:
        FedDyn(**{setting: value})
    assert error.value.code == setting.replace("_", "-")


def test_checkpoint_restores_the_state():
    strategy = FedDyn()
    strategy._identify(grid_of(3, honest))
    strategy.state["gradients"] = {"w": np.ones(2)}
    again = FedDyn()
    again._restore(strategy._snapshot()())
    assert again.state["seen"] == ["000000", "000001", "000002"]
    np.testing.assert_allclose(again.gradient["w"], [1 / 3, 1 / 3])
