"""Decentralised multi-task optimisation: Figures 4.1 and 4.2 of Singh (UCLA 2024).

Relative cost gap, distance to the optimum and constraint values by iteration and by
bits. Nodes run batched in one process (`benchmarks.multi_task_network`), with the same
results as nodes that exchange bytes individually.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.multi_task_network import Network
from flwr_frl.common.compression import Compressor, Identity, Sign, TopK
from flwr_frl.common.settings import Setting
from flwr_frl.strategies.gossip.graphs import build_graph
from flwr_frl.task.saddle_point import Float64s, Pairs, Proximity, SaddlePoint
from flwr_frl.task.tasks.multi_task import QCQP, LogisticRegression, build_problem

NODES, STEP, DELTA = 30, 1e-3, 100.0
EDGE_PROBABILITY = {"qcqp": 0.15, "logistic": 0.3}
TARGETS = {"qcqp": (1e-1, 1e-2, 1e-3), "logistic": (1e-1, 3e-2, 1e-2)}
SCHEMES: dict[str, Compressor] = {
    "vanilla": Identity(),
    "TopK": TopK(1),
    "Sign": Sign(),
    "SignTopK": TopK(2, Sign()),
}
# First word of the seed of the test examples of logistic regression, and their number
# for each node (section 4.5.2.1).
TEST, EXAMPLES = 0x4D543, 500


def slope(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return the least-squares slope of log y by log x; None if a y is not positive."""
    if min(y, default=0) <= 0 or len(y) < 3:
        return None
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


class Case:
    """A problem with its graph, its optimum and the quantities that are measured."""

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.seed = name, seed
        self.graph = build_graph("erdos-renyi", NODES, EDGE_PROBABILITY[name], seed)
        self.pairs = directed(self.graph)
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
        saddle = SaddlePoint(self.problem, self.constraint, 20.0, step, DELTA, zeta)
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
            row["accuracy"] = self.accuracy(self.problem, x)
        return row

    def accuracy(self, problem: LogisticRegression, x: Float64s) -> float:
        """Return the mean accuracy on test examples, which no iteration uses."""
        streams = [np.random.default_rng([TEST, self.seed, i]) for i in problem.nodes]
        tests = [problem.draw(i, stream, EXAMPLES) for i, stream in enumerate(streams)]
        correct = (np.array(tests) @ x[..., None])[..., 0] > 0
        return float(correct.mean(axis=1).mean())


def directed(edges: Pairs) -> Pairs:
    """Return (i, j) and (j, i) of every edge as rows, in lexicographic order."""
    return np.unique(np.concatenate([edges, edges[:, ::-1]]), axis=0)


def solve(problem: QCQP, constraint: Proximity) -> Float64s:
    """Return the optimum of the QCQP, from an interior-point solver."""
    # Needs `pip install 'flwr-frl[benchmarks]'`.
    import cvxpy as cp

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


def run(settings: Mapping[str, Setting], place: Path) -> dict[str, Any]:
    """Run one scheme; return its curves and the crossings of the targets.

    The curves have about 120 points, evenly spaced on a logarithmic scale. Crossings
    are checked in each of the first 100 iterations, and then in every tenth. With
    ``horizon``, the step size is eta = a / sqrt(T) of Theorem 3, where a = 1e-3
    sqrt(50000) gives the chapter's step size for the chapter's T.
    """
    case = Case(str(settings["problem"]), int(settings["seed"]))
    scheme, zeta = str(settings["algorithm"]), float(settings["zeta"])
    iterations = int(settings["iterations"])
    step = STEP * ((50000 / iterations) ** 0.5 if settings.get("horizon") else 1)
    drawn = set(np.unique(np.geomspace(1, iterations, 150).astype(int)).tolist())
    network, rows = case.network(scheme, zeta, step), []
    crossed: dict[str, list[int]] = {}
    for t in range(1, iterations + 1):
        network.iterate()
        if t in drawn:
            rows.append(case.measure(network))
        if t <= 100 or t % 10 == 0:
            gap = case.gap(network.algorithm.point(network.state))
            for target in TARGETS[case.name]:
                if gap <= target:
                    crossed.setdefault(f"{target:g}", [t, network.bits])
    curve = {key: [row[key] for row in rows] for key in rows[0]}
    late = sum(t < iterations / 10 for t in curve["iteration"])
    averages = [curve[name][late:] for name in ("iteration", "gap-average")]
    by_bits = [curve["bits"], np.abs(curve["gap"]).tolist()]
    return {
        **rows[-1],
        "slope-gap": slope(averages[0], np.abs(averages[1])),
        "crossed": crossed,
        "curve": {"gap": by_bits},
    }


def savings(config: Any, results: Any) -> dict[str, Any]:
    """Add the iterations to each target, and by how much a scheme reduces the bits."""
    for cells in results.values():
        for cell, runs in cells.items():
            for run, plain in zip(runs, results["vanilla"].get(cell, []), strict=False):
                for target, (iteration, bits) in run["crossed"].items():
                    run[f"iteration-{target}"] = iteration
                    if target in plain["crossed"]:
                        run[f"saving-{target}"] = plain["crossed"][target][1] / bits
    return {}
