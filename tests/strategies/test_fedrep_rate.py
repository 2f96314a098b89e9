"""Measured distances of linear FedRep compared with the rate of its theorem 1."""

import algorithm_runs
import numpy as np
import pytest

from benchmarks.theory import FedRepTheory
from flwr_frl.clients.client_app import make_app
from flwr_frl.strategies import build_strategy
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.loop import run_rounds
from flwr_frl.task.tasks.linear import LinearTask

WEIGHT, CLIENTS, ROUNDS, D, K = "representation.weight", 20, 60, 6, 2


def sine(b: np.ndarray, truth: np.ndarray) -> float:
    """Return the distance of two column spaces, from their projections."""
    q = np.linalg.qr(b).Q
    return float(np.linalg.norm(q @ q.T - truth @ truth.T, 2))


def distances(seed: int) -> tuple[list[float], FedRepTheory]:
    """Train with the largest step size of the theorem, from a random start."""
    task = LinearTask(dimension=D, rank=K, num_clients=CLIENTS, seed=seed)
    # W* = B*ᵀ Φ; its columns have norm √k.
    heads = (task.representation.T @ task.models).T
    settings = algorithm_runs.settings_of(
        "fedrep",
        task="linear",
        dimension=D,
        rank=K,
        seed=seed,
        num_clients=CLIENTS,
        fraction_train=1.0,
        samples=500,
        noise_variance=0.0,
        initialization="random",
        orthonormalize=True,
        learning_rate=FedRepTheory(heads, CLIENTS, 0.0).step_size,
    )
    grid, strategy = InlineGrid(make_app(settings), CLIENTS), build_strategy(settings)
    start = strategy.initialize(grid)
    measured = [sine(start[WEIGHT].numpy().T, task.representation)]
    run_rounds(
        strategy,
        grid,
        start,
        range(1, ROUNDS + 1),
        evaluated=lambda server_round: False,
        after_round=lambda r, arrays, metrics: measured.append(
            sine(arrays[WEIGHT].numpy().T, task.representation)
        ),
    )
    return measured, FedRepTheory(heads, CLIENTS, measured[0])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_distance_decreases_at_least_at_the_rate_of_theorem_1(seed: int) -> None:
    measured, theory = distances(seed)
    assert measured[0] > 0.9
    smallest, largest = theory.sigmas
    # Equation 10
    eta, e0 = 1 / (4 * largest**2), 1 - measured[0] ** 2
    rate = np.sqrt(1 - eta * e0 * smallest**2 / 2)
    for t, distance in enumerate(measured):
        assert distance <= rate**t * measured[0] * (1 + 1e-9)
    assert theory.distance(ROUNDS) == pytest.approx(rate**ROUNDS * measured[0])
    # Near B*, the exact heads are the true ones. A step on the expected loss multiplies
    # the part of B outside of B* by I − η W*ᵀW*/n, hence by 1 − η σ²_min in the slowest
    # direction.
    assert measured[-1] < 0.01
    assert measured[-1] / measured[-2] == pytest.approx(1 - eta * smallest**2, abs=0.01)
