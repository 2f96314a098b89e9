"""Final state of a few rounds, to compare two ways to run them."""

from copy import deepcopy

import numpy as np
from cohort_tasks import N

from flwr_frl.clients.client_app import make_app
from flwr_frl.common.settings import resolve
from flwr_frl.strategies import build_strategy
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.loop import run_rounds

SETTINGS = {
    "num-clients": N,
    "fraction-train": 0.8,
    "batch-size": 4,
    "learning-rate": 0.1,
    "head-epochs": 2,
    "representation-epochs": 2,
    "consensus-step": 0.2,
    "initial-nodes": 4,
}
OWN = {
    "fedprox": {"proximal-mu": 0.5},
    "scaffold": {"momentum": 0.0},
    "ditto": {"ditto-lambda": 0.5},
    "hf-maml": {"inner-learning-rate": 0.2},
    "choco-sgd": {"compressor": "top-k", "compressor-k": 0.5},
    "squarm-sgd": {"local-steps": 3, "momentum": 0.9},
}


def outcome(algorithm: str, size: object, rounds: int = 2, **more: object) -> dict:
    """Run some rounds; return the arrays and metrics of server and clients by name."""
    chosen = {"algorithm": algorithm, "task": "cohort_tasks:dense", "cohort": str(size)}
    settings = resolve({**SETTINGS, **OWN.get(algorithm, {}), **chosen, **more})
    grid = InlineGrid(make_app(dict(settings)), N)
    strategy = build_strategy(settings)
    arrays = run_rounds(
        strategy,
        grid,
        strategy.initialize(grid),
        range(1, rounds + 1),
        evaluated=lambda t: t == rounds,
    )
    state = {f"server/{name}": array.numpy() for name, array in arrays.items()}
    for node, context in grid.contexts.items():
        for key, record in deepcopy(context.state).items():
            state |= {f"{node}/{key}/{n}": a.numpy() for n, a in record.items()}
    tested = strategy._run.evaluation.metrics
    state |= {
        f"{c}/{n}": v for c, metrics in tested.items() for n, v in metrics.items()
    }
    assert len(tested) == N
    return state


def assert_same(found: dict, expected: dict, tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=tolerance, err_msg=name)
