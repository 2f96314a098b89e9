"""Unusual custom tasks: doubles, and no training examples."""

import pytest

from flwr_frl import simulate

TASK = """
import torch
from torch import nn

from flwr_frl.task import ExampleSet, ExampleTask, SplitModel


def sets(rows):
    generator = torch.Generator().manual_seed(1)
    return [
        ExampleSet(
            torch.randn(n, 4, 3, generator=generator),
            torch.randint(0, 2, (n,), generator=generator),
        )
        for n in rows
    ]


def flat():
    body = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Tanh())
    return SplitModel(body, nn.Linear(5, 2))


def doubles():
    rows = [ExampleSet(s.inputs.double(), s.targets) for s in sets([9, 7, 8])]
    return ExampleTask(lambda: flat().double(), rows, rows)


def one_without():
    return ExampleTask(flat, sets([9, 0, 8]), sets([6, 7, 5]))
"""


def rows_of(algorithm, task, tmp_path, **settings):
    options = {"num_clients": 3, "rounds": 2, "fraction": 1.0, "head_epochs": 1}
    options |= {"output": str(tmp_path / "out"), **settings}
    return simulate(algorithm, "inline", task=task, **options).rows


@pytest.fixture
def module(write_module):
    return write_module("odd", TASK)


@pytest.mark.parametrize(
    "algorithm", ["fedrep", "fedavg-ft", "fedbabu", "fedala", "feddbe"]
)
def test_models_in_double_precision_can_be_trained(algorithm, module, tmp_path):
    rows = rows_of(algorithm, f"{module}:doubles", tmp_path, augment_head=False)
    assert rows[-1]["evaluated"] == rows[-1]["clients"] == 3
    assert 0 <= rows[-1]["accuracy"] <= 1


@pytest.mark.parametrize("algorithm", ["fedavg", "fedavg-ft", "fedbabu", "per-fedavg"])
def test_clients_without_training_examples_are_tested(algorithm, module, tmp_path):
    rows = rows_of(algorithm, f"{module}:one_without", tmp_path)
    assert (rows[-1]["clients"], rows[-1]["evaluated"]) == (2, 3)
