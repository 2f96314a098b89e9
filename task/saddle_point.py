"""Decentralised multi-task optimisation: Algorithms 2 and 3 of Singh, UCLA 2024, ch. 4.

minimise Σ_i F_i(x_i) subject to g_ij(x_i, x_j) ≤ 0 for neighbours i, j and x_i in X
(equation 4.1): a stochastic saddle-point method on the Lagrangian of equation 4.3, with
compressed communication. Node i has three versions of its parameters:

=========  =========================================================================
raw        x̃_i, private; gradient steps are applied to it
copy       x̂_i, known to the neighbours; each message adds C(x̃_i − x̂_i) to it
point      x_i, the copy projected onto X; gradients are evaluated at it
=========  =========================================================================

An iteration of a node consists of ``send``, ``receive`` and ``iterate``, which work on
a group of nodes, stored as rows of arrays; a device has a group of one. Computation is
in float64. Most messages are float32; as each is a difference to the copy, which sender
and receivers update by the decoded message, its rounding error does not accumulate.

If the constraints concern only some entries of the parameters, such as a head, only
these are exchanged. For the other entries, which no other node has, x̂_i equals x̃_i.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from flwr_frl.common.compression import Compressor, Identity
from flwr_frl.common.simplex import nearest_in_simplex

Float64s = NDArray[np.float64]
Pairs = NDArray[np.int64]
# Shapes of the convex set X.
Shape = Literal["ball", "box", "simplex"]
# Distributions of the perturbations of bandit feedback; "" is sample feedback.
Direction = Literal["sphere", "bernoulli", "gaussian"]
AnyDirection = Direction | Literal[""]

# First words of the random seeds; they separate the random streams from each other and
# from those of the problems.
START, NOISE, EXCHANGE = 0x4D545, 0x4D546, 0x4D547
# Iterations per block of noise
BLOCK = 64


class Problem(Protocol):
    """The costs f_i(x_i, ξ_i) of a group of nodes, with random samples ξ_i."""

    @property
    def nodes(self) -> tuple[int, ...]:
        """Number of the node of each row, increasing."""

    @property
    def dimension(self) -> int:
        """Number of entries d of a node's parameters."""

    def draw(self, row: int, generator: np.random.Generator, count: int) -> Float64s:
        """Draw samples of the node of a row, shape (count, s)."""

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


@dataclass(frozen=True)
class Proximity:
    """The constraints g_ij(x_i, x_j) = ‖x_i − x_j‖² + c_ij of E edges (section 4.5).

    For other convex constraints, override `value` and `gradient` in a subclass. Both
    ends of an edge evaluate it, so g_ij(x, y) must equal g_ji(y, x).

    Parameters
    ----------
    pairs : ndarray of int, shape (E, 2)
        The edges (i, j) from a node i of a group to a neighbour j, in lexicographic
        order. Every node has at least one.
    offsets : ndarray, shape (E,)
        c_ij ≤ 0, as no point is feasible otherwise; the same at both ends of an edge.
    """

    pairs: Pairs
    offsets: Float64s

    def value(self, x_i: Float64s, x_j: Float64s) -> Float64s:
        """Return g_ij, shape (E,), at x_i and x_j of every edge, shape (E, d)."""
        difference = x_i - x_j
        return dot(difference, difference) + self.offsets

    def gradient(self, x_i: Float64s, x_j: Float64s) -> Float64s:
        """Return the gradient of g_ij with respect to x_i, shape (E, d)."""
        return 2 * (x_i - x_j)


def nearest(x: Float64s, shape: Shape, radius: float) -> Float64s:
    """Return the points of a convex set that are nearest to the rows of x.

    Parameters
    ----------
    x : ndarray, shape (n, d)
        The points.
    shape : {"ball", "box", "simplex"}
        ‖x‖ ≤ r, |x_k| ≤ r for every entry, or x_k ≥ 0 with Σ_k x_k = r.
    radius : float
        r > 0. The first two sets are the whole space if it is ∞.
    """
    if radius == math.inf or not x.size:
        return x
    if shape == "box":
        return np.clip(x, -radius, radius)
    if shape == "simplex":
        return nearest_in_simplex(x, radius)
    return x * (radius / np.maximum(np.sqrt(dot(x, x)), radius))[:, None]


def diameter(shape: Shape, radius: float, dimension: int) -> float:
    """Return the largest distance of two points of a set of `nearest`."""
    of = {"ball": 2.0, "box": 2 * math.sqrt(dimension), "simplex": math.sqrt(2)}
    return of[shape] * radius


class Noise:
    """Random samples and directions of each iteration.

    Each node draws them in blocks of 64 iterations, with one random stream per block. A
    device that keeps nothing between messages redraws a block to use one row, which is
    cheap; a long run draws every block once.

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
        Number of iterations in a block; 1 if there are many parameters.
    """

    def __init__(
        self,
        problem: Problem,
        seed: int,
        direction: AnyDirection = "sphere",
        block: int = BLOCK,
    ) -> None:
        self.problem, self.seed, self.direction = problem, seed, direction
        self.block = block
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
        dimension = self.problem.dimension if self.direction else 0
        for row, node in enumerate(self.problem.nodes):
            stream = np.random.default_rng([NOISE, self.seed, node, block])
            samples.append(self.problem.draw(row, stream, self.block))
            directions.append(stream.standard_normal((self.block, dimension)))
        u = np.array(directions)
        if self.direction == "sphere":
            u /= np.linalg.norm(u, axis=2, keepdims=True)
        elif self.direction:
            u = np.sign(u) if self.direction == "bernoulli" else u
            u /= np.sqrt(dimension)
        return np.array(samples), u


@dataclass
class State:
    """State of a group of n nodes with E directed edges.

    The names of the fields are also the keys of a client's saved state.

    Parameters
    ----------
    raw : ndarray, shape (n, d)
        Raw parameters x̃_i.
    copy : ndarray, shape (n, d)
        The nodes' own public copies x̂_i.
    known : ndarray, shape (E, d) or (E, number of exchanged entries)
        For each edge (i, j), node i's version of its neighbour's copy x̂_j.
    duals : ndarray, shape (E,)
        Dual variables λ_ij.
    average : ndarray, shape (n, d)
        Mean of the points of all iterations so far: the algorithms' output.
    iteration : int
        Number of completed iterations.
    """

    raw: Float64s
    copy: Float64s
    known: Float64s
    duals: Float64s
    average: Float64s
    iteration: int = 0

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return all fields as arrays, by name."""
        return {f.name: np.asarray(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Self:
        """Return a state with copies of the arrays that `arrays` returned."""
        values: Any = {f.name: np.array(arrays[f.name]) for f in fields(cls)}
        return cls(**{**values, "iteration": int(values["iteration"])})


def exchange_stream(seed: int, node: int, iteration: int) -> np.random.Generator:
    """Return the generator for a node's message in an iteration, counted from 1."""
    return np.random.default_rng([EXCHANGE, seed, node, iteration])


@dataclass(frozen=True, eq=False)
class SaddlePoint:
    """Algorithms 2 (sample feedback) and 3 (bandit feedback) for a group of nodes.

    Parameters
    ----------
    problem : Problem
        The costs of the group's nodes.
    constraint : Proximity
        g_ij of the group's edges.
    radius : float, default 20
        r of X, see `nearest`; chapter 4 has a ball of diameter R = 40, and the theory
        needs a bounded X.
    step : float, default 1e-3
        Step size η > 0.
    regularizer : float, default 100
        δ > 0. δ η² ≤ 1 keeps the factor 1 − δ η² of the dual variables non-negative
        (appendix B).
    zeta : float, default 0
        Perturbation ζ of bandit feedback, below the radius of X (1e-4 in section 4.5);
        0 means sample feedback.
    private : int, default 0
        Number of first entries that are not exchanged, as the constraints do not
        concern them. If there are any, X is the product of two sets of the same
        shape and radius, one for these entries and one for the others.
    shape : {"ball", "box", "simplex"}, default "ball"
        Shape of X. A simplex allows no bandit feedback, as x ± ζ u leaves it.
    """

    problem: Problem
    constraint: Proximity
    radius: float = 20.0
    step: float = 1e-3
    regularizer: float = 100.0
    zeta: float = 0.0
    private: int = 0
    shape: Shape = "ball"

    @cached_property
    def _row(self) -> NDArray[np.int64]:
        """Row of the node i of each edge (i, j)."""
        return np.searchsorted(self.problem.nodes, self.constraint.pairs[:, 0])

    @cached_property
    def _first_edge(self) -> NDArray[np.int64]:
        """Index of each node's first edge."""
        return np.searchsorted(self._row, np.arange(len(self.problem.nodes)))

    def start(self, seed: int, initial: Float64s | None = None) -> State:
        """Return the state before the first iteration: x̃ in X, all else zero.

        The chapter has a random x̃, but names no distribution; by default we project
        samples of N(0, I_d). They are rounded to float32, because the first message
        contains uncompressed float32, and the algorithms require that x̂ = x̃ after it.

        Parameters
        ----------
        seed : int
            Seed of the samples.
        initial : ndarray, shape (n, d), optional
            Points to project instead of samples, such as a model's initial parameters.
        """
        nodes, d = self.problem.nodes, self.problem.dimension
        if initial is None:
            streams = [np.random.default_rng([START, seed, node]) for node in nodes]
            initial = np.array([stream.standard_normal(d) for stream in streams])
        raw = self._projected(initial).astype(np.float32).astype(np.float64)
        edges, zero = len(self._row), np.zeros_like(raw)
        known = np.zeros((edges, d - self.private))
        return State(raw, zero, known, np.zeros(edges), zero.copy())

    def point(self, state: State) -> Float64s:
        """Return x_i as of the last message: the projected copies (line 6)."""
        return self._projected(state.copy)

    def constraints(self, state: State) -> Float64s:
        """Return g_ij(x_i, x_j) of every edge, as of the last messages."""
        ends = self._ends(self.point(state))
        return self.constraint.value(ends, self._in_set(state.known))

    def _in_set(self, x: Float64s) -> Float64s:
        """Return the points of X nearest to the rows, of one of its factors.

        For bandit feedback, they are in {(1 − ζ/r) x: x in X} for the radius r, so that
        all points within ζ of them are in X (section 4.4).
        """
        return nearest(x, self.shape, self.radius - self.zeta)

    def _projected(self, x: Float64s) -> Float64s:
        """Return the points of X nearest to the rows of `x`, shape (n, d)."""
        parts = x[:, : self.private], x[:, self.private :]
        return np.concatenate([self._in_set(part) for part in parts], axis=1)

    def _ends(self, x: Float64s) -> Float64s:
        """Return the exchanged entries of the node i of each edge (i, j)."""
        return x[self._row, self.private :]

    def send(
        self, state: State, compressor: Compressor, stream: np.random.Generator
    ) -> bytes:
        """Compress x̃ − x̂ of a single node and update its own copy (lines 2 to 5).

        Parameters
        ----------
        state : State
            State of a group of one; its copy is updated.
        compressor : Compressor
            The operator C; the first message is not compressed.
        stream : numpy.random.Generator
            See `exchange_stream`.

        Returns
        -------
        bytes
            The message, the same for all neighbours.
        """
        used = Identity() if state.iteration == 0 else compressor
        difference = (state.raw - state.copy)[0, self.private :]
        rows = difference[None].astype(np.float32)
        (message,), sent = used.compress_rows(rows, [lambda: stream])
        known = state.copy[:, self.private :] + sent
        state.copy = np.concatenate([state.raw[:, : self.private], known], axis=1)
        return message

    def receive(self, state: State, decoded: Sequence[NDArray[np.float32]]) -> None:
        """Add a message of each neighbour to its copy, in the order of the edges."""
        state.known = state.known + np.array(decoded)

    def iterate(self, state: State, samples: Float64s, directions: Float64s) -> None:
        """Run the part of an iteration after the exchange.

        These are lines 6 to 12 of Algorithm 2, or lines 6 to 13 of Algorithm 3:

        x̃_i ← Π_X(x̃_i − η [∇f_i(x_i) + 2 Σ_j λ_ij ∇g_ij(x_i, x_j)]);
        λ_ij ← max(0, λ_ij + η [g_ij(x_i, x_j) − δ η λ_ij]).

        Parameters
        ----------
        state : State
            The state; updated.
        samples, directions : ndarray, shapes (n, s) and (n, d)
            See `Noise.at`.
        """
        t, eta, duals = state.iteration + 1, self.step, state.duals
        x, neighbours = self.point(state), self._in_set(state.known)
        ends = self._ends(x)
        gradient = self._cost_gradient(x, samples, directions)
        pull = duals[:, None] * self.constraint.gradient(ends, neighbours)
        # The factor 2: L has a term for either end of an edge (equation 4.4).
        gradient[:, self.private :] += 2 * np.add.reduceat(pull, self._first_edge)
        violation = self.constraint.value(ends, neighbours)
        ascent = violation - self.regularizer * eta * duals
        state.raw = self._projected(state.raw - eta * gradient)
        state.duals = np.maximum(duals + eta * ascent, 0)
        state.average = x / t + (t - 1) / t * state.average
        state.iteration = t

    def _cost_gradient(self, x: Float64s, samples: Float64s, u: Float64s) -> Float64s:
        """Return ∇f at x, or its estimate from two values (Algorithm 3, lines 10, 11).

        For u on the sphere, (d / 2ζ) [f(x + ζ u) − f(x − ζ u)] u is an unbiased
        estimate of the gradient of E f(x + ζ v), v uniform on the unit ball (section
        4.4, Fact 1). For a quadratic f, and any u with E u uᵀ = I / d, it is an
        unbiased estimate of the gradient of f.
        """
        if not self.zeta:
            return self.problem.gradient(x, samples)
        ahead = self.problem.value(x + self.zeta * u, samples)
        behind = self.problem.value(x - self.zeta * u, samples)
        slope = self.problem.dimension / (2 * self.zeta) * (ahead - behind)
        return slope[:, None] * u


def theory_constant(
    dual_variables: int, gradient_bound: float, omega: float, bandit: bool
) -> float:
    """Return 64 (1 + m) G² / ω² of theorem 3, or 256 (1 + m) G² / ω² of theorem 4.

    The theorems need η² of at most 1 / this constant.

    Parameters
    ----------
    dual_variables : int
        m, twice the number of edges.
    gradient_bound : float
        G, the largest norm of the gradient of a constraint g_ij with respect to both of
        its arguments, on X (assumption 6).
    omega : float
        ω of the compression operator, in (0, 1].
    bandit : bool
        Bandit feedback (theorem 4) instead of sample feedback (theorem 3).
    """
    return (256 if bandit else 64) * (1 + dual_variables) * gradient_bound**2 / omega**2


def theory_regularizer(step: float, constant: float) -> float:
    """Return δ = (1 − √(1 − c η²)) / (4 η²) of the theorems, c the `theory_constant`.

    With η = a / √T, T must exceed a² c.
    """
    root = math.sqrt(max(0.0, 1 - constant * step**2))
    # The same number without cancellation.
    return constant / (4 * (1 + root))


def dot(x: Float64s, y: Float64s) -> Float64s:
    """Return the inner products of corresponding rows.

    Unlike in a matrix product, rounding does not depend on the number of rows.
    """
    product: Float64s = (x * y).sum(axis=-1)
    return product
