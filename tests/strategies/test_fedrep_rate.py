"""Linear FedRep's measured distances against the rate of its theorem 1."""

import algorithm_runs
import numpy as np
import pytest

from flwr_frl.clients.client_app import make_app
from flwr_frl.strategies import build_strategy
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.rounds import run_rounds
from flwr_frl.task.tasks.linear import LinearTask
from flwr_frl.task.theory import FedRepTheory

WEIGHT, CLIENTS, ROUNDS, D, K = "representation.weight", 20, 60, 6, 2


def sine(b: np.ndarray, truth: np.ndarray) -> float:
    """Return the distance of two column spaces, from their projections."""
    q = np.linalg.qr(b).Q
    return float(np.linalg.norm(q @ q.T - truth @ truth.T, 2))


def distances(seed: int) -> tuple[list[float], FedRepTheory]:
    """Train with the theorem's largest step, from a random start."""
    task = LinearTask(dimension=D, rank=K, num_clients=CLIENTS, seed=seed)
    # W* = B*ᵀ Φ, whose columns have the norm √k.
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
    found = [sine(start[WEIGHT].numpy().T, task.representation)]
    run_rounds(
        strategy,
        grid,
        start,
        range(1, ROUNDS + 1),
        evaluated=lambda server_round: False,
        after_round=lambda r, arrays, metrics: found.append(
            sine(arrays[WEIGHT].numpy().T, task.representation)
        ),
    )
    return found, FedRepTheory(heads, CLIENTS, found[0])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_distance_falls_at_least_as_fast_as_theorem_1(seed: int) -> None:
    found, theory = distances(seed)
    assert found[0] > 0.9
    smallest, largest = theory.sigmas
    # Equation 10, written out.
    eta, e0 = 1 / (4 * largest**2), 1 - found[0] ** 2
    rate = np.sqrt(1 - eta * e0 * smallest**2 / 2)
    for t, distance in enumerate(found):
        assert distance <= rate**t * found[0] * (1 + 1e-9)
    assert theory.distance(ROUNDS) == pytest.approx(rate**ROUNDS * found[0])
    # Near B*, exact heads are the true ones, and a step of the expected loss multiplies
    # the part of B outside of B* by I − η W*ᵀW*/n: by 1 − η σ²_min in the slowest
    # direction.
    assert found[-1] < 0.01
    assert found[-1] / found[-2] == pytest.approx(1 - eta * smallest**2, abs=0.01)
