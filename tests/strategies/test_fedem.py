"""FedEM compared with a NumPy implementation of server and clients."""

import numpy as np
import pytest
from refusals import code_of
from softmax_runs import (
    CLASSES,
    RATE,
    STEPS,
    N,
    assert_near,
    draw,
    linear,
    matrix,
    run,
    scores_of,
    shares_of,
    task_of,
)
from torch import nn

from flwr_frl.clients.fedem import needs_cross_entropy
from flwr_frl.clients.ifca import initial_models

M = 3


def components(arrays) -> np.ndarray:
    """Return θ = [W | b] of all components, of shape (M, CLASSES, DIMENSION + 1)."""
    weight, bias = (arrays[f"components.head.{name}"] for name in ("weight", "bias"))
    return np.concatenate([weight, bias[..., None]], axis=2).astype(float)


def likelihoods(thetas, i: int) -> np.ndarray:
    """Return p_m(y | x) of client i's training examples, of shape (M, n)."""
    y = draw(i)[1]
    return np.stack([shares_of(scores_of(t, i))[np.arange(len(y)), y] for t in thetas])


def assigned(weights, thetas, i: int) -> np.ndarray:
    joint = weights[:, None] * likelihoods(thetas, i)
    return joint / joint.sum(0)


def mixture_loss(weights, thetas, i: int) -> float:
    """Return the mixture's loss on client i's test examples."""
    x, y = draw(i, test=True)
    inputs = np.column_stack([x, np.ones(len(x))])
    mixed = sum(
        w * shares_of(inputs @ t.T) for w, t in zip(weights, thetas, strict=True)
    )
    return float(-np.log(mixed[np.arange(len(y)), y]).mean())


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_every_round_matches_the_paper(weighting):
    result = run("fedem", 5, evaluate=True, fedem_components=M, weighting=weighting)
    stacked = initial_models(result.client(0, 1).task, M)
    thetas = components({f"components.{n}": t.numpy() for n, t in stacked.items()})
    pi = np.full((N, M), 1 / M)
    for now, clients in enumerate(result.trained):
        new = {}
        for i in clients:
            x, y = draw(i)
            inputs, q = (
                np.column_stack([x, np.ones(len(x))]),
                assigned(pi[i], thetas, i),
            )
            pi[i], new[i] = q.mean(1), thetas.copy()
            for m in range(M):
                for _ in range(STEPS):
                    errors = shares_of(scores_of(new[i][m], i)) - np.eye(CLASSES)[y]
                    slope = (q[m][:, None] * errors).T @ inputs / len(y)
                    new[i][m] = new[i][m] - RATE * slope
        thetas = result.mean(list(new.values()), clients)
        assert_near(components(result.arrays[now]), thetas)
        for i in range(N):
            kept = result.kept[now][i].get("mixture.weights", np.full(M, 1 / M))
            assert_near(kept, pi[i])
            loss = result.metrics[now][i]["loss"]
            assert loss == pytest.approx(mixture_loss(pi[i], thetas, i), abs=1e-5)
    assert pi.std(0).max() > 0.05


def test_one_component_is_fedavg():
    one, other = (
        run(name, 3, evaluate=True, momentum=0.5, **more)
        for name, more in (("fedem", {"fedem_components": 1}), ("fedavg", {}))
    )
    assert_near(components(one.arrays[-1])[0], matrix(other.arrays[-1]), 1e-6)
    assert one.rows[-1]["train-loss"] == pytest.approx(other.rows[-1]["train-loss"])
    for found, expected in zip(one.metrics[-1], other.metrics[-1], strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        assert found["accuracy"] == expected["accuracy"]


def test_newcomer_fits_the_weights_only():
    result = run("fedem", 2, fedem_components=M, newcomer_epochs=4)
    client = result.client(4, 2)
    client._receive([*result.arrays[-1].values()], client.config)
    client.saved["mixture.weights"] = client.initial_group("mixture.")["weights"]
    client.personalize()
    thetas, weights = components(result.arrays[-1]), np.full(M, 1 / M)
    for _ in range(4):
        weights = assigned(weights, thetas, 4).mean(1)
    assert_near(client.saved["mixture.weights"].numpy(), weights)


def test_another_loss_than_cross_entropy_is_refused():
    task = task_of(linear, loss=nn.CrossEntropyLoss(label_smoothing=0.1))
    assert code_of(needs_cross_entropy, task) == "loss"
