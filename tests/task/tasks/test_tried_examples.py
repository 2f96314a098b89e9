"""A task is tried on examples of each kind, but not on those of every client."""

import pytest
import torch
from refusals import assert_says
from torch import Tensor, nn

from flwr_frl.task.base import ExampleTask
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import SplitModel


class Counting(nn.Module):
    """An embedding of ten tokens, or two numbers, that records its batches."""

    def __init__(self, calls: list[Tensor], tokens: bool) -> None:
        super().__init__()
        self.calls = calls
        self.embed = nn.Embedding(10, 4) if tokens else nn.Linear(2, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls.append(inputs)
        embedded: Tensor = self.embed(inputs)
        return embedded.mean(1) if embedded.ndim > 2 else embedded


def task_of(
    inputs: list[Tensor], targets: list[Tensor] | None = None
) -> tuple[ExampleTask, list[Tensor]]:
    """Return a task whose clients have these inputs, and the batches it is tried on."""
    calls: list[Tensor] = []
    tokens = not inputs[0].is_floating_point()
    labels = targets or [torch.arange(len(each)) % 2 for each in inputs]
    sets = [ExampleSet(*pair) for pair in zip(inputs, labels, strict=True)]

    def model() -> SplitModel:
        return SplitModel(Counting(calls, tokens), nn.Linear(4, 2))

    return ExampleTask(model, sets, sets), calls


def tried(inputs: list[Tensor]) -> list[int]:
    """Return how often the model is called for each client."""
    task, calls = task_of(inputs)
    counts = []
    for client in range(len(inputs)):
        calls.clear()
        task.check(client)
        counts.append(len(calls))
    return counts


def test_only_the_first_of_similar_clients_is_tried() -> None:
    # Training examples: twice on two of them, once on a batch, once in a training step
    # and once on a single one. Test examples: once on a batch.
    assert tried([torch.randn(6, 2) for _ in range(50)]) == [6] + [0] * 49
    # Other numbers of examples are tried unless the first batch is full.
    assert tried([torch.zeros(n, 2) for n in (3, 4, 3, 60, 70)]) == [6, 6, 0, 6, 0]
    # Tokens outside of the range that was tried
    tokens = [torch.full((4, 3), token) for token in (2, 5, 3, 4, 1)]
    assert tried(tokens) == [6, 6, 0, 0, 6]
    # A sum that overflows does not affect later clients.
    large, ones = torch.full((40, 2), 1e37), torch.ones(40, 2)
    assert not large.sum().isfinite()
    assert tried([large, ones, ones, large]) == [6, 6, 0, 6]


CLASSES = torch.arange(4) % 2


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [
        (torch.full((4, 2), torch.nan), CLASSES),
        (torch.zeros(4, 2), torch.tensor([0, 1, 0, 2])),
        (torch.zeros(4, 2), torch.tensor([0, 1, 0, -1])),
        (torch.zeros(4, 3), CLASSES),
        (torch.zeros(4, 2, dtype=torch.float64), CLASSES),
        (torch.zeros(4, 2), torch.zeros(4, 1)),
    ],
)
def test_client_with_other_invalid_examples_is_rejected(inputs, targets) -> None:
    good = torch.ones(4, 2)
    task, _ = task_of([good, good, inputs], [CLASSES, CLASSES, targets])
    task.check(0)
    for _ in range(2):
        # A client that failed is not remembered as accepted.
        assert_says("train examples of client 2: ", task.check, 2)
    task.check(1)
