"""Constraints of decentralised multi-task optimisation.

Neighbours i and j must satisfy g_ij(x_i, x_j) ≤ 0, and every node x_i in X (Singh,
UCLA 2024, chapter 4, equation 4.1). All functions work on rows, one per edge or point.
Random values of an edge depend on the seed and the edge's two ends only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from flwr_frl.task.saddle_point.problems import (
    QCQP,
    Float64s,
    LogisticRegression,
    Problem,
    dot,
)
from flwr_frl.task.settings import require, unknown

Pairs = NDArray[np.int64]

# First word of the seeds of the offsets; see `flwr_frl.task.saddle_point.problems`.
_OFFSETS = 0x4D544

# Costs and the interval of the offsets c_ij, by name (section 4.5).
PROBLEMS: dict[str, tuple[type[QCQP] | type[LogisticRegression], float, float]] = {
    "qcqp": (QCQP, -5.0, -3.0),
    "logistic": (LogisticRegression, -10.0, -7.0),
}


class PairConstraint(Protocol):
    """A jointly convex and symmetric function g_ij(x_i, x_j) for each of E edges."""

    def value(self, x_i: Float64s, x_j: Float64s) -> Float64s:
        """Return g_ij, shape (E,), at x_i and x_j of every edge, shape (E, d)."""

    def gradient(self, x_i: Float64s, x_j: Float64s) -> Float64s:
        """Return the gradient of g_ij with respect to x_i, shape (E, d)."""


@dataclass(frozen=True)
class Proximity:
    """g_ij(x_i, x_j) = ‖x_i − x_j‖² + c_ij (section 4.5).

    Parameters
    ----------
    pairs : ndarray of int, shape (E, 2)
        The edges (i, j).
    offsets : ndarray, shape (E,)
        c_ij ≤ 0, as no point is feasible otherwise.
    """

    pairs: Pairs
    offsets: Float64s

    @classmethod
    def create(cls, pairs: Pairs, seed: int, low: float, high: float) -> Self:
        """Draw c_ij from U[low, high], identical at both ends of an edge."""
        ends = np.sort(pairs, axis=1).tolist()
        draws = [np.random.default_rng([_OFFSETS, seed, *end]).random() for end in ends]
        return cls(pairs, low + (high - low) * np.array(draws))

    def value(self, x_i: Float64s, x_j: Float64s) -> Float64s:
        """Return ‖x_i − x_j‖² + c_ij."""
        difference = x_i - x_j
        return dot(difference, difference) + self.offsets

    def gradient(self, x_i: Float64s, x_j: Float64s) -> Float64s:
        """Return 2 (x_i − x_j)."""
        return 2 * (x_i - x_j)


class ConvexSet(Protocol):
    """A closed, convex and bounded set X."""

    def project(self, x: Float64s) -> Float64s:
        """Return the point of X nearest to each row of `x`, shape (n, d)."""

    def shrunk(self, zeta: float) -> "ConvexSet":
        """Return {(1 − ζ/r) x + (ζ/r) y0: x in X} (section 4.4).

        B(y0, r) is a ball inside X. All points within ζ of the result lie in X.

        Parameters
        ----------
        zeta : float
            The perturbation ζ, in (0, r).

        Raises
        ------
        SettingsError
            If `zeta` is out of range.
        """


@dataclass(frozen=True)
class Ball:
    """A ball around the origin.

    Parameters
    ----------
    radius : float, default 20
        R/2; chapter 4 has R = 40.

    Raises
    ------
    SettingsError
        If the radius is not a positive number.
    """

    radius: float = 20.0

    def __post_init__(self) -> None:
        """Check the radius."""
        require(0 < self.radius < np.inf, "the ball's radius", self.radius, "above 0")

    def project(self, x: Float64s) -> Float64s:
        """Scale each row to a length of at most the radius."""
        norms = np.sqrt(dot(x, x))
        return x * (self.radius / np.maximum(norms, self.radius))[:, None]

    def shrunk(self, zeta: float) -> "Ball":
        """Return the ball with radius reduced by ζ."""
        allowed = f"above 0 and below {self.radius}"
        require(0 < zeta < self.radius, "zeta", zeta, allowed)
        return Ball(self.radius - zeta)


def directed(edges: Sequence[tuple[int, int]]) -> Pairs:
    """Return (i, j) and (j, i) of every edge as rows, in lexicographic order."""
    return np.array(sorted([*edges, *((j, i) for i, j in edges)]), np.int64)


def build_problem(
    name: str, nodes: Sequence[int], pairs: Pairs, seed: int
) -> tuple[Problem, Proximity]:
    """Draw one of the chapter's problems (section 4.5) with proximity constraints.

    Parameters
    ----------
    name : {"qcqp", "logistic"}
        The problem, with c_ij from U[−5, −3] or U[−10, −7].
    nodes : sequence of int
        The nodes.
    pairs : ndarray of int, shape (E, 2)
        Their edges (i, j), where i is one of the nodes.
    seed : int
        At least 0.

    Raises
    ------
    SettingsError
        If the name is unknown or a number is out of range.
    """
    if name not in PROBLEMS:
        raise unknown("problem", name, PROBLEMS)
    kind, low, high = PROBLEMS[name]
    problem = kind.create(nodes, seed)
    return problem, Proximity.create(pairs, seed, low, high)
