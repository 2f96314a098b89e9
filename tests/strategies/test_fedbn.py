"""FedBN compared with a NumPy implementation of server and clients."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from paper_rounds import run_variant
from softmax_runs import CLASSES, DIMENSION, RATE, STEPS, N, assert_near, draw, matrix
from torch import nn

from flwr_frl.clients.device.state import PersonalState
from flwr_frl.clients.fedbn import FedBNClient
from flwr_frl.common.settings import build, resolve
from flwr_frl.task import ExampleSet, ExampleTask, SplitModel
from flwr_frl.task.tasks import build_task

TASK = {"task": "softmax_runs:scaled"}
NORM = [
    f"representation.{name}"
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
]


@dataclass
class Norm:
    """γ, β and the running statistics of one client."""

    scale: np.ndarray
    shift: np.ndarray
    mean: np.ndarray
    variance: np.ndarray
    steps: int = 0


def trained(theta: np.ndarray, norm: Norm, i: int) -> tuple[np.ndarray, Norm]:
    """Train with all examples in each step, so that all steps normalize alike."""
    x, y = draw(i)
    normal = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)
    for _ in range(STEPS):
        inputs = np.column_stack([normal * norm.scale + norm.shift, np.ones(len(x))])
        scores = np.exp(inputs @ theta.T)
        slope = scores / scores.sum(1, keepdims=True) - np.eye(CLASSES)[y]
        slope /= len(y)
        back = slope @ theta[:, :DIMENSION]
        theta = theta - RATE * slope.T @ inputs
        norm = Norm(
            norm.scale - RATE * (back * normal).sum(0),
            norm.shift - RATE * back.sum(0),
            0.9 * norm.mean + 0.1 * x.mean(0),
            0.9 * norm.variance + 0.1 * x.var(0, ddof=1),
            norm.steps + 1,
        )
    return theta, norm


def loss_of(theta: np.ndarray, norm: Norm, i: int) -> float:
    x, y = draw(i, test=True)
    normal = (x - norm.mean) / np.sqrt(norm.variance + 1e-5)
    inputs = np.column_stack([normal * norm.scale + norm.shift, np.ones(len(x))])
    scores = inputs @ theta.T
    return float(np.mean(np.log(np.exp(scores).sum(1)) - scores[np.arange(len(y)), y]))


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_every_round_matches_the_paper(weighting):
    outcome = run_variant("fedbn", 3, evaluate=True, weighting=weighting, **TASK)
    initial = outcome.client(0, 0).task.initial_state
    theta = matrix({name: t.numpy() for name, t in initial.items()})
    ones, zeros = np.ones(DIMENSION), np.zeros(DIMENSION)
    norms = [Norm(ones, zeros, zeros, ones) for _ in range(N)]
    for now, clients in enumerate(outcome.trained):
        results = {i: trained(theta, norms[i], i) for i in clients}
        theta = outcome.mean([m for m, _ in results.values()], clients)
        norms = [results[i][1] if i in results else norms[i] for i in range(N)]
        # No array of a norm is shared.
        assert list(outcome.arrays[now]) == ["head.weight", "head.bias"]
        assert_near(matrix(outcome.arrays[now]), theta)
        for i, norm in enumerate(norms):
            if kept := outcome.kept[now][i]:
                assert sorted(kept) == sorted(NORM)
                values = norm.scale, norm.shift, norm.mean, norm.variance
                for name, expected in zip(NORM, values, strict=False):
                    assert_near(kept[name], expected)
                assert kept[NORM[-1]] == norm.steps
            # A client that never trained has the initial norm.
            loss = outcome.metrics[now][i]["loss"]
            assert loss == pytest.approx(loss_of(theta, norm, i), abs=1e-5)
    scales = np.array([norm.scale for norm in norms])
    assert np.abs(scales - scales.mean(0)).max() > 1e-2


def test_batch_norms_of_a_network_are_personal():
    task = build_task(resolve({"task": "digits", "model": "resnet20"}), 20)
    settings = build(FedBNClient._settings_type, resolve({}))
    state = PersonalState(Context(1, 1, {}, RecordDict(), {}))
    client = FedBNClient(task, 0, state, settings)
    kept, shared = (client._array_names(g) for g in (client.personal, client.shared))
    assert len(kept) == 5 * 19
    assert "representation.block2.bn1.running_var" in kept
    assert "representation.block2.conv1.weight" in shared
    assert {*kept, *shared} == set(task.initial_state)
    assert not {*kept} & {*shared}


class TwoNames(nn.Module):
    """Applies the same batch norm twice, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.first = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.second = self.first

    def forward(self, x):
        return self.second(torch.tanh(self.first(self.layer(x))))


def test_norm_with_two_names_is_personal():
    sets = [ExampleSet(torch.ones(4, 2), torch.tensor([0, 1, 0, 1]))]
    task = ExampleTask(lambda: SplitModel(TwoNames(), nn.Linear(2, 2)), sets, sets)
    settings = build(FedBNClient._settings_type, resolve({}))
    client = FedBNClient(task, 0, PersonalState.holding({}), settings)
    assert client.get_properties({})["num-examples"] == 4
    kept = [name.rpartition(".")[0] for name in client._array_names(client.personal)]
    assert set(kept) == {"representation.first", "representation.second"}
