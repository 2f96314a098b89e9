"""Problems of decentralised multi-task optimisation: costs and constraints.

Node i has the cost f_i(x_i, ξ_i) with a random sample ξ_i, and F_i(x_i) is its
expectation (Singh, UCLA 2024, chapter 4, section 4.2). Neighbours i and j must satisfy
g_ij(x_i, x_j) ≤ 0, and every node x_i in X (equation 4.1). The quadratic problem (QCQP)
and logistic regression are from section 4.5.

All functions work on rows: a group of nodes is an array of shape (n, d), and a single
node is a group with n = 1. Random values depend only on the seed and on the node, or on
the two ends of an edge, so a device can build its own part of a problem.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from flwr_frl.common.settings import unknown

Float64s = NDArray[np.float64]
Pairs = NDArray[np.int64]

# First words of the random seeds; they separate the random streams.
_QCQP, _LOGISTIC, _COMMON, _TEST, _OFFSETS = range(0x4D540, 0x4D545)


class Problem(Protocol):
    """The costs of a group of nodes."""

    @property
    def nodes(self) -> tuple[int, ...]:
        """Number of the node of each row."""

    @property
    def dimension(self) -> int:
        """Number of entries d of a node's parameters."""

    def draw(self, row: int, generator: np.random.Generator, count: int) -> Float64s:
        """Draw samples of a node.

        Parameters
        ----------
        row : int
            The node's row.
        generator : numpy.random.Generator
            Source of randomness.
        count : int
            Number of samples.

        Returns
        -------
        ndarray, shape (count, s)
            The samples.
        """

    def value(self, x: Float64s, samples: Float64s) -> Float64s:
        """Return f_i(x_i, ξ_i) of every row, shape (n,), for bandit feedback.

        Parameters
        ----------
        x : ndarray, shape (n, d)
            Parameters.
        samples : ndarray, shape (n, s)
            One sample per node.
        """

    def gradient(self, x: Float64s, samples: Float64s) -> Float64s:
        """Return ∇f_i(x_i, ξ_i) of every row, shape (n, d), for sample feedback.

        See `value` for the parameters.
        """


class KnownProblem(Problem, Protocol):
    """Costs whose expectations are known."""

    def expected(self, x: Float64s) -> Float64s:
        """Return the exact expected costs F_i(x_i), shape (n,), at x, shape (n, d)."""


@dataclass(frozen=True)
class QCQP:
    """Quadratic costs f_i(x, b) = xᵀ A_i x + bᵀ x (section 4.5.1, equation 4.15).

    A_i is drawn once per node from the Wishart distribution with 10 degrees of freedom
    and identity scale. b has independent normal entries and is drawn in each iteration;
    its mean (common to all entries) and its variance are drawn once per node from
    U[0, 1]. This is our reading of the section: "b_i is sampled from a Gaussian
    distribution with mean and variance drawn uniformly at random from the interval
    [0, 1] in each iteration". If the mean were redrawn in each iteration, all nodes
    would have the same expected b.

    Parameters
    ----------
    nodes : tuple of int
        Number of the node of each row.
    a : ndarray, shape (n, d, d)
        A_i, symmetric and positive semidefinite.
    mean, variance : ndarray, shape (n,)
        Mean and variance of the entries of b.
    """

    nodes: tuple[int, ...]
    a: Float64s
    mean: Float64s
    variance: Float64s

    @classmethod
    def create(
        cls, nodes: Sequence[int], seed: int, dimension: int = 10, freedom: int = 10
    ) -> Self:
        """Draw the costs of some nodes.

        They are not strictly convex if ``freedom``, the degrees of freedom of the
        Wishart distribution, is below d.
        """
        matrices, moments = [], []
        for node in nodes:
            generator = np.random.default_rng([_QCQP, seed, node])
            factor = generator.standard_normal((dimension, freedom))
            matrices.append(factor @ factor.T)
            moments.append(generator.random(2))
        mean, variance = np.array(moments).T
        return cls(tuple(nodes), np.array(matrices), mean, variance)

    @property
    def dimension(self) -> int:
        """Number of entries d of a node's parameters."""
        return int(self.a.shape[-1])

    def draw(self, row: int, generator: np.random.Generator, count: int) -> Float64s:
        """Draw b, shape (count, d)."""
        noise = generator.standard_normal((count, self.dimension))
        b: Float64s = self.mean[row] + np.sqrt(self.variance[row]) * noise
        return b

    def value(self, x: Float64s, samples: Float64s) -> Float64s:
        """Return xᵀ A_i x + bᵀ x."""
        return dot(x, self._product(x) + samples)

    def gradient(self, x: Float64s, samples: Float64s) -> Float64s:
        """Return 2 A_i x + b."""
        return 2 * self._product(x) + samples

    def expected(self, x: Float64s) -> Float64s:
        """Return xᵀ A_i x + E[b]ᵀ x."""
        return self.value(x, self.mean[:, None])

    def _product(self, x: Float64s) -> Float64s:
        product: Float64s = (self.a @ x[..., None])[..., 0]
        return product


@dataclass(frozen=True)
class LogisticRegression:
    """Log-loss f_i(x, (p, y)) = log(1 + exp(−y xᵀ p)) (section 4.5.2, equation 4.16).

    p ~ N(0, I_d), and y in {−1, 1} is 1 with probability σ(θ_iᵀ p), σ the logistic
    function. The loss depends on y p only, which is the sample. In the section, the
    true models θ_i are "close (in norm sense) for adjacent nodes". Here
    θ_i = c + s u_i, where c, common to all nodes, and u_i are uniform on the unit
    sphere, so two models differ by at most 2 s, whatever the graph.

    The expectation needs no sampling. With z = xᵀ p ~ N(0, ‖x‖²) it is
    E[log(1 + e^z) − σ(θ_iᵀ p) z]. By Stein's lemma the second term equals
    xᵀ θ_i E σ'(‖θ_i‖ Z) with Z ~ N(0, 1), so both are one-dimensional integrals. θ_i
    minimises F_i, so the true models are optimal if they are feasible (section 4.5.2.2,
    footnote 3).

    Parameters
    ----------
    nodes : tuple of int
        Number of the node of each row.
    models : ndarray, shape (n, d)
        True models θ_i.
    seed : int
        Seed of the test examples.
    """

    nodes: tuple[int, ...]
    models: Float64s
    seed: int

    @classmethod
    def create(
        cls,
        nodes: Sequence[int],
        seed: int,
        dimension: int = 10,
        spread: float = 0.5,
    ) -> Self:
        """Draw the true models of some nodes, at distance s (``spread``) from c."""
        centre = _direction([_COMMON, seed], dimension)
        offsets = [_direction([_LOGISTIC, seed, node], dimension) for node in nodes]
        return cls(tuple(nodes), centre + spread * np.array(offsets), seed)

    @property
    def dimension(self) -> int:
        """Number of entries d of a node's parameters."""
        return int(self.models.shape[-1])

    def draw(self, row: int, generator: np.random.Generator, count: int) -> Float64s:
        """Draw y p, shape (count, d)."""
        p = generator.standard_normal((count, self.dimension))
        positive = generator.random(count) < _sigmoid(dot(p, self.models[row]))
        return np.where(positive[:, None], p, -p)

    def value(self, x: Float64s, samples: Float64s) -> Float64s:
        """Return log(1 + exp(−y xᵀ p))."""
        loss: Float64s = np.logaddexp(0, -dot(x, samples))
        return loss

    def gradient(self, x: Float64s, samples: Float64s) -> Float64s:
        """Return −σ(−y xᵀ p) y p."""
        return -_sigmoid(-dot(x, samples))[:, None] * samples

    def expected(self, x: Float64s) -> Float64s:
        """Return the expected loss, accurate to about 1e-12."""
        slope = _sigmoid(np.linalg.norm(self.models, axis=1)[:, None] * _ABSCISSAE)
        agreement = dot(x, self.models) * ((slope * (1 - slope)) @ _DENSITY)
        z = np.linalg.norm(x, axis=1)[:, None] * _ABSCISSAE
        expectation: Float64s = np.logaddexp(0, z) @ _DENSITY - agreement
        return expectation

    def accuracy(self, x: Float64s, count: int = 500) -> Float64s:
        """Return the accuracy on test examples, shape (n,).

        Each node has 500 of them (section 4.5.2.1); no iteration uses them.
        """
        streams = [np.random.default_rng([_TEST, self.seed, i]) for i in self.nodes]
        tests = [self.draw(row, stream, count) for row, stream in enumerate(streams)]
        correct = (np.array(tests) @ x[..., None])[..., 0] > 0
        return np.asarray(correct.mean(axis=1))


# Trapezoidal rule for E h(Z), Z ~ N(0, 1). The functions above are analytic in a strip
# around the real line, so its error decays exponentially: below 1e-12 for norms up to
# 20.
_ABSCISSAE = np.linspace(-9, 9, 601)
_DENSITY = np.exp(-(_ABSCISSAE**2) / 2)
_DENSITY /= _DENSITY.sum()


def _direction(seed: list[int], dimension: int) -> Float64s:
    """Draw a point on the unit sphere."""
    point = np.random.default_rng(seed).standard_normal(dimension)
    return point / np.linalg.norm(point)


def dot(x: Float64s, y: Float64s) -> Float64s:
    """Return the inner products of corresponding rows.

    Unlike in a matrix product, rounding does not depend on the number of rows.
    """
    product: Float64s = (x * y).sum(axis=-1)
    return product


def _sigmoid(z: Float64s) -> Float64s:
    """Return 1 / (1 + exp(−z)) without overflow."""
    sigmoid: Float64s = np.exp(-np.logaddexp(0, -z))
    return sigmoid


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


def directed(edges: Sequence[tuple[int, int]]) -> Pairs:
    """Return (i, j) and (j, i) of every edge as rows, in lexicographic order."""
    return np.array(sorted([*edges, *((j, i) for i, j in edges)]), np.int64)


# Costs and the interval of the offsets c_ij, by name (section 4.5).
PROBLEMS: dict[str, tuple[type[QCQP] | type[LogisticRegression], float, float]] = {
    "qcqp": (QCQP, -5.0, -3.0),
    "logistic": (LogisticRegression, -10.0, -7.0),
}


def build_problem(
    name: str, nodes: Sequence[int], pairs: Pairs, seed: int
) -> tuple[KnownProblem, Proximity]:
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
        If the name is unknown.
    """
    if name not in PROBLEMS:
        raise unknown("problem", name, PROBLEMS)
    kind, low, high = PROBLEMS[name]
    problem: KnownProblem = kind.create(nodes, seed)
    return problem, Proximity.create(pairs, seed, low, high)
