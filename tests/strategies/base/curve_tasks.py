"""Regression tasks: each client fits its own curve with a small network."""

import numpy as np
import torch
from torch import nn

from flwr_frl.task import ExampleSet, ExampleTask, SplitModel

INPUTS, WIDTH, SEED = 3, 5, 3


def table(node, count=20):
    """Return inputs and targets of a node's own curve."""
    rng = np.random.default_rng(node)
    x = rng.standard_normal((count, INPUTS)).astype(np.float32)
    return x, np.sin(x @ rng.standard_normal(INPUTS))[:, None].astype(np.float32)


def task_of(num_clients, middle, **more):
    tables = [map(torch.from_numpy, table(node)) for node in range(num_clients)]
    sets = [ExampleSet(*pair) for pair in tables]
    return ExampleTask(
        model=lambda: SplitModel(
            nn.Sequential(nn.Linear(INPUTS, WIDTH), middle()), nn.Linear(WIDTH, 1)
        ),
        train=sets,
        test=sets,
        loss=nn.functional.mse_loss,
        seed=SEED,
        **more,
    )


def curves(num_clients):
    largest = {"largest": lambda outputs, y: (outputs - y).abs().max()}
    return task_of(num_clients, nn.Tanh, metrics=largest)


def normed(num_clients):
    return task_of(num_clients, lambda: nn.BatchNorm1d(WIDTH))
