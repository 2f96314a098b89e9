"""Clients that train, or that test the same model, as rows of matrices."""

import pytest
import torch
from torch import nn

from flwr_frl.clients.client_app import make_app
from flwr_frl.clients.device import rows
from flwr_frl.common.settings import resolve
from flwr_frl.strategies import build_strategy
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.loop import run_rounds
from flwr_frl.task import ExampleSet, ExampleTask, SplitModel
from flwr_frl.task.models import split_model

# Number of test examples of each client; the last client has none.
SIZES = (3, 1, 4, 2, 0)


def inputs_of(client: int, count: int) -> torch.Tensor:
    return torch.arange(2.0 * count).reshape(count, 2) - client


def model() -> SplitModel:
    return SplitModel(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), nn.Linear(3, 2))


def clients(num_clients: int) -> ExampleTask:
    train = [
        ExampleSet(torch.eye(2).repeat(i, 1), torch.arange(2 * i) % 2)
        for i in range(1, num_clients + 1)
    ]
    test = [
        ExampleSet(inputs_of(i, n), torch.arange(n) % 2)
        for i, n in enumerate(SIZES[:num_clients])
    ]
    return ExampleTask(model, train, test, classes=("a", "b"))


def prepared(algorithm="fedavg", **settings):
    """Return a strategy, its grid and the initial arrays."""
    run = {"algorithm": algorithm, "task": f"{__name__}:clients", "device": "cpu"}
    run |= {"num-clients": len(SIZES), "fraction-train": 0.4}
    config = resolve({**run, **settings})
    grid, strategy = InlineGrid(make_app(config), len(SIZES)), build_strategy(config)
    return strategy, grid, strategy.initialize(grid)


def evaluated(algorithm="fedavg", rounds=1, **settings):
    """Return the clients' metrics by name."""
    strategy, grid, arrays = prepared(algorithm, **settings)
    run_rounds(strategy, grid, arrays, range(1, rounds + 1))
    return strategy._run.evaluation.metrics


@pytest.mark.parametrize("algorithm", ["fedavg", "fedrep", "local", "fedavg-ft"])
def test_batched_metrics_equal_those_of_sequential_evaluations(algorithm):
    together = evaluated(algorithm, rounds=3)
    alone = evaluated(algorithm, rounds=3, cohort="off")
    assert together.keys() == alone.keys()
    for name, metrics in alone.items():
        assert together[name] == pytest.approx(metrics, rel=1e-5), name


def test_clients_without_a_personal_state_are_evaluated_as_one_batch(monkeypatch):
    sizes, evaluate = [], rows.evaluate_clients

    def counted(task, indices, model):
        sizes.append(len(indices))
        return evaluate(task, indices, model)

    monkeypatch.setattr(rows, "evaluate_clients", counted)
    for algorithm, allowed in (
        # Two of five clients, chosen at random, have trained a head. Client 4, which
        # has no examples, may be among the other three.
        ("fedrep", ([2], [3])),
        ("fedavg", ([4],)),
        # FedAvg-FT clients fine-tune before they are tested.
        ("fedavg-ft", ([],)),
    ):
        sizes.clear()
        evaluated(algorithm)
        assert sizes in allowed


def test_only_the_client_whose_examples_do_not_fit_fails(monkeypatch):
    strategy, grid, arrays = prepared()
    examples_of = ExampleTask.test_examples

    def grown(task, client):
        """Return four numbers per example of client 1 instead of two."""
        found = examples_of(task, client)
        inputs = torch.cat([found.inputs] * 2, 1)
        return ExampleSet(inputs, found.targets) if client == 1 else found

    monkeypatch.setattr(ExampleTask, "test_examples", grown)
    run_rounds(strategy, grid, arrays, range(1, 2))
    assert sorted(strategy._run.evaluation.metrics) == ["000000", "000002", "000003"]
    rejections = strategy._run.evaluation.round.rejections
    assert [name for name, _ in rejections] == ["000001"]


@pytest.mark.parametrize("algorithm", ["flute", "fedamp", "scaffold"])
def test_clients_train_as_rows_with_different_arrays_states_and_numbers_of_steps(
    algorithm, monkeypatch
):
    rounds, fit = [], rows.Rows.fit

    def counted(several):
        replies = fit(several)
        rounds.append(len(replies))
        return replies

    monkeypatch.setattr(rows.Rows, "fit", counted)
    # Three of five clients train in each round, so their last rounds differ.
    how = {"fraction-train": 0.6, "batch-size": 2, "momentum": 0.5}
    results = {}
    for cohort in ("5", "off"):
        strategy, grid, arrays = prepared(algorithm, cohort=cohort, **how)
        results[cohort] = run_rounds(strategy, grid, arrays, range(1, 5))
    assert rounds == [3] * 4
    for name, array in results["off"].items():
        together = results["5"][name].numpy()
        assert together == pytest.approx(array.numpy(), abs=1e-6), name


@pytest.mark.parametrize("large", [False, True])
def test_large_models_are_not_copied(large, monkeypatch):
    copied, differing = [], rows.Rows._differing
    monkeypatch.setattr(
        rows.Rows, "_differing", lambda self: copied.append(self) or differing(self)
    )
    monkeypatch.setattr(split_model, "LARGE", 16 if large else 17)
    strategy, grid, arrays = prepared()
    run_rounds(strategy, grid, arrays, range(1, 2))
    # The model has (2 + 1) 3 + (3 + 1) 2 = 17 values.
    assert bool(copied) is not large
