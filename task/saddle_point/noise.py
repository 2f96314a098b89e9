"""Random samples and perturbations of the saddle-point method (Singh 2024, ch. 4)."""

from typing import Literal

import numpy as np

from flwr_frl.task.saddle_point.problems import Float64s, Problem

# First word of the random seeds, after those of the problems.
_NOISE = 0x4D546
# Iterations per block of noise, and the largest number of values in a block of more
# than one iteration.
_BLOCK, _VALUES = 64, 2**20
# Distributions of the perturbations of bandit feedback.
Direction = Literal["sphere", "bernoulli", "gaussian"]


class Noise:
    """Random samples and directions of each iteration.

    Each node draws them in blocks of 64 iterations, with one random stream per block. A
    device that keeps nothing between messages redraws a block to use one row, which is
    cheap; a long run draws every block once. With many parameters, blocks are shorter.

    Parameters
    ----------
    problem : Problem
        The costs.
    seed : int
        At least 0.
    direction : {"sphere", "bernoulli", "gaussian", ""}, default "sphere"
        Distribution of u_i, with E u uᵀ = I / d for each: uniform on the unit sphere;
        ±1 / √d with equal probability (symmetric Bernoulli); N(0, I / d) (section
        4.4.1). The length is 1 except for ``gaussian``, whose x ± ζ u can lie outside
        of X, where the costs must then be defined. "" draws none, for sample feedback.
    block : int, default 64
        Largest number of iterations in a block.
    """

    def __init__(
        self,
        problem: Problem,
        seed: int,
        direction: Direction | Literal[""] = "sphere",
        block: int = _BLOCK,
    ) -> None:
        self.problem, self.seed, self.direction = problem, seed, direction
        self.block = max(1, min(block, _VALUES // problem.dimension))
        self._drawn: tuple[int, Float64s, Float64s] | None = None

    def at(self, iteration: int) -> tuple[Float64s, Float64s]:
        """Return the samples and directions of an iteration, counted from 1.

        Returns
        -------
        samples : ndarray, shape (n, s)
            One sample per node (Algorithm 2, line 9).
        directions : ndarray, shape (n, d)
            u_i, by default uniform on the unit sphere (Algorithm 3, line 9). They do
            not affect the samples.
        """
        block, row = divmod(iteration - 1, self.block)
        if self._drawn is None or self._drawn[0] != block:
            self._drawn = (block, *self._draw(block))
        _, samples, directions = self._drawn
        return samples[:, row], directions[:, row]

    def _draw(self, block: int) -> tuple[Float64s, Float64s]:
        samples, directions = [], []
        for row, node in enumerate(self.problem.nodes):
            stream = np.random.default_rng([_NOISE, self.seed, node, block])
            samples.append(self.problem.draw(row, stream, self.block))
            dimension = self.problem.dimension if self.direction else 0
            normal = stream.standard_normal((self.block, dimension))
            directions.append(self._scaled(normal))
        return np.array(samples), np.array(directions)

    def _scaled(self, normal: Float64s) -> Float64s:
        """Return directions from standard normal entries, one in each row."""
        if not self.direction:
            return normal
        if self.direction == "sphere":
            sphere: Float64s = normal / np.linalg.norm(normal, axis=1, keepdims=True)
            return sphere
        entries = np.sign(normal) if self.direction == "bernoulli" else normal
        scaled: Float64s = entries / np.sqrt(self.problem.dimension)
        return scaled


def two_point_gradient(
    problem: Problem, x: Float64s, samples: Float64s, directions: Float64s, zeta: float
) -> Float64s:
    """Estimate gradients from two function values (Algorithm 3, lines 10 and 11).

    For u on the sphere, (d / 2ζ) [f(x + ζ u) − f(x − ζ u)] u is an unbiased estimate of
    the gradient of E f(x + ζ v), v uniform on the unit ball (section 4.4, Fact 1). For
    a quadratic f, and any u with E u uᵀ = I / d, it is an unbiased estimate of the
    gradient of f.

    Parameters
    ----------
    problem : Problem
        The costs f of n nodes.
    x : ndarray, shape (n, d)
        The points.
    samples : ndarray, shape (n, s)
        One sample per node, used for both values.
    directions : ndarray, shape (n, d)
        u, from `Noise`.
    zeta : float
        ζ > 0.

    Returns
    -------
    ndarray, shape (n, d)
        The estimates.
    """
    ahead = problem.value(x + zeta * directions, samples)
    behind = problem.value(x - zeta * directions, samples)
    slope = problem.dimension / (2 * zeta) * (ahead - behind)
    return slope[:, None] * directions
