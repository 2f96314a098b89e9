"""Linear FLUTE and FedRep in plain NumPy, for `benchmarks.flute_linear`.

Many seeds are computed at once; the first axis of each array is the seed. Data and
initial values are the package's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp

from benchmarks.fedrep_linear import WEIGHT
from flwr_frl.strategies import FLUTELinear
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.task.base import Matrix
from flwr_frl.task.tasks.linear import LinearTask

DIMENSION, STEP, ROUNDS = 10, 0.03, 500
NAMES = ("FLUTE", "FedRep(RI)", "FedRep", "FedRep, orthonormal")

Errors = dict[str, Matrix]  # by method, rounds × seeds
Run = Iterator[tuple[Matrix, Matrix]]  # B and W, round by round


def flute_start(k: int, seed: int) -> tuple[FLUTELinear, ArrayRecord]:
    """Return FLUTE's strategy and random B⁰, from which FedRep(RI) also starts."""
    strategy = FLUTELinear(dimension=DIMENSION, rank=k, seed=seed)
    return strategy, strategy.initialize(InlineGrid(ClientApp(), 0))


@dataclass(frozen=True)
class Problem:
    """Data and initial values of several seeds, and the true models.

    The squared loss of client i is ½ φᵀ G_i φ − c_iᵀ φ + const at φ = B w_i.
    """

    gram: Matrix  # G, (seeds, clients, d, d)
    cross: Matrix  # c, (seeds, clients, d)
    moments: Matrix  # (seeds, d, d)
    models: Matrix  # (seeds, clients, d)
    best: Matrix  # (seeds,): mean error of the best approximation of rank k
    b: Matrix  # initial B of FLUTE, (seeds, d, k)
    w: Matrix  # (seeds, clients, k)

    @classmethod
    def draw(
        cls, m: int, n: int, k: int, seeds: Sequence[int], spectrum: str = "decaying"
    ) -> Self:
        """Return the problems of several seeds, identical to the package's."""
        parts: list[tuple[Matrix, ...]] = []
        for seed in seeds:
            task = LinearTask(DIMENSION, k, n, 0.3, spectrum, m, seed)
            start, b = flute_start(k, seed)
            w = [start.per_client(f"{i:06d}")["head.weight"][0] for i in range(m)]
            drawn = [task.draw(i) for i in range(m)]
            x, y = (np.array(part) for part in zip(*drawn, strict=True))
            z = x * y[..., None]
            parts.append(
                (
                    x.swapaxes(1, 2) @ x / n,
                    z.sum(axis=1) / n,
                    np.einsum("mni,mnj->ij", z, z) / (m * n),
                    task.models.T,
                    task.best_errors.mean(),
                    b[WEIGHT].numpy().T,
                    np.array(w),
                )
            )
        return cls(*(np.array(part) for part in zip(*parts, strict=True)))

    def error(self, b: Matrix, w: Matrix) -> Matrix:
        """Return mean_i ‖B w_i − φ_i‖ of each seed."""
        error: Matrix = np.linalg.norm(w @ b.swapaxes(1, 2) - self.models, axis=2)
        return error.mean(axis=1)

    def slopes(self, b: Matrix, w: Matrix) -> Matrix:
        """Return each client's gradient with respect to φ_i = B w_i."""
        models = w @ b.swapaxes(1, 2)
        return (self.gram @ models[..., None])[..., 0] - self.cross


def flute(problem: Problem, gamma1: float = 1 / 4, gamma2: float = 1 / 8) -> Run:
    """Yield B and W after each round of linear FLUTE."""
    b, w = problem.b, problem.w
    while True:
        slopes = problem.slopes(b, w)
        bb, ww = b.swapaxes(1, 2) @ b, w.swapaxes(1, 2) @ w
        grad_b = slopes.swapaxes(1, 2) @ w + b @ (4 * gamma2 * bb - 2 * gamma1 * ww)
        grad_w = slopes @ b + w @ (4 * gamma2 * ww - 2 * gamma1 * bb)
        b, w = b - STEP * grad_b, w - STEP * grad_w
        yield b, w


def fedrep(problem: Problem, b: Matrix) -> Run:
    """Yield B and W after each round of linear FedRep with exact heads."""
    while True:
        bt = b.swapaxes(1, 2)[:, None]
        normal, right = bt @ problem.gram @ b[:, None], bt @ problem.cross[..., None]
        w = np.linalg.solve(normal, right)[..., 0]
        b = b - STEP * problem.slopes(b, w).swapaxes(1, 2) @ w / w.shape[1]
        yield b, w


def methods(problem: Problem, seeds: Sequence[int]) -> dict[str, Run]:
    """Return the rounds of every method on a problem."""
    _, d, k = problem.b.shape
    leading = np.linalg.eigh(problem.moments).eigenvectors[:, :, ::-1][:, :, :k]
    # The same draws as in FedRepLinearClient.get_parameters
    keys = [[seed, 0x1417] for seed in seeds]
    draws = [np.random.default_rng(key).standard_normal((d, k)) for key in keys]
    runs = [fedrep(problem, b) for b in (problem.b, leading, np.linalg.qr(draws).Q)]
    return dict(zip(NAMES, (flute(problem), *runs), strict=True))


def curves(problem: Problem, runs: dict[str, Run]) -> Errors:
    """Return each run's error by round, and that of the best approximation."""
    errors = {
        name: np.array([problem.error(*next(run)) for _ in range(ROUNDS)])
        for name, run in runs.items()
    }
    return errors | {"best": problem.best[None]}
