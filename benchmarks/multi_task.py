"""Figures 4.1 and 4.2 of Singh (UCLA 2024): decentralised multi-task optimisation.

Relative cost gap, distance to the optimum and constraint values by iteration and by
bits, on the QCQP and on logistic regression, without compression and with TopK, Sign
and SignTopK, for sample and for bandit feedback. Nodes run batched in one process
(``benchmarks.multi_task_network``), with the same results as nodes that exchange bytes
individually.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.progress import track

from benchmarks.common import write
from benchmarks.multi_task_network import Network
from benchmarks.multi_task_page import (
    FEEDBACK,
    SCHEMES,
    TITLES,
    body,
    plot,
    slope,
    slopes,
)
from flwr_frl.strategies.gossip.graphs import erdos_renyi
from flwr_frl.task.saddle_point.algorithm import SaddlePoint
from flwr_frl.task.saddle_point.problems import (
    QCQP,
    Float64s,
    LogisticRegression,
    Proximity,
    build_problem,
    directed,
)
from flwr_frl.task.saddle_point.sets import Ball

NODES, STEP, DELTA = 30, 1e-3, 100.0
EDGE_PROBABILITY = {"qcqp": 0.15, "logistic": 0.3}
TARGETS = {"qcqp": (1e-1, 1e-2, 1e-3), "logistic": (1e-1, 3e-2, 1e-2)}
HORIZONS = (1000, 2000, 5000, 10000, 20000, 50000)


class Case:
    """A problem with its graph, its optimum and the quantities that are measured."""

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.seed = name, seed
        self.graph = erdos_renyi(NODES, EDGE_PROBABILITY[name], seed)
        self.pairs = directed(self.graph.edges)
        self.problem, self.constraint = build_problem(
            name, range(NODES), self.pairs, seed
        )
        self.optimum = (
            solve(self.problem, self.constraint)
            if isinstance(self.problem, QCQP)
            else true_models(self.problem, self.constraint)
        )
        self.least = float(self.problem.expected(self.optimum).sum())
        # The edge whose constraint is plotted, as in the figures' panels (d)
        self.edge = int(np.random.default_rng(seed).integers(len(self.pairs)))

    def network(self, scheme: str, zeta: float, step: float = STEP) -> Network:
        """Return the nodes before their first iteration."""
        saddle = SaddlePoint(
            self.problem, self.constraint, self.pairs, Ball(20), step, DELTA, zeta
        )
        return Network(saddle, SCHEMES[scheme], self.seed)

    def gap(self, x: Float64s) -> float:
        """Return (F(x) - F(x*)) / |F(x*)|; it can be negative for an infeasible x."""
        return float(self.problem.expected(x).sum() - self.least) / abs(self.least)

    def distance(self, x: Float64s) -> float:
        """Return ||x - x*|| / ||x*||."""
        return float(np.linalg.norm(x - self.optimum) / np.linalg.norm(self.optimum))

    def constraints(self, x: Float64s) -> Float64s:
        """Return g of every edge, in both directions."""
        return self.constraint.value(x[self.pairs[:, 0]], x[self.pairs[:, 1]])

    def measure(self, network: Network) -> dict[str, float]:
        """Return all quantities of the curves and tables."""
        x, average = network.algorithm.point(network.state), network.state.average
        values = self.constraints(x)
        row = {
            "iteration": network.state.iteration,
            "bits": network.bits,
            "gap": self.gap(x),
            "gap-average": self.gap(average),
            "distance": self.distance(x),
            "distance-average": self.distance(average),
            "edge": float(values[self.edge]),
            "largest": float(values.max()),
            "largest-average": float(self.constraints(average).max()),
        }
        if isinstance(self.problem, LogisticRegression):
            row["accuracy"] = float(self.problem.accuracy(x).mean())
        return row


def solve(problem: QCQP, constraint: Proximity) -> Float64s:
    """Return the optimum of the QCQP, from an interior-point solver."""
    try:
        import cvxpy as cp
    except ImportError:
        print(
            "this benchmark needs cvxpy: pip install 'flwr-frl[benchmarks]'",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    n, d = len(problem.nodes), problem.dimension
    x = cp.Variable((n, d))
    cost = sum(
        cp.quad_form(x[i], cp.psd_wrap(problem.a[i])) + problem.mean[i] * cp.sum(x[i])
        for i in range(n)
    )
    limits = [cp.norm(x[i]) <= 20 for i in range(n)]
    for (i, j), offset in zip(constraint.pairs, constraint.offsets, strict=True):
        if i < j:
            limits.append(cp.sum_squares(x[i] - x[j]) <= -offset)
    task = cp.Problem(cp.Minimize(cost), limits)
    task.solve(solver=cp.CLARABEL)
    if task.status != cp.OPTIMAL:
        raise RuntimeError(f"the solver ended with {task.status}")
    return np.asarray(x.value)


def true_models(problem: LogisticRegression, constraint: Proximity) -> Float64s:
    """Return the true models, which are the optimum; raise an error if infeasible."""
    x, (i, j) = problem.models, constraint.pairs.T
    if constraint.value(x[i], x[j]).max() > 0 or np.linalg.norm(x, axis=1).max() > 20:
        raise RuntimeError("the true models are not feasible")
    return x


def run(case: Case, scheme: str, zeta: float, iterations: int) -> dict[str, Any]:
    """Run one scheme; return its curves, the crossings of the targets and the time.

    The curves have about 120 points, evenly spaced on a logarithmic scale. Crossings
    are checked in each of the first 100 iterations, and then in every tenth.
    """
    drawn = set(np.unique(np.geomspace(1, iterations, 150).astype(int)).tolist())
    network, rows, seconds = case.network(scheme, zeta), [], 0.0
    crossed: dict[str, list[int]] = {}
    for t in range(1, iterations + 1):
        began = time.perf_counter()
        network.iterate()
        seconds += time.perf_counter() - began
        if t in drawn:
            rows.append(case.measure(network))
        if t <= 100 or t % 10 == 0:
            gap = case.gap(network.algorithm.point(network.state))
            for target in TARGETS[case.name]:
                if gap <= target:
                    crossed.setdefault(f"{target:g}", [t, network.bits])
    curve = {key: [row[key] for row in rows] for key in rows[0]}
    return {
        "curve": curve,
        "end": rows[-1],
        "slopes": slopes(curve),
        "crossed": crossed,
        "seconds": seconds,
    }


def horizons(case: Case, scheme: str, lengths: Sequence[int]) -> dict[str, Any]:
    """Run with the step size eta = a / sqrt(T) of Theorem 3, for each T.

    a = 1e-3 sqrt(50000) gives the chapter's step size for the chapter's T. The shortest
    run is excluded from the fitted slope: its steps may be too large, and the theorem
    holds for a large T.
    """
    gaps, largest = [], []
    for length in lengths:
        step = STEP * (50000 / length) ** 0.5
        network = case.network(scheme, 0.0, step)
        for _ in range(length):
            network.iterate()
        gaps.append(case.gap(network.state.average))
        largest.append(float(case.constraints(network.state.average).max()))
    fitted = slope(lengths[1:], np.abs(gaps[1:]))
    return {"gaps": gaps, "largest": largest, "slope": fitted}


def main() -> None:
    """Run both problems and write ``results/multi_task``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--qcqp-iterations", type=int, default=50000)
    parser.add_argument("--logistic-iterations", type=int, default=10000)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    began = time.monotonic()
    problems: dict[str, Any] = {}
    for name in TITLES:
        iterations = getattr(arguments, f"{name}_iterations")
        lengths = [length for length in HORIZONS if length <= iterations]
        results: dict[str, Any] = {}
        sweep: dict[str, Any] = {}
        for seed in track(arguments.seeds, TITLES[name]):
            case = Case(name, seed)
            for feedback, zeta in FEEDBACK.items():
                for scheme in SCHEMES:
                    one = run(case, scheme, zeta, iterations)
                    results.setdefault(scheme + feedback, []).append(one)
            for scheme in SCHEMES:
                sweep.setdefault(scheme, []).append(horizons(case, scheme, lengths))
        problems[name] = {
            "edge-probability": EDGE_PROBABILITY[name],
            "iterations": iterations,
            "targets": [f"{target:g}" for target in TARGETS[name]],
            "lengths": lengths,
            "results": results,
            "horizons": sweep,
        }
    data = {"problems": problems, "seconds": round(time.monotonic() - began)}
    for name, part in problems.items():
        plot(name, part["results"])
        for runs in part["results"].values():
            for later in runs[1:]:  # Only the first seed is plotted.
                del later["curve"]
    title = "Decentralised multi-task optimisation, Figures 4.1 and 4.2"
    write("multi_task", title, body(data, arguments.seeds), data)


if __name__ == "__main__":
    main()
