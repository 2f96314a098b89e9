"""Mime and MimeLite compared with a NumPy implementation of server and clients."""

import numpy as np
import pytest
import torch
from softmax_runs import (
    DIMENSION,
    RATE,
    STEPS,
    N,
    assert_near,
    gradient,
    linear,
    matrix,
    run,
    start,
)

from flwr_frl.common.errors import SettingsError
from flwr_frl.task import ExampleSet, ExampleTask

BETA = 0.6


def numpy_mime(found, algorithm, steps=STEPS):
    """Return (x, m) by round, computed with the clients that trained."""
    x, m, rounds = start(), 0 * start(), []
    decay = found["weight_decay"]
    for clients in found.trained:
        models, at_x = [], {i: gradient(x, i, decay) for i in clients}
        c = found.mean([*at_x.values()], clients)
        for i in clients:
            y = x
            for _ in range(steps):
                g = gradient(y, i, decay)
                if algorithm == "mime":
                    g = g - at_x[i] + c
                y = y - RATE * ((1 - BETA) * g + BETA * m)
            models.append(y)
        x, m = found.mean(models, clients), (1 - BETA) * c + BETA * m
        rounds.append((x, m))
    return rounds


@pytest.mark.parametrize("algorithm", ["mime", "mimelite"])
@pytest.mark.parametrize(
    "more", [{}, {"weighting": "examples", "weight_decay": 0.1}], ids=str
)
def test_every_round_matches_the_paper(algorithm, more):
    result = run(algorithm, momentum=BETA, **more)
    for arrays, (x, m) in zip(
        result.arrays, numpy_mime(result, algorithm), strict=True
    ):
        assert_near(matrix(arrays), x)
        assert_near(matrix(arrays, "momentum."), m)


@pytest.mark.parametrize("algorithm", ["mime", "mimelite"])
def test_one_step_of_all_clients_is_centralized_sgd_with_momentum(algorithm):
    more = {"representation_epochs": 1, "fraction_train": 1.0, "momentum": BETA}
    x, m = start(), 0.0
    for arrays in run(algorithm, **more).arrays:
        slope = (1 - BETA) * np.mean([gradient(x, i) for i in range(N)], axis=0)
        x, m = x - RATE * (slope + BETA * m), slope + BETA * m
        assert_near(matrix(arrays), x)


def test_mimelite_without_momentum_is_fedavg():
    found, other = (run(name, batch_size=4) for name in ("mimelite", "fedavg"))
    for arrays, expected in zip(found.arrays, other.arrays, strict=True):
        assert_near(matrix(arrays), matrix(expected), 1e-7)


def slopes(num_clients):
    """A task whose losses are linear in θ, with another gradient in each batch."""
    generator = torch.Generator().manual_seed(3)
    sets = [
        ExampleSet(*torch.randn(2, 12, DIMENSION, generator=generator))
        for _ in range(num_clients)
    ]
    return ExampleTask(
        linear, sets, sets, lambda out, y: (out * y[:, :3]).sum(1).mean()
    )


def test_correction_removes_the_noise_of_batches():
    more = {"task": f"{__name__}:slopes", "momentum": BETA, "batch_size": 5}
    result, x, m = run("mime", **more), start(), 0.0
    sets = slopes(N)
    for clients, arrays in zip(result.trained, result.arrays, strict=True):
        gradients = []
        for i in clients:
            examples = sets.train_examples(i)
            inputs, targets = examples.inputs.numpy(), examples.targets.numpy()[:, :3]
            inputs = np.column_stack([inputs, np.ones(len(inputs))])
            gradients.append(targets.T @ inputs / len(inputs))
        c = np.mean(gradients, axis=0)
        # Three steps an epoch, all with the same direction
        x = x - RATE * 3 * STEPS * ((1 - BETA) * c + BETA * m)
        m = (1 - BETA) * c + BETA * m
        assert_near(matrix(arrays), x)


def nothing_sent(*arguments):
    raise SettingsError("no client has sent its gradient")


@pytest.mark.parametrize("answer", [nothing_sent, lambda *_: np.ones(3, np.float32)])
def test_round_without_gradients_uses_the_last_ones(answer, monkeypatch, caplog):
    monkeypatch.setattr("flwr_frl.strategies.mime.mean_statistic", answer)
    arrays = run("mime", 2, momentum=BETA).arrays[-1]
    assert "the last gradient is used again" in caplog.text
    # It is 0 at first.
    assert not arrays["control.gradient"].any()
    assert not matrix(arrays, "momentum.").any()
