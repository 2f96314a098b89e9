"""Pair constraints and convex sets of decentralised multi-task optimisation.

Neighbours i and j are bound by g_ij(x_i, x_j) <= 0, and every node by x_i in X (Singh,
UCLA 2024, chapter 4, equation 4.1). As in ``flwr_frl.task.saddle_point.problems``
everything is written for rows, here one for each edge or point. What is drawn for an
edge depends on the seed and the edge's two ends only.
"""

from collections.abc import Callable, Sequence
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

# First word of the seeds of the offsets; see ``flwr_frl.task.saddle_point.problems``.
_OFFSETS = 0x4D544

# The costs, and the interval of the offsets c_ij, by name (section 4.5).
PROBLEMS: dict[str, tuple[type[QCQP] | type[LogisticRegression], float, float]] = {
    "qcqp": (QCQP, -5.0, -3.0),
    "logistic": (LogisticRegression, -10.0, -7.0),
}


class PairConstraint(Protocol):
    """g_ij(x_i, x_j), convex in both together and symmetric, on a list of edges."""

    def value(self, own: Float64s, other: Float64s) -> Float64s:
        """Evaluate g_ij.

        Parameters
        ----------
        own, other : ndarray, shape (E, d)
            x_i and x_j of every edge.

        Returns
        -------
        ndarray, shape (E,)
            The values; the constraint holds where they are at most 0.
        """

    def gradient(self, own: Float64s, other: Float64s) -> Float64s:
        """Differentiate g_ij with respect to x_i.

        Parameters
        ----------
        own, other : ndarray, shape (E, d)
            x_i and x_j of every edge.

        Returns
        -------
        ndarray, shape (E, d)
            The gradients.
        """


@dataclass(frozen=True)
class PairFunction:
    """Any convex, symmetric pair function, given as `PairConstraint` describes it."""

    value: Callable[[Float64s, Float64s], Float64s]
    gradient: Callable[[Float64s, Float64s], Float64s]


@dataclass(frozen=True)
class Proximity:
    """g_ij(x_i, x_j) = ||x_i - x_j||^2 + c_ij (section 4.5).

    Parameters
    ----------
    pairs : ndarray of int, shape (E, 2)
        The edges (i, j).
    offsets : ndarray, shape (E,)
        c_ij: at most 0, or nothing is feasible.

    Raises
    ------
    SettingsError
        If an offset is above 0 or NaN.
    """

    pairs: Pairs
    offsets: Float64s

    def __post_init__(self) -> None:
        """Check the offsets."""
        for (i, j), offset in zip(self.pairs, self.offsets, strict=True):
            allowed = "at most 0: no squared distance is below 0"
            require(bool(offset <= 0), f"c_{i},{j}", float(offset), allowed)

    @classmethod
    def create(cls, pairs: Pairs, seed: int, low: float, high: float) -> Self:
        """Draw c_ij from U[low, high], the same at both ends of an edge.

        The edges can have any direction; the seed is at least 0.

        Raises
        ------
        SettingsError
            If the interval is empty or reaches above 0.
        """
        require(
            low <= high <= 0, "the interval of c_ij", (low, high), "low <= high <= 0"
        )
        ends = np.sort(pairs, axis=1).tolist()
        draws = [np.random.default_rng([_OFFSETS, seed, *end]).random() for end in ends]
        return cls(pairs, low + (high - low) * np.array(draws))

    def value(self, own: Float64s, other: Float64s) -> Float64s:
        """Evaluate ||x_i - x_j||^2 + c_ij."""
        apart = own - other
        return dot(apart, apart) + self.offsets

    def gradient(self, own: Float64s, other: Float64s) -> Float64s:
        """Evaluate 2 (x_i - x_j)."""
        return 2 * (own - other)


class ConvexSet(Protocol):
    """X: what projects onto it, and onto its shrunk copy."""

    def project(self, x: Float64s) -> Float64s:
        """Give the nearest point of X to every row.

        Parameters
        ----------
        x : ndarray, shape (n, d)
            Points.

        Returns
        -------
        ndarray, shape (n, d)
            Points of X.
        """

    def shrunk(self, zeta: float) -> "ConvexSet":
        """Give {(1 - zeta/r) x + (zeta/r) y0: x in X} (section 4.4).

        B(y0, r) is a ball inside X; every point of the result is a distance of zeta
        away from whatever is outside X.

        Parameters
        ----------
        zeta : float
            The perturbation, in (0, r).

        Returns
        -------
        ConvexSet
            The smaller set.

        Raises
        ------
        SettingsError
            If zeta is out of range.
        """


@dataclass(frozen=True)
class Ball:
    """The ball around the origin.

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
        """Scale rows that are too long."""
        norms = np.sqrt(dot(x, x))
        return x * (self.radius / np.maximum(norms, self.radius))[:, None]

    def shrunk(self, zeta: float) -> "Ball":
        """Give the ball whose radius is less by zeta."""
        _check_zeta(zeta, self.radius)
        return Ball(self.radius - zeta)


@dataclass(frozen=True)
class Projection:
    """Any closed, convex and bounded X, given by its projection.

    Parameters
    ----------
    project : callable
        Rows of shape (n, d) to the nearest points of X.
    centre : ndarray, shape (d,), optional
        y0, the centre of a ball inside X; the origin by default.
    radius : float, default 1
        r, that ball's radius: only bandit feedback needs it.

    Raises
    ------
    SettingsError
        If the radius is not a positive number.
    """

    project: Callable[[Float64s], Float64s]
    centre: Float64s | float = 0.0
    radius: float = 1.0

    def __post_init__(self) -> None:
        """Check the radius."""
        require(0 < self.radius < np.inf, "the inner radius", self.radius, "above 0")

    def shrunk(self, zeta: float) -> "Projection":
        """Project onto a scaled and moved copy of X."""
        _check_zeta(zeta, self.radius)
        moved, kept = zeta / self.radius * self.centre, 1 - zeta / self.radius

        def project(x: Float64s) -> Float64s:
            return kept * self.project((x - moved) / kept) + moved

        return Projection(project, self.centre, self.radius - zeta)


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
        The problem, with c_ij from U[-5, -3] or U[-10, -7].
    nodes : sequence of int
        The nodes wanted.
    pairs : ndarray of int, shape (E, 2)
        Their edges, each node's own number first.
    seed : int
        At least 0.

    Raises
    ------
    SettingsError
        If the name is not known or a number is out of range.
    """
    if name not in PROBLEMS:
        raise unknown("problem", name, PROBLEMS)
    kind, low, high = PROBLEMS[name]
    problem = kind.create(nodes, seed)
    return problem, Proximity.create(pairs, seed, low, high)


def _check_zeta(zeta: float, radius: float) -> None:
    require(0 < zeta < radius, "zeta", zeta, f"above 0 and below {radius}")
