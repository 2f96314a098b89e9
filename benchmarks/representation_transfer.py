"""Table 5.1 of Singh (UCLA 2024): representation transfer for linear regression.

Errors are computed with the true V*, as in the dissertation, by the functions of
``flwr_frl.task.transfer``, or with a basis learned from sources, by strategy and
clients. They are relative to the error of θ*.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.runs import Rounds
from flwr_frl.clients.client_app import make_app
from flwr_frl.common.settings import Setting, resolve
from flwr_frl.strategies import build_strategy
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.loop import run_rounds
from flwr_frl.task.tasks.linear import TransferTask, principal_angle_distance
from flwr_frl.task.transfer import (
    basis,
    halves,
    phase_one,
    phase_two,
    phase_two_descent,
)

METHODS = ("error-phase-1", "error", "error-descent", "error-scratch")
Errors = dict[str, Any]


def run(settings: Mapping[str, Setting], place: Path) -> Errors:
    """Return one run's errors, with the true basis or one that is learned."""
    learned = settings["algorithm"] == "learned basis"
    return with_sources(settings) if learned else with_true_basis(settings)


def with_true_basis(settings: Mapping[str, Any]) -> Errors:
    """Return the errors with V of V*, and phase 2's excess risk / σ²."""
    dimension, noise = settings["dimension"], settings["noise-variance"]
    data = TransferTask(
        dimension=dimension,
        rank=settings["rank"],
        num_sources=0,
        target_samples=2 * settings["half"],
        ratio_db=settings["ratio"],
        noise_variance=noise,
        seed=settings["seed"],
    )
    x, y = data.draw(0)
    x1, y1, x2, y2 = halves(x, y)
    first = phase_one(basis([data.span]), x1, y1)
    models = (
        first,
        phase_two(first, x2, y2),
        phase_two_descent(first, x2, y2, max_steps=settings["steps"]),
        phase_two(np.zeros(dimension), x, y),
    )
    errors = dict(zip(METHODS, data.errors(0, *models)[1:], strict=True))
    # The excess risk of equation 5.2, as the noise is independent of x
    excess = data.eigenvalues @ (models[1] - data.model(0)) ** 2
    return {**errors, "excess": float(excess) / noise}


class LastClient(InlineGrid):
    """A grid on which only the target, which joined last, can be reached."""

    def get_node_ids(self) -> list[int]:
        """Return the last client's id."""
        return list(super().get_node_ids())[-1:]


def with_sources(settings: Mapping[str, Any]) -> Errors:
    """Return the errors of a late target, and the learned basis's rank and distance."""
    count, seed = settings["sources"], settings["seed"]
    dimension, rank = settings["dimension"], settings["rank"]
    own: dict[str, Setting] = resolve(
        {
            "algorithm": "representation-transfer",
            "task": "transfer",
            "dimension": dimension,
            "rank": rank,
            "num-sources": count,
            "source-samples": settings["source-samples"],
            "num-clients": count + 1,
            "noise-variance": settings["noise-variance"],
            "seed": seed,
        }
    )
    teachers = Rounds(own)
    shared = teachers.run()
    learned = shared["representation.weight"].numpy().T
    truth = TransferTask(dimension=dimension, rank=rank, seed=seed).span
    errors: Errors = {
        "rank": learned.shape[1],
        "distance": principal_angle_distance(learned, truth),
    }
    for steps in (0, settings["steps"]):
        changed = own | {
            "ratio-db": settings["ratio"],
            "target-samples": 2 * settings["half"],
            **({"descent-steps": steps} if steps else {}),
        }
        strategy = build_strategy(changed)
        strategy._restore(teachers.strategy._snapshot())
        late = LastClient(make_app(changed), count + 1)
        found: Errors = {}
        run_rounds(
            strategy,
            late,
            shared,
            range(2, 3),
            after_round=lambda _, __, metrics, found=found: found.update(metrics),
        )
        if steps:
            errors["error-descent"] = found["error"]
        else:
            errors |= {name: found[name] for name in METHODS if name in found}
    return errors
