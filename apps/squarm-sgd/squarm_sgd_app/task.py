"""The model and the data of the nodes: replace both with yours."""

from typing import Annotated

import torch
from sklearn.datasets import load_digits
from torch import nn

from flwr_frl.task import ExampleSet, ExampleTask, SplitModel, setting


def load_data(num_clients: int, classes: int) -> tuple[list, list]:
    """Return the training and test examples of each client: digits of a few classes.

    Client i has the classes i, i + 1, … (modulo 10). The clients that have a class
    share its images.
    """
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    train, test = [], []
    for client in range(num_clients):
        rows = []
        for label in {(client + k) % 10 for k in range(classes)}:
            holders = [i for i in range(num_clients) if (label - i) % 10 < classes]
            found = (labels == label).nonzero().flatten()
            rows.append(found[holders.index(client) :: len(holders)])
        every = torch.cat(rows)
        held_out = torch.arange(len(every)) % 4 == 0
        for part, chosen in ((train, every[~held_out]), (test, every[held_out])):
            part.append(ExampleSet(images[chosen], labels[chosen]))
    return train, test


def task(
    num_clients: int, *, digits_per_client: Annotated[int, setting(ge=1, le=10)] = 2
):
    """Return the task; ``digits_per_client`` becomes a setting of the run config."""
    train, test = load_data(num_clients, digits_per_client)
    return ExampleTask(lambda: SplitModel(nn.Flatten(), nn.Linear(64, 10)), train, test)
