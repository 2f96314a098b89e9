"""FedNova compared with a NumPy implementation of server and clients."""

import numpy as np
import pytest
import torch
from flwr.app import Message, MessageType
from function_clients import grid_of, honest, reply_with, train_once
from softmax_runs import STEPS, assert_near, linear, matrix, run, start

from flwr_frl.strategies import FedNova
from flwr_frl.task import ExampleSet, ExampleTask

INPUTS, TARGETS = np.array([1.0, 2.0, -1.0, 0.5]), np.array([0.1, -0.2, 0.3])
BATCH = 4


def slope(num_clients):
    """A task with losses linear in θ; client i's gradient is g_i for any batch."""

    def examples(i):
        x, y = torch.tensor(INPUTS + i).float(), torch.tensor(TARGETS).float()
        return ExampleSet(x.repeat(count(i), 1), y.repeat(count(i), 1))

    sets = [examples(i) for i in range(num_clients)]
    return ExampleTask(linear, sets, sets, lambda out, y: (out * y).sum(1).mean())


def count(i: int) -> int:
    """Return a client's number of examples, of which the last batch has two."""
    return BATCH * i + 2


def gradient(i: int) -> np.ndarray:
    return np.outer(TARGETS, np.append(INPUTS + i, 1))


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_every_round_matches_the_paper(weighting, momentum):
    more = {"weighting": weighting, "momentum": momentum, "batch_size": BATCH}
    result = run("fednova", task=f"{__name__}:slope", learning_rate=0.01, **more)
    x = start()
    for clients, arrays in zip(result.trained, result.arrays, strict=True):
        counts = [count(i) if weighting == "examples" else 1 for i in clients]
        shares = np.array(counts) / sum(counts)
        directions, norms = [], []
        for i in clients:
            y, velocity, of_gradient = x, 0.0, 0.0
            for _ in range(STEPS * (i + 1)):
                velocity = momentum * velocity + gradient(i)
                y = y - 0.01 * velocity
            for t in range(1, STEPS * (i + 1) + 1):
                of_gradient += (1 - momentum**t) / (1 - momentum)
            directions.append((x - y) / of_gradient)
            norms.append(of_gradient)
            assert_near(directions[-1], 0.01 * gradient(i))
        x = x - (shares @ norms) * np.tensordot(shares, directions, 1)
        assert_near(matrix(arrays), x)
    other = run("fedavg", task=f"{__name__}:slope", learning_rate=0.01, **more)
    assert np.abs(matrix(other.arrays[-1]) - x).max() > 0.01


def test_equal_numbers_of_steps_give_fedavg():
    more = {"weighting": "examples", "momentum": 0.5}
    for nova, average in zip(
        run("fednova", **more).arrays, run("fedavg", **more).arrays, strict=True
    ):
        assert_near(matrix(nova), matrix(average), 1e-6)


def test_statistics_of_batch_norms_become_the_mean():
    names = {"w": 1.0, "norm.running_var": 1.0}

    def client(message: Message, context) -> Message:
        if message.metadata.message_type != MessageType.TRAIN:
            return honest(message, context)
        i = int(context.node_config["partition-id"])
        arrays = {name: np.array([1.0 + 3 * i], np.float32) for name in names}
        return reply_with(message, arrays, gradient_weight=1.0 + 2 * i)

    sent = {name: np.array([value], np.float32) for name, value in names.items()}
    new, _ = train_once(FedNova(fraction_train=1.0), grid_of(2, client), sent)
    # The weights are 1 and 1/3; the change 3/4 is scaled by (1 + 3)/2 · (1 + 1/3)/2.
    np.testing.assert_allclose(new["norm.running_var"].numpy(), 1.75)
    np.testing.assert_allclose(new["w"].numpy(), 1 + 0.75 * 4 / 3)


@pytest.mark.parametrize("metrics", [{}, {"gradient_weight": 0.5}])
def test_reply_without_a_valid_number_of_steps_is_rejected(metrics):
    def client(message: Message, context) -> Message:
        if message.metadata.message_type != MessageType.TRAIN:
            return honest(message, context)
        return reply_with(message, message.content["arrays"], **metrics)

    arrays, row = train_once(FedNova(fraction_train=1.0), grid_of(2, client))
    assert arrays is None
    assert row["rejected"] == 2
