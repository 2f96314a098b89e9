"""FedLC compared with a NumPy implementation of server and clients."""

import numpy as np
import pytest
import torch
from softmax_runs import (
    CLASSES,
    RATE,
    STEPS,
    assert_near,
    draw,
    linear,
    matrix,
    run,
    scores_of,
    slope,
    start,
)

from flwr_frl.clients.fedlc import CalibratedHead
from flwr_frl.task import ExampleSet, ExampleTask
from flwr_frl.task.tasks.text import PositionwiseLinear


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_every_round_matches_the_paper(weighting):
    result = run("fedlc", fedlc_tau=2.0, weighting=weighting)
    theta = start()
    for clients, arrays in zip(result.trained, result.arrays, strict=True):
        models = []
        for i in clients:
            w, counts = theta, np.bincount(draw(i)[1], minlength=CLASSES)
            for _ in range(STEPS):
                w = w - RATE * slope(scores_of(w, i) - 2 * counts**-0.25, i)
            models.append(w)
        theta = result.mean(models, clients)
        assert_near(matrix(arrays), theta)
    other = run("fedavg", weighting=weighting)
    assert np.abs(matrix(other.arrays[-1]) - theta).max() > 1e-2


def balanced(num_clients):
    """Clients with 4 examples of each class."""
    inputs = torch.randn(num_clients, 12, 4, generator=torch.Generator().manual_seed(1))
    sets = [ExampleSet(x, torch.arange(12) % 3) for x in inputs]
    return ExampleTask(linear, sets, sets, classes=("a", "b", "c"))


def test_equal_class_counts_give_fedavg():
    task = f"{__name__}:balanced"
    found, other = (run(name, task=task) for name in ("fedlc", "fedavg"))
    for arrays, expected in zip(found.arrays, other.arrays, strict=True):
        assert_near(matrix(arrays), matrix(expected), 1e-6)


def test_class_without_examples_is_not_trained():
    head = CalibratedHead(PositionwiseLinear(4, 3), torch.tensor([1.0, torch.inf, 2.0]))
    # Outputs of a sequence, with as many positions as classes
    outputs, targets = head(torch.randn(2, 3, 4)), torch.tensor([[0, 2, -100]] * 2)
    torch.nn.functional.cross_entropy(outputs, targets).backward()
    for parameter in head.parameters():
        assert (parameter.grad[1] == 0).all()
        assert (parameter.grad[[0, 2]] != 0).all()
