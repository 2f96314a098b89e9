"""Table 5.1 of Singh (UCLA 2024): representation transfer for linear regression.

Errors are computed with the true V*, as in the dissertation, by the functions of
``flwr_frl.task.transfer``, or with a basis learned from sources, by strategy and
clients. They are relative to the error of θ*.
"""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.runs import Rounds
from flwr_frl.clients.client_app import make_app
from flwr_frl.common.settings import Setting, resolve
from flwr_frl.strategies import build_strategy
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.loop import run_rounds
from flwr_frl.task.tasks.linear import principal_angle_distance
from flwr_frl.task.tasks.transfer import TransferTask
from flwr_frl.task.transfer import (
    basis,
    halves,
    phase_one,
    phase_two,
    phase_two_descent,
)

METHODS = ("error-phase-1", "error", "error-descent", "error-scratch")
# "Far below" means at most this fraction of the error from scratch.
FAR = 1 / 3
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
        strategy._restore(teachers.strategy._snapshot()())
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


def effective_ranks(
    eigenvalues: npt.NDArray[np.float64], k: int
) -> tuple[float, float]:
    """Return r_k(Σ) and R_k(Σ) of a covariance matrix (theorem 6).

    r_k = Σ_{i>k} λ_i / λ_{k+1} and R_k = (Σ_{i>k} λ_i)² / Σ_{i>k} λ_i², with the
    eigenvalues λ_1 ≥ … ≥ λ_d and 0 ≤ k < d.
    """
    tail = np.sort(eigenvalues)[::-1][k:]
    total = float(tail.sum())
    return total / float(tail[0]), total**2 / float(tail @ tail)


def claims(config: Any, results: Any) -> dict[str, Any]:
    """Return the dissertation's statements on the table, and whether they hold.

    ``claims`` has their text, the measurements and the verdict. The notes have
    theorem 6's terms / σ² with its constants as 1: the theorem applies if some k has
    r_k ≥ n; r and R are the effective ranks r_k and R_k at the least such k.
    """
    true, found, notes = results.get("true basis", {}), [], {}
    common = config.common
    dimension, noise = common["dimension"], common["noise-variance"]
    spectrum = TransferTask(dimension=dimension, rank=common["rank"]).eigenvalues
    condition = spectrum[0] / spectrum[-1] * effective_ranks(spectrum, 0)[0]
    for cell, runs in true.items():
        n, ratio = (config.cells[cell][name] for name in ("half", "ratio"))
        means = {name: fmean(run[name] for run in runs) for name in METHODS}
        few = n < dimension
        for method in ("error-phase-1", "error") if few else ():
            part, useful = means[method] / means["error-scratch"], ratio >= 10
            claim = f"{method} is {'' if useful else 'not '}far below from scratch"
            found.append([f"{cell}: {claim}", f"{part:.2g}", (part <= FAR) == useful])
        for method in ("error", "error-descent") if ratio < 10 and not few else ():
            one, other = means[method], means["error-phase-1"]
            text = f"{one:.3g} and {other:.3g}"
            found.append([f"{cell}: {method} is below phase 1", text, one < other])
        large = (i for i in range(dimension) if effective_ranks(spectrum, i)[0] >= n)
        if (k := next(large, None)) is not None:
            r, big_r = effective_ranks(spectrum, k)
            epsilon = 10 ** (-ratio / 10) * spectrum.sum()
            transfer = condition / n * (common["rank"] / n + epsilon / noise)
            terms = f"{transfer:.3g}, {k / n + n / big_r:.3g}"
            about = {"k*, r, R": f"{k}, {r:.3g}, {big_r:.3g}"}
            notes[cell] = about | {"transfer, noise term": terms}
    table = [["statement", "measured", "true"], *found]
    return {"claims": found, "notes": {"true basis": notes}, "extra": {"Claims": table}}
