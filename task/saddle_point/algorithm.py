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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from flwr_frl.common.settings import require
from flwr_frl.task.compression.per_tensor import Compressor, Identity
from flwr_frl.task.saddle_point.noise import two_point_gradient
from flwr_frl.task.saddle_point.problems import Float64s, PairConstraint, Pairs, Problem
from flwr_frl.task.saddle_point.sets import Ball, ConvexSet

# First words of the random seeds, after those of the problems.
_START, _EXCHANGE = 0x4D545, 0x4D547
# Upper bound of δ η²: 1, with an allowance for rounding.
LARGEST_DECAY = 1 + 1e-9


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
        names = [f.name for f in fields(cls) if f.name != "iteration"]
        values = {name: np.array(arrays[name], np.float64) for name in names}
        return cls(**values, iteration=int(arrays["iteration"]))


def exchange_stream(seed: int, node: int, iteration: int) -> np.random.Generator:
    """Return the generator for a node's message in an iteration, counted from 1."""
    return np.random.default_rng([_EXCHANGE, seed, node, iteration])


@dataclass(frozen=True, eq=False)
class SaddlePoint:
    """Algorithms 2 (sample feedback) and 3 (bandit feedback) for a group of nodes.

    Parameters
    ----------
    problem : Problem
        The costs of the group's nodes, in increasing order of the nodes.
    constraint : PairConstraint
        g_ij of the group's edges.
    pairs : ndarray of int, shape (E, 2)
        The edges (i, j) from a node i of the group to a neighbour j, in lexicographic
        order. Every node has at least one.
    feasible : ConvexSet, default Ball(20)
        X.
    step : float, default 1e-3
        Step size η > 0.
    regularizer : float, default 100
        δ > 0. δ η² ≤ 1 keeps the factor 1 − δ η² of the dual variables non-negative
        (appendix B).
    zeta : float, default 0
        Perturbation ζ of bandit feedback (1e-4 in section 4.5); 0 means sample
        feedback.
    exchanged : ndarray of int, optional
        Indices of the entries that the constraints concern; by default all. X is then
        the product of two sets of the kind of ``feasible``, one for these entries and
        one for the others.

    Raises
    ------
    SettingsError
        If a number is out of range, or nodes or edges are missing or out of order.
    """

    problem: Problem
    constraint: PairConstraint
    pairs: Pairs
    feasible: ConvexSet = field(default_factory=Ball)
    step: float = 1e-3
    regularizer: float = 100.0
    zeta: float = 0.0
    exchanged: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        """Check the numbers and the edges."""
        require(0 < self.step < np.inf, "the step size", self.step, "above 0")
        require(self.regularizer > 0, "delta", self.regularizer, "above 0")
        decay = self.regularizer * self.step**2
        small = decay <= LARGEST_DECAY
        require(small, "delta times the squared step size", decay, "at most 1")
        require(self.zeta >= 0, "zeta", self.zeta, "at least 0")
        _ = self._set  # Rejects a zeta that is too large.
        edges = [tuple(edge) for edge in self.pairs.tolist()]
        ordered = edges == sorted(set(edges)) and all(i != j for i, j in edges)
        require(ordered, "pairs", edges, "sorted, without loops or repetitions")
        nodes, sources = self.problem.nodes, sorted({i for i, _ in edges})
        require(
            sources == list(nodes), "nodes", nodes, f"those of the edges, {sources}"
        )

    @cached_property
    def _set(self) -> ConvexSet:
        """X, or for bandit feedback the shrunk set."""
        return self.feasible.shrunk(self.zeta) if self.zeta else self.feasible

    @cached_property
    def _row(self) -> NDArray[np.int64]:
        """Row of the node i of each edge (i, j)."""
        return np.searchsorted(self.problem.nodes, self.pairs[:, 0])

    @cached_property
    def _first_edge(self) -> NDArray[np.int64]:
        """Index of each node's first edge."""
        return np.searchsorted(self._row, np.arange(len(self.problem.nodes)))

    @property
    def message_dimension(self) -> int:
        """Number of entries that a message contains."""
        dimension = self.problem.dimension
        return dimension if self.exchanged is None else len(self.exchanged)

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
            streams = [np.random.default_rng([_START, seed, node]) for node in nodes]
            initial = np.array([stream.standard_normal(d) for stream in streams])
        raw = self._projected(initial).astype(np.float32).astype(np.float64)
        edges, zero = len(self.pairs), np.zeros_like(raw)
        known = np.zeros((edges, self.message_dimension))
        return State(raw, zero, known, np.zeros(edges), zero.copy())

    def point(self, state: State) -> Float64s:
        """Return x_i as of the last message: the projected copies (line 6)."""
        return self._projected(state.copy)

    def constraints(self, state: State) -> Float64s:
        """Return g_ij(x_i, x_j) of every edge, as of the last messages."""
        ends = self._exchanged(self.point(state))[self._row]
        return self.constraint.value(ends, self._set.project(state.known))

    def _exchanged(self, x: Float64s) -> Float64s:
        return x if self.exchanged is None else x[:, self.exchanged]

    def _projected(self, x: Float64s) -> Float64s:
        """Return the points of X nearest to the rows of `x`, shape (n, d)."""
        if self.exchanged is None:
            return self._set.project(x)
        others = np.delete(np.arange(x.shape[1]), self.exchanged)
        nearest = np.empty_like(x)
        for entries in (self.exchanged, others):
            nearest[:, entries] = self._set.project(x[:, entries])
        return nearest

    def send(
        self, state: State, compressor: Compressor | None, stream: np.random.Generator
    ) -> bytes:
        """Compress x̃ − x̂ of a single node and update its own copy (lines 2 to 5).

        The first message is not compressed.

        Parameters
        ----------
        state : State
            State of a group of one; its copy is updated.
        compressor : Compressor, optional
            The operator C; None sends float64, 8 d bytes, which is exact.
        stream : numpy.random.Generator
            See `exchange_stream`.

        Returns
        -------
        bytes
            The message, the same for all neighbours.
        """
        if compressor and state.iteration == 0:
            compressor = Identity()
        (difference,) = self._exchanged(state.raw - state.copy)
        if compressor is None:
            message: bytes = difference.astype("<f8").tobytes()
        else:
            single = torch.from_numpy(difference.astype(np.float32))
            message = compressor.compress(single, stream)
        sent = decode(compressor, message, len(difference))
        if self.exchanged is None:
            state.copy = state.copy + sent
        else:
            copy = state.raw.copy()
            copy[:, self.exchanged] = state.copy[:, self.exchanged] + sent
            state.copy = copy
        return message

    def receive(
        self, state: State, messages: Sequence[bytes], compressor: Compressor | None
    ) -> None:
        """Update the copies of a single node's neighbours (line 5).

        Parameters
        ----------
        state : State
            State of a group of one; unchanged if a message is malformed.
        messages : sequence of bytes
            One from each neighbour, in the order of the edges.
        compressor : Compressor, optional
            As for ``send``.

        Raises
        ------
        ValueError
            If a message is missing or malformed.
        """
        if len(messages) != len(self.pairs):
            raise ValueError(
                f"{len(messages)} messages for {len(self.pairs)} neighbours"
            )
        if compressor and state.iteration == 0:
            compressor = Identity()
        d = self.message_dimension
        decoded = [decode(compressor, message, d) for message in messages]
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
        x, neighbours = self.point(state), self._set.project(state.known)
        state.average = x / t + (t - 1) / t * state.average
        self._descend(state, x, neighbours, samples, directions)
        violation = self.constraint.value(self._exchanged(x)[self._row], neighbours)
        ascent = violation - self.regularizer * eta * duals
        state.duals = np.maximum(duals + eta * ascent, 0)
        state.iteration = t

    def local_step(self, state: State, samples: Float64s, directions: Float64s) -> None:
        """Run one more update of x̃_i between two exchanges.

        As in ``iterate``, but at x̃_i, as x_i has not changed, and with the new λ_ij:
        x̃_i ← Π_X(x̃_i − η [∇f_i(x̃_i) + 2 Σ_j λ_ij ∇g_ij(x̃_i, x_j)]). The chapter names
        local iterations as future work (section 4.6).

        Parameters
        ----------
        state, samples, directions
            The same arguments as in ``iterate``.
        """
        neighbours = self._set.project(state.known)
        self._descend(state, state.raw, neighbours, samples, directions)

    def _descend(
        self,
        state: State,
        x: Float64s,
        neighbours: Float64s,
        samples: Float64s,
        directions: Float64s,
    ) -> None:
        """Update x̃ with gradients at x (Algorithm 2, line 11)."""
        gradient = self._cost_gradient(x, samples, directions)
        ends = self._exchanged(x)[self._row]
        pull = state.duals[:, None] * self.constraint.gradient(ends, neighbours)
        # The factor 2: L has a term for either end of an edge (equation 4.4).
        pull = 2 * np.add.reduceat(pull, self._first_edge)
        if self.exchanged is None:
            gradient = gradient + pull
        else:
            gradient[:, self.exchanged] += pull
        state.raw = self._projected(state.raw - self.step * gradient)

    def _cost_gradient(
        self, x: Float64s, samples: Float64s, directions: Float64s
    ) -> Float64s:
        if not self.zeta:
            return self.problem.gradient(x, samples)
        return two_point_gradient(self.problem, x, samples, directions, self.zeta)


def decode(compressor: Compressor | None, message: bytes, dimension: int) -> Float64s:
    """Return the vector that a message adds to its sender's copy.

    Parameters
    ----------
    compressor : Compressor, optional
        The operator C of the message; None for float64.
    message : bytes
        The message.
    dimension : int
        Number of entries d.

    Returns
    -------
    ndarray, shape (d,)
        The vector.

    Raises
    ------
    ValueError
        If the message is malformed.
    """
    if compressor:
        return compressor.decompress(message, dimension).numpy().astype(np.float64)
    if len(message) != 8 * dimension:
        raise ValueError(f"a message has {len(message)} bytes, not {8 * dimension}")
    entries = np.frombuffer(message, "<f8").astype(np.float64)
    if not np.isfinite(entries).all():
        raise ValueError("an entry of a message is not finite")
    return entries
