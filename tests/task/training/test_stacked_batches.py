"""Batches of several clients, compared with examples chosen one by one."""

import pytest
import torch

from flwr_frl.task import ExampleSet
from flwr_frl.task.training import stacked
from flwr_frl.task.training.stacked import PooledExamples


def images(count: int, rows: torch.Tensor | None = None) -> ExampleSet:
    """Return images of 2 × 2 pixels with consecutive values."""
    pixels = torch.arange(count * 4, dtype=torch.uint8).reshape(count, 2, 2, 1)
    number = count if rows is None else len(rows)
    mean, std = torch.tensor([1.0]), torch.tensor([2.0])
    return ExampleSet(pixels, torch.arange(number), mean, std, rows=rows)


@pytest.mark.parametrize("limit", [0, 2**20])
def test_rows_of_several_clients_are_gathered_together(monkeypatch, limit):
    monkeypatch.setattr(stacked, "POOLED_BYTES", limit)
    sets = [images(3), images(5), images(9, torch.tensor([8, 2, 4]))]
    rows = torch.tensor([[4, 0, 1, 3], [1, 2, 2, 0]])
    x, y = (
        each[0] for each in PooledExamples(sets).take(torch.tensor([1, 2]), rows[None])
    )
    for client, i in enumerate((1, 2)):
        chosen = rows[client]
        inputs = sets[i].inputs if sets[i].rows is None else sets[i].inputs[[8, 2, 4]]
        expected = (inputs[chosen].float() - 1) / 2
        assert torch.equal(x[client], expected.permute(0, 3, 1, 2))
        assert torch.equal(y[client], sets[i].targets[chosen])


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (torch.tensor([0, 1]), False),
        (torch.tensor([0, -100]), True),
        (torch.tensor([[-1.0], [2.0]]), False),
    ],
)
def test_only_negative_classes_are_ignored(targets, expected):
    pool = PooledExamples([ExampleSet(torch.zeros(2, 1), targets)])
    assert pool.has_ignored is expected
