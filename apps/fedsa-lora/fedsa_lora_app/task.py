"""A pretrained transformer and the data of the clients: replace both with yours."""

from typing import Annotated

import torch
from sklearn.datasets import load_digits
from torch import nn

from flwr_frl.task import ExampleSet, ExampleTask, SplitModel, setting


class Encoder(nn.Module):
    """A transformer that reads an 8 x 8 image as eight rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.place = nn.Parameter(torch.zeros(8, 32))
        self.mix = nn.MultiheadAttention(32, 4, batch_first=True)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return a vector for each image."""
        x = self.embed(images.flatten(1, 2)) + self.place
        x = x + self.mix(x, x, x, need_weights=False)[0]
        return (x + self.down(self.up(x).relu())).mean(1)


def pretrained(sets: list) -> Encoder:
    """Return an encoder trained to recognise the digits of some sets."""
    encoder, head = Encoder(), nn.Linear(32, 10)
    images = torch.cat([each.inputs for each in sets])
    labels = torch.cat([each.targets for each in sets])
    optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()], 0.01)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(head(encoder(images)), labels).backward()
        optimizer.step()
    return encoder


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
    """Return the task; ``digits_per_client`` becomes a setting of the run config.

    The encoder is trained on the first half of 2n clients, and adapted to the second.
    """
    train, test = load_data(2 * num_clients, digits_per_client)
    weights = pretrained(train[:num_clients]).state_dict()

    def model() -> SplitModel:
        encoder = Encoder()
        encoder.load_state_dict(weights)
        return SplitModel(encoder, nn.Linear(32, 10))

    return ExampleTask(model, train[num_clients:], test[num_clients:])
