"""Decentralised multi-task optimisation: Algorithms 2 and 3 of Singh, UCLA 2024, ch. 4.

minimise sum_i F_i(x_i) subject to g_ij(x_i, x_j) <= 0 for neighbours i, j and x_i in X
(equation 4.1): a stochastic saddle-point method on the Lagrangian of equation 4.3, with
compressed exchange. Node i keeps three versions of its parameters apart:

=========  =========================================================================
raw        x~_i, what gradient steps are made ON; nobody else sees it
copy       x^_i, what the neighbours know; it moves by the messages, C(x~_i - x^_i)
point      x_i, the copy projected onto X; gradients are taken AT it
=========  =========================================================================

One iteration of a node is ``send``, ``receive`` and ``iterate``. All three work on a
group of nodes held as rows of arrays: a device has a group of one, and
``flwr_frl.task.saddle_point.network`` has all nodes of a run in one process, with the
same numbers. Everything is float64. What is sent is the compressor's own code, mostly
float32; as each message is a difference to the copy, which sender and receivers update
by what was decoded, its rounding is never accumulated.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from flwr_frl.task.compression.per_tensor import Compressor, Identity
from flwr_frl.task.saddle_point.constraints import (
    Ball,
    ConvexSet,
    PairConstraint,
    Pairs,
)
from flwr_frl.task.saddle_point.problems import Float64s, Problem
from flwr_frl.task.saddle_point.state import State
from flwr_frl.task.settings import require

# First word of the seeds of the starting points; see
# ``flwr_frl.task.saddle_point.problems``.
_START = 0x4D545


class DualMismatchError(ValueError):
    """The two ends of an edge have different dual variables."""


def two_point_gradient(
    problem: Problem, x: Float64s, samples: Float64s, directions: Float64s, zeta: float
) -> Float64s:
    """Estimate gradients from two values each (Algorithm 3, lines 10 and 11).

    d / (2 zeta) [f(x + zeta u) - f(x - zeta u)] u is an unbiased estimate of the
    gradient of E f(x + zeta v), v uniform on the unit ball (section 4.4, Fact 1). For a
    quadratic f that is the gradient of f itself.

    x, the directions u of length 1 and the estimates have the shape (n, d). A node's
    row of ``samples``, of shape (n, s), is the same for both values. zeta is above 0.
    """
    ahead = problem.value(x + zeta * directions, samples)
    behind = problem.value(x - zeta * directions, samples)
    slope = problem.dimension / (2 * zeta) * (ahead - behind)
    return slope[:, None] * directions


@dataclass(frozen=True, eq=False)
class SaddlePoint:
    """Algorithms 2 (sample feedback) and 3 (bandit feedback) for a group of nodes.

    Parameters
    ----------
    problem : Problem
        The costs of the group's nodes.
    constraint : PairConstraint
        g_ij of the group's edges.
    pairs : ndarray of int, shape (E, 2)
        The edges (i, j), i a node of the group and j its neighbour; in lexicographic
        order, as are the problem's nodes.
    feasible : ConvexSet, default Ball(20)
        X.
    step : float, default 1e-3
        eta > 0.
    regularizer : float, default 100
        delta > 0, with delta eta^2 <= 1: the factor 1 - delta eta^2 of the dual
        variables must not be negative (appendix B).
    zeta : float, default 0
        The perturbation of bandit feedback (1e-4 in section 4.5); 0 is sample feedback.

    Raises
    ------
    SettingsError
        If a number is out of range, or a node has no edge or is not in order.
    """

    problem: Problem
    constraint: PairConstraint
    pairs: Pairs
    feasible: ConvexSet = field(default_factory=Ball)
    step: float = 1e-3
    regularizer: float = 100.0
    zeta: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers and the edges."""
        require(0 < self.step < np.inf, "the step size", self.step, "above 0")
        require(self.regularizer > 0, "delta", self.regularizer, "above 0")
        decay = self.regularizer * self.step**2
        require(decay <= 1, "delta times the squared step size", decay, "at most 1")
        require(self.zeta >= 0, "zeta", self.zeta, "at least 0")
        _ = self._set  # A zeta that is too large is refused here.
        self._check_edges()

    def _check_edges(self) -> None:
        nodes, edges = self.problem.nodes, [tuple(e) for e in self.pairs.tolist()]
        require(list(nodes) == sorted(set(nodes)), "the nodes", nodes, "increasing")
        for before, edge in pairwise(edges):
            require(before < edge, "an edge", edge, f"before {before}, or listed once")
        owners = {i for i, _ in edges}
        for node in nodes:
            connected = node in owners
            require(connected, f"the neighbours of node {node}", [], "one or more")
        for i, j in edges:
            own = i in nodes and i != j
            require(own, "an edge", (i, j), f"from one of {nodes} to another node")

    @cached_property
    def _set(self) -> ConvexSet:
        """X, or with bandit feedback the shrunk set."""
        return self.feasible.shrunk(self.zeta) if self.zeta else self.feasible

    @cached_property
    def _owner(self) -> NDArray[np.int64]:
        """Row of the node that each edge belongs to."""
        return np.searchsorted(self.problem.nodes, self.pairs[:, 0])

    @cached_property
    def _first(self) -> NDArray[np.int64]:
        """Each node's first edge."""
        return np.searchsorted(self._owner, np.arange(len(self.problem.nodes)))

    def start(self, seed: int) -> State:
        """Return the state before the first iteration: random x~ in X, all else zero.

        The chapter gives no distribution: here N(0, I_d), projected. The points are
        rounded to float32, so that the first, uncompressed exchange, which carries
        float32, leaves x^ = x~ exactly, as the algorithms require.
        """
        nodes, d = self.problem.nodes, self.problem.dimension
        streams = [np.random.default_rng([_START, seed, node]) for node in nodes]
        drawn = np.array([stream.standard_normal(d) for stream in streams])
        raw = self._set.project(drawn).astype(np.float32).astype(np.float64)
        edges, zero = len(self.pairs), np.zeros_like(raw)
        return State(raw, zero, np.zeros((edges, d)), np.zeros(edges), zero.copy())

    def point(self, state: State) -> Float64s:
        """Give x_i as of the last message sent: the projected copies (line 6)."""
        return self._set.project(state.copy)

    def send(
        self, state: State, compressor: Compressor | None, stream: np.random.Generator
    ) -> bytes:
        """Compress x~ - x^ of a single node and update its own copy (lines 2 to 5).

        The first message is not compressed.

        Parameters
        ----------
        state : State
            Of a group of one; its copy is updated.
        compressor : Compressor, optional
            The operator; None sends float64, 8 d bytes, which is exact.
        stream : numpy.random.Generator
            See ``exchange_stream``.

        Returns
        -------
        bytes
            The message, the same for all neighbours.
        """
        if compressor and state.iteration == 0:
            compressor = Identity()
        (difference,) = state.raw - state.copy
        if compressor is None:
            message: bytes = difference.astype("<f8").tobytes()
        else:
            single = torch.from_numpy(difference.astype(np.float32))
            message = compressor.compress(single, stream)
        state.copy = state.copy + decode(compressor, message, len(difference))
        return message

    def receive(
        self, state: State, messages: Sequence[bytes], compressor: Compressor | None
    ) -> None:
        """Update the copies of a single node's neighbours (line 5).

        Parameters
        ----------
        state : State
            Of a group of one; nothing is changed if a message is refused.
        messages : sequence of bytes
            One from each neighbour, in the order of the edges.
        compressor : Compressor, optional
            As for ``send``.

        Raises
        ------
        ValueError
            If a message is missing or is none of the compressor's.
        """
        if len(messages) != len(self.pairs):
            raise ValueError(
                f"{len(messages)} messages for {len(self.pairs)} neighbours"
            )
        if compressor and state.iteration == 0:
            compressor = Identity()
        d = self.problem.dimension
        decoded = [decode(compressor, message, d) for message in messages]
        state.known = state.known + np.array(decoded)

    def iterate(self, state: State, samples: Float64s, directions: Float64s) -> None:
        """Make what is left of an iteration after the exchange (lines 6 to 13).

        Parameters
        ----------
        state : State
            The state; updated.
        samples, directions : ndarray, shapes (n, s) and (n, d)
            See ``Noise.at``.
        """
        t, eta = state.iteration + 1, self.step
        x, others = self.point(state), self._set.project(state.known)
        state.average = x / t + (t - 1) / t * state.average
        own, duals = x[self._owner], state.duals
        gradient = self._cost_gradient(x, samples, directions)
        pull = duals[:, None] * self.constraint.gradient(own, others)
        # Twice, as L has a term for either end of an edge (equation 4.4).
        gradient = gradient + 2 * np.add.reduceat(pull, self._first)
        state.raw = self._set.project(state.raw - eta * gradient)
        violation = self.constraint.value(own, others)
        ascent = violation - self.regularizer * eta * duals
        state.duals = np.maximum(duals + eta * ascent, 0)
        state.iteration = t

    def _cost_gradient(
        self, x: Float64s, samples: Float64s, directions: Float64s
    ) -> Float64s:
        if not self.zeta:
            return self.problem.gradient(x, samples)
        return two_point_gradient(self.problem, x, samples, directions, self.zeta)


def check_duals(pairs: Pairs, mine: ArrayLike, theirs: ArrayLike) -> None:
    """Check that the dual variables of both ends of some edges are equal.

    The algorithms use lambda_ij for lambda_ji (section 4.3.1, "Symmetry of dual
    updates"), which needs a symmetric g and the same copies at both ends. For the edges
    (i, j) of ``pairs``, ``mine`` has lambda_ij of node i, ``theirs`` lambda_ji of j.

    Raises
    ------
    DualMismatchError
        If two of them differ by more than the rounding of different machines.
    """
    a, b = np.asarray(mine), np.asarray(theirs)
    # Not "differ more than", which would let nan pass.
    equal = np.abs(a - b) <= 1e-12 + 1e-9 * np.abs(a)
    if not equal.all():
        edge = int(np.argmin(equal))
        i, j = pairs[edge].tolist()
        raise DualMismatchError(
            f"the dual variable of edge {(i, j)} is {float(a[edge])!r} at node {i} and "
            f"{float(b[edge])!r} at node {j}; they must be equal: is g symmetric?"
        )


def decode(compressor: Compressor | None, message: bytes, dimension: int) -> Float64s:
    """Return what a message adds to the sender's copy, an array of shape (d,).

    Without a compressor the message is float64.

    Raises
    ------
    ValueError
        If it is none of the compressor's messages.
    """
    if compressor:
        return compressor.decompress(message, dimension).numpy().astype(np.float64)
    if len(message) != 8 * dimension:
        raise ValueError(f"a message has {len(message)} bytes, not {8 * dimension}")
    entries = np.frombuffer(message, "<f8").astype(np.float64)
    if not np.isfinite(entries).all():
        raise ValueError("an entry of a message is not finite")
    return entries
