"""The costs of decentralised multi-task optimisation: QCQP and logistic regression.

Node i has the cost f_i(x_i, sample), and F_i(x_i) is its expectation over the samples
(Singh, UCLA 2024, chapter 4, section 4.2). The two problems are those of section 4.5.

Everything is written for rows: a group of nodes is an array of shape (n, d), and a
single node a group with n = 1. What is drawn for a node depends on the seed and on the
node only, so that a device can build its own part without the others'.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from flwr_frl.task.settings import require

Float64s = NDArray[np.float64]

# First words of the seeds, so that no two of the streams below are the same one.
_QCQP, _LOGISTIC, _COMMON, _TEST = range(0x4D540, 0x4D544)


class Problem(Protocol):
    """The costs of a group of nodes.

    `nodes` are their numbers, one for each row, and `dimension` is d.
    """

    @property
    def nodes(self) -> tuple[int, ...]:
        """Number of the node of each row."""

    @property
    def dimension(self) -> int:
        """Number of entries d of a node's parameters."""

    def draw(self, row: int, generator: np.random.Generator, count: int) -> Float64s:
        """Draw samples of one node.

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
        """Evaluate f_i(x_i, sample_i) of every row.

        Parameters
        ----------
        x : ndarray, shape (n, d)
            Parameters.
        samples : ndarray, shape (n, s)
            One sample for each node.

        Returns
        -------
        ndarray, shape (n,)
            The costs: what bandit feedback consists of.
        """

    def gradient(self, x: Float64s, samples: Float64s) -> Float64s:
        """Differentiate f_i(x_i, sample_i) with respect to x_i for every row.

        Parameters
        ----------
        x : ndarray, shape (n, d)
            Parameters.
        samples : ndarray, shape (n, s)
            One sample for each node.

        Returns
        -------
        ndarray, shape (n, d)
            The gradients: what sample feedback consists of.
        """

    def expected(self, x: Float64s) -> Float64s:
        """Evaluate the expected costs F_i(x_i).

        Parameters
        ----------
        x : ndarray, shape (n, d)
            Parameters.

        Returns
        -------
        ndarray, shape (n,)
            The costs, without sampling error.
        """


@dataclass(frozen=True)
class QCQP:
    """Quadratic costs f_i(x, b) = x^T A_i x + b^T x (section 4.5.1, equation 4.15).

    A_i is drawn once for each node from the Wishart distribution of 10 degrees of
    freedom with identity scale. b has independent normal entries and is drawn anew in
    each iteration; its mean (the same for all entries) and its variance are drawn once
    for each node from U[0, 1]. That is our reading of the section, which says "b_i is
    sampled from a Gaussian distribution with mean and variance drawn uniformly at
    random from the interval [0, 1] in each iteration": means drawn again in each
    iteration would have every node aim at the mean 1/2.

    Parameters
    ----------
    nodes : tuple of int
        Number of the node of each row.
    a : ndarray, shape (n, d, d)
        A_i, symmetric and positive semidefinite.
    mean, variance : ndarray, shape (n,)
        Of the entries of b.
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

        They are not strictly convex where ``freedom`` (Wishart's) is below d.

        Raises
        ------
        SettingsError
            If the seed is below 0, or d or ``freedom`` below 1.
        """
        _check(nodes, seed, dimension)
        require(freedom >= 1, "the degrees of freedom", freedom, "at least 1")
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
        """Evaluate x^T A_i x + b^T x."""
        return dot(x, self._product(x) + samples)

    def gradient(self, x: Float64s, samples: Float64s) -> Float64s:
        """Evaluate 2 A_i x + b."""
        return 2 * self._product(x) + samples

    def expected(self, x: Float64s) -> Float64s:
        """Evaluate x^T A_i x + E b^T x."""
        return self.value(x, self.mean[:, None])

    def _product(self, x: Float64s) -> Float64s:
        product: Float64s = (self.a @ x[..., None])[..., 0]
        return product


@dataclass(frozen=True)
class LogisticRegression:
    """Log-loss f_i(x, (p, y)) = log(1 + exp(-y x^T p)) (section 4.5.2, equation 4.16).

    p ~ N(0, I_d), and y in {-1, 1} is 1 with probability 1 / (1 + exp(-theta_i^T p)).
    A sample is stored as y p, all that the loss needs. The section wants the true
    models theta_i "close (in norm sense) for adjacent nodes"; here theta_i = c + s u_i
    with c, common to all nodes, and u_i uniform on the unit sphere, so that no two
    nodes are further apart than 2 s, whatever the graph.

    The expectation needs no sampling. With z = x^T p ~ N(0, ||x||^2) it is
    E[log(1 + e^z) - sigma(theta_i^T p) z], and Stein's lemma turns the second term into
    x^T theta_i E sigma'(||theta_i|| Z), Z ~ N(0, 1): two integrals over a line. Without
    constraints F_i is least at theta_i, so that the true models are the optimum
    wherever they are feasible (section 4.5.2.2, footnote 3).

    Parameters
    ----------
    nodes : tuple of int
        Number of the node of each row.
    models : ndarray, shape (n, d)
        True models theta_i.
    seed : int
        Of the test examples.
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
        """Draw the true models of some nodes, at distance s (``spread``) from c.

        Raises
        ------
        SettingsError
            If the seed or ``spread`` is below 0, or d below 1.
        """
        _check(nodes, seed, dimension)
        require(spread >= 0, "the spread of the models", spread, "at least 0")
        centre = _direction([_COMMON, seed], dimension)
        own = [_direction([_LOGISTIC, seed, node], dimension) for node in nodes]
        return cls(tuple(nodes), centre + spread * np.array(own), seed)

    @property
    def dimension(self) -> int:
        """Number of entries d of a node's parameters."""
        return int(self.models.shape[-1])

    def draw(self, row: int, generator: np.random.Generator, count: int) -> Float64s:
        """Draw y p, shape (count, d)."""
        p = generator.standard_normal((count, self.dimension))
        likely = generator.random(count) < _sigmoid(dot(p, self.models[row]))
        return np.where(likely[:, None], p, -p)

    def value(self, x: Float64s, samples: Float64s) -> Float64s:
        """Evaluate the loss."""
        loss: Float64s = np.logaddexp(0, -dot(x, samples))
        return loss

    def gradient(self, x: Float64s, samples: Float64s) -> Float64s:
        """Evaluate -sigma(-y x^T p) y p."""
        return -_sigmoid(-dot(x, samples))[:, None] * samples

    def expected(self, x: Float64s) -> Float64s:
        """Evaluate the expected loss to about 1e-12."""
        slope = _sigmoid(np.linalg.norm(self.models, axis=1)[:, None] * _ABSCISSAE)
        agreement = dot(x, self.models) * ((slope * (1 - slope)) @ _DENSITY)
        z = np.linalg.norm(x, axis=1)[:, None] * _ABSCISSAE
        expectation: Float64s = np.logaddexp(0, z) @ _DENSITY - agreement
        return expectation

    def accuracy(self, x: Float64s, count: int = 500) -> Float64s:
        """Return the fraction of examples whose sign is right, shape (n,).

        The examples, 500 for each node (section 4.5.2.1), are drawn by no iteration.
        """
        streams = [np.random.default_rng([_TEST, self.seed, i]) for i in self.nodes]
        tests = [self.draw(row, stream, count) for row, stream in enumerate(streams)]
        right = (np.array(tests) @ x[..., None])[..., 0] > 0
        return np.asarray(right.mean(axis=1))


# The trapezoidal rule for E h(Z), Z ~ N(0, 1). For the functions above, analytic in a
# strip around the line, its error falls exponentially: below 1e-12 for norms up to 20.
_ABSCISSAE = np.linspace(-9, 9, 601)
_DENSITY = np.exp(-(_ABSCISSAE**2) / 2)
_DENSITY /= _DENSITY.sum()


def _check(nodes: Sequence[int], seed: int, dimension: int) -> None:
    require(len(nodes) >= 1, "the nodes", tuple(nodes), "one or more")
    require(min(nodes) >= 0, "a node", min(nodes), "at least 0")
    require(seed >= 0, "seed", seed, "at least 0")
    require(dimension >= 1, "dimension", dimension, "at least 1")


def _direction(seed: list[int], dimension: int) -> Float64s:
    """Draw a point of the unit sphere."""
    point = np.random.default_rng(seed).standard_normal(dimension)
    return point / np.linalg.norm(point)


def dot(x: Float64s, y: Float64s) -> Float64s:
    """Give the inner products of rows.

    A sum, not a matrix product: it does not depend on how many rows there are.
    """
    product: Float64s = (x * y).sum(axis=-1)
    return product


def _sigmoid(z: Float64s) -> Float64s:
    """Give 1 / (1 + exp(-z)) without overflow."""
    sigmoid: Float64s = np.exp(-np.logaddexp(0, -z))
    return sigmoid
