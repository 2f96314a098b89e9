"""pFedMe against a few lines of NumPy, server and clients."""

import json

import numpy as np
import pytest
from softmax_runs import (
    RATE,
    STEPS,
    N,
    assert_near,
    gradient,
    loss_of,
    matrix,
    mean,
    run,
    start,
    weights,
)

from flwr_frl import cli

K = 4
PLAIN = {"pfedme_lambda": 2.0, "pfedme_eta": 0.1, "pfedme_steps": K}


def numpy_pfedme(
    trained,
    pull=2.0,
    eta=0.1,
    steps=K,
    beta=1.0,
    momentum=0.0,
    decay=0.0,
    weighting="uniform",
):
    """Algorithm 1 over the clients that counted; w and all θ_i after each round."""
    w, found = start(), []
    personal = [w] * N
    for clients in trained:
        models = []
        for i in clients:
            own = theta = w
            for _ in range(STEPS):
                velocity = 0.0
                for _ in range(steps):
                    slope = gradient(theta, i, decay) + pull * (theta - own)
                    velocity = momentum * velocity + slope
                    theta = theta - RATE * velocity
                own = own - eta * pull * (own - theta)
            models.append(own)
            personal = [theta if j == i else personal[j] for j in range(N)]
        w = (1 - beta) * w + beta * mean(models, weights(clients, weighting))
        found.append((w, personal))
    return found


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"momentum": 0.6, "decay": 0.05},
        {"beta": 1.7, "weighting": "examples"},
    ],
    ids=["plain", "momentum", "beta"],
)
@pytest.mark.parametrize("srpfl", [False, True])
def test_every_round_is_that_of_the_paper(more, srpfl):
    names = {"beta": "pfedme_beta", "decay": "weight_decay"}
    given = {names.get(name, name): value for name, value in more.items()}
    found = run("pfedme", evaluate=True, srpfl=srpfl, **PLAIN, **given)
    assert [len(c) for c in found.trained] == ([1, 1, 2, 2] if srpfl else [3] * 4)
    expected = numpy_pfedme(found.trained, **more)
    for now, (w, personal) in enumerate(expected):
        assert_near(matrix(found.arrays[now]), w)
        for i, theta in enumerate(personal):
            kept, metrics = found.kept[now][i], found.metrics[now][i]
            assert_near(matrix(kept, "model.") if kept else start(), theta)
            assert metrics["loss"] == pytest.approx(loss_of(theta, i), abs=1e-5)


def test_one_step_with_eta_lambda_1_is_fedavg():
    # θ is a gradient step from w, at which the pull is 0, and w goes all the way to it.
    found = run("pfedme", pfedme_steps=1, pfedme_lambda=4.0, pfedme_eta=0.25)
    plain = run("fedavg")
    for arrays, others in zip(found.arrays, plain.arrays, strict=True):
        assert_near(matrix(arrays), matrix(others), 1e-6)


def test_many_steps_find_the_gradient_of_the_moreau_envelope():
    # Then θ is the minimum of f + λ/2 ‖· − w‖²: its gradient is 0 there, and the step
    # of w is η ∇f(θ).
    more = {"pfedme_steps": 40, "representation_epochs": 1}
    found = run("pfedme", 1, pfedme_lambda=2.0, pfedme_eta=0.1, **more)
    steps = []
    for i in found.trained[0]:
        theta = matrix(found.kept[0][i], "model.")
        assert_near(gradient(theta, i) + 2.0 * (theta - start()), 0 * theta)
        steps.append(0.1 * gradient(theta, i))
    assert_near(matrix(found.arrays[0]), start() - np.mean(steps, axis=0))


def test_a_larger_lambda_keeps_nearer_to_w():
    distances = []
    more = {"pfedme_eta": 0.01, "pfedme_steps": 10, "representation_epochs": 1}
    for pull in (0.1, 1.0, 5.0):
        found = run("pfedme", 2, pfedme_lambda=pull, **more)
        own = [matrix(found.kept[1][i], "model.") for i in found.trained[1]]
        distances.append(np.abs(np.array(own) - matrix(found.arrays[0])).mean())
    assert distances[1] < distances[0] / 1.5
    assert distances[2] < distances[1] / 1.5


def test_statistics_of_a_batch_norm_are_averaged_whatever_beta_is():
    # With β = 3 an extrapolated variance would be negative.
    more = {"task": "softmax_runs:scaled", **PLAIN}
    found, plain = (run("pfedme", 1, pfedme_beta=b, **more) for b in (3.0, 1.0))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        name = f"representation.{name}"
        models = [found.kept[0][i] for i in found.trained[0]]
        own = [np.asarray(kept[f"model.{name}"], float) for kept in models]
        np.testing.assert_allclose(found.arrays[0][name], np.mean(own, 0), atol=1e-6)
        np.testing.assert_allclose(found.arrays[0][name], plain.arrays[0][name])
    assert found.arrays[0]["representation.num_batches_tracked"] == STEPS * K


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("pfedme-lambda", 0.0, "above 0"),
        ("pfedme-lambda", -1.0, "above 0"),
        ("pfedme-eta", 0.0, "above 0"),
        ("pfedme-beta", -1.0, "above 0"),
        ("pfedme-beta", float("nan"), "above 0 and finite"),
        ("pfedme-steps", 0, "at least 1"),
    ],
)
def test_a_bad_value_is_one_line(name, value, allowed, tmp_path, capsys):
    file = tmp_path / "settings.toml"
    file.write_text(f"{name} = {json.dumps(value)}\n".replace("NaN", "nan"))
    given = ["pfedme", "--backend", "inline", "--run-config", str(file)]
    assert cli.main(given) == 2
    line = f"error: {name} is {value}; expected {allowed}\n"
    assert capsys.readouterr().err == line
