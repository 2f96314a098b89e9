"""Runs on linear representations, for the figures of FedRep, FLUTE and SRPFL.

All of them run the package's strategies and clients on `LinearTask`, in one process.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from benchmarks.runs import Rounds
from flwr_frl.clients.fedrep import solve_head
from flwr_frl.common.settings import Setting, build, resolve
from flwr_frl.strategies.grids.speeds import SimulatedArrivals, speed_model
from flwr_frl.task.tasks.linear import LinearTask, Matrix, principal_angle_distance

Own = Mapping[str, Setting]
Numbers = dict[str, Any]
WEIGHT = "representation.weight"


def train(
    settings: Own,
    after_round: Callable[[int, Matrix, Numbers], None] = lambda *_: None,
    evaluated: Callable[[int], bool] = lambda server_round: False,
) -> ArrayRecord:
    """Run an algorithm inline on the linear task; return the last arrays.

    ``after_round`` is called with the round (0 before training), B (d × k) and the
    metrics. Clients evaluate in the rounds for which ``evaluated`` is true.
    """
    settings = resolve({"task": "linear", **settings})
    rounds = Rounds(settings)
    after_round(0, rounds.arrays[WEIGHT].numpy().T, {})
    # Steps that are too large overflow; their replies are rejected.
    with np.errstate(all="ignore"):
        return rounds.run(
            int(settings["num-server-rounds"]),
            evaluated,
            lambda r, a, m: after_round(r, a[WEIGHT].numpy().T, m),
        )


def task_of(settings: Own) -> LinearTask:
    """Return the task of a run's settings."""
    own = resolve({"task": "linear", **settings})
    return build(LinearTask, own, num_clients=int(own["num-clients"]))


def distance(settings: Own, place: Path) -> Numbers:
    """Return FedRep's principal angle distance to the true representation by round."""
    found: list[float] = []
    task = task_of(settings)
    train(settings, lambda _, b, __: found.append(distance_to(task, b)))
    rounds = list(range(len(found)))
    return {
        "distance": found[-1],
        "error": found[min(50, rounds[-1])],
        "curve": {"distance": [rounds, found]},
    }


def distance_to(task: LinearTask, b: Matrix) -> float:
    """Return the principal angle distance to B*, rounded."""
    return round(principal_angle_distance(b, task.representation), 6)


def samples(settings: Own, place: Path) -> Numbers:
    """Return the clients' mean squared error, including the noise.

    It equals E (y − ŷ)² = ‖φ̂_i − φ_i‖² + noise variance for x ~ N(0, I_d). FedRep's
    heads are solved on its last representation; FedAvg's model is one for all.
    """
    task, clients = task_of(settings), int(settings["num-clients"])
    data = [task.draw(i) for i in range(clients)]
    if settings["algorithm"] == "fedavg":
        arrays = train(settings)
        b, w = (arrays[n].numpy().astype(np.float64) for n in (WEIGHT, "head.weight"))
        learned = [b.T @ w[0]] * clients
    else:
        b = np.eye(task.dimension)
        if settings["algorithm"] != "local":
            b = train(settings)[WEIGHT].numpy().T
        learned = [b @ solve_head(b, x, y) for x, y in data]
    errors = [np.sum((m - task.models[:, i]) ** 2) for i, m in enumerate(learned)]
    return {"error": float(np.mean(errors)) + float(settings["noise-variance"])}


def flute(settings: Own, place: Path) -> Numbers:
    """Return the mean error ‖B w_i − φ_i‖ by round, and that of the best model."""
    found: list[tuple[int, float]] = []

    def note(server_round: int, b: Matrix, metrics: Numbers) -> None:
        if "error" in metrics:
            found.append((server_round, metrics["error"]))

    rounds = int(settings["num-server-rounds"])
    train(settings, note, lambda r: r % 10 == 0 or r == rounds)
    best = float(task_of(settings).best_errors.mean())
    curve = [list(values) for values in zip(*found, strict=True)]
    return {"error": found[-1][1], "best": best, "curve": {"error": curve}}


def theorem(settings: Own, place: Path) -> Numbers:
    """Return the quantities of FLUTE's theorems 5.1 and 5.5 in a run.

    The distance is mean_i ‖B w_i − (U_k Λ_k V_kᵀ)_i‖, to the best model of rank k. The
    learning rate is ``bound`` times Δ² / (228 λ_1³), if this is given. The rate of a
    round is measured while the distance falls from half of its first value to twice
    its last one. T_R is when σ_k²(Θ_k) reaches Δ/4, for the component Θ_k of (B, Wᵀ)
    along the k leading singular vectors; (16) predicts it from the first round.
    """
    own = dict(settings)
    task, k = task_of({n: v for n, v in own.items() if n != "bound"}), int(own["rank"])
    u, values, vt = np.linalg.svd(task.models)
    gap = 2 * float(values[k - 1] - np.append(values, 0.0)[k])
    largest = gap**2 / (228 * float(values[0]) ** 3)
    if times := own.pop("bound", 0):
        own["learning-rate"] = float(times) * largest
    rate = float(own["learning-rate"])
    best = (u[:, :k] * values[:k]) @ vt[:k]
    rounds = Rounds(resolve({"task": "linear", **own}))
    distances, strengths = [], []
    for _ in range(int(own["num-server-rounds"])):
        b = rounds.run()[WEIGHT].numpy().T
        heads = rounds.strategy.heads
        w = np.stack([heads[n]["head.weight"][0] for n in sorted(heads)], axis=1)
        distances.append(np.linalg.norm(b @ w - best, axis=0).mean())
        leading = (u[:, :k].T @ b + vt[:k] @ w.T) / math.sqrt(2)
        strengths.append(np.linalg.svd(leading)[1][-1] ** 2)
    far = np.array(distances)
    falling = np.flatnonzero((far < far[0] / 2) & (far > 2 * far[-1]))
    slope = np.polyfit(falling, np.log(far[falling]), 1)[0] if len(falling) > 9 else 0
    reached = np.flatnonzero(np.array(strengths) >= gap / 4)
    growth = 1 + rate / 2 * (2 * float(values[k - 1]) - gap / 2)
    return {
        "gap": gap,
        "step / bound": rate / largest,
        "decrease measured": 1 - math.exp(slope),
        "decrease in theory": rate * gap / 16,
        "T_R measured": int(reached[0]) if len(reached) else math.nan,
        "T_R of (16)": math.log(gap / 4 / strengths[0]) / (2 * math.log(growth)),
        "distance": float(far[-1]),
    }


class Orthogonal(LinearTask):
    """Clients with the models φ_i = λ_i u_i for orthonormal u_i (FLUTE, example 1)."""

    @cached_property
    def models(self) -> Matrix:
        """The true models, which keep the singular values of the spectrum."""
        u, values = np.linalg.svd(super().models, full_matrices=False)[:2]
        return np.asarray(u * values)


def example(settings: Own, place: Path) -> Numbers:
    """Return the distance of a representation of width 1 from u_1 (FLUTE, example 1).

    ``average`` stands for the mean of the B_i = φ_i / w_i of clients that recover their
    models perfectly, with heads w_i proportional to λ_i^``power``.
    """
    task = build(Orthogonal, settings, num_clients=int(settings["num-clients"]))
    if settings["algorithm"] == "average":
        w = np.linalg.norm(task.models, axis=0) ** float(settings["power"])
        return {"distance": distance_to(task, (task.models / w).mean(1)[:, None])}
    found: list[float] = []
    train(settings, lambda _, b, __: found.append(distance_to(task, b)))
    return {"distance": found[-1], "distance-20": found[20]}


# SRPFL's speed-up


def clocked(settings: Own) -> Iterator[tuple[float, float]]:
    """Yield the clock and the principal angle distance to B* after each round."""
    settings = resolve({"task": "linear", **settings})
    rounds = Rounds(settings)
    nodes = rounds.strategy._identify(rounds.grid)
    speeds = speed_model(settings, int(settings["num-clients"]))
    assert speeds is not None
    clock = SimulatedArrivals(rounds.grid, speeds, nodes.index)
    rounds.grid = clock
    truth = task_of(settings).representation
    while True:
        b = rounds.run()[WEIGHT].numpy().T
        yield clock.seconds, principal_angle_distance(b, truth)


def reached(found: Iterable[tuple[float, float]], target: float, rounds: int) -> float:
    """Return the time of the first round that reaches the target, or NaN."""
    times = (time for time, far in itertools.islice(found, rounds) if far <= target)
    return next(times, math.nan)


def speedup(settings: Own, place: Path) -> Numbers:
    """Return the times of FedRep and SRPFL until their distance is at a target.

    Fresh batches leave a floor of the distance that decreases like 1/sqrt(N). The
    target is ``slack`` times FedRep's mean distance in the last quarter of its rounds,
    so that fewer clients do not reach it. SRPFL has at most twice as many rounds.
    """
    own = dict(settings)
    slack, rounds = float(own.pop("slack")), int(own["num-server-rounds"])
    theirs = {n: v for n, v in own.items() if n != "rounds-per-stage"}
    fedrep = list(itertools.islice(clocked({**theirs, "algorithm": "fedrep"}), rounds))
    target = slack * fmean(far for _, far in fedrep[-max(1, rounds // 4) :])
    return {
        "target": target,
        "time-of-fedrep": reached(fedrep, target, rounds),
        "time": reached(clocked(own), target, 2 * rounds),
    }


def ratios(config: Any, results: Any) -> Numbers:
    """Return the ratio of mean times, over the seeds in which SRPFL gets there."""
    found: Numbers = {}
    for row, cells in results.items():
        for cell, runs in cells.items():
            both = [r for r in runs if not math.isnan(r.get("time", math.nan))]
            sums = [sum(run[n] for run in both) for n in ("time", "time-of-fedrep")]
            found.setdefault(row, {})[cell] = sums[0] / sums[1] if both else math.nan
            for run in runs:
                run["ratio"] = found[row][cell]
    return {"ratios": found}
