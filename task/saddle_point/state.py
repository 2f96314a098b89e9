"""State and randomness of the nodes in decentralised multi-task optimisation.

Used by `flwr_frl.task.saddle_point.algorithm`. Both depend on the node, the seed and
the iteration only, not on which process holds which nodes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from flwr_frl.task.saddle_point.problems import Float64s, Problem

# First words of the random seeds; see `flwr_frl.task.saddle_point.problems`.
_NOISE, _EXCHANGE = 0x4D546, 0x4D547

# Iterations per block of noise.
_BLOCK = 64


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
    known : ndarray, shape (E, d)
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
        """Return the state with copies of the given `arrays`."""
        names = [f.name for f in fields(cls) if f.name != "iteration"]
        values = {name: np.array(arrays[name], np.float64) for name in names}
        return cls(**values, iteration=int(arrays["iteration"]))


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
    """

    def __init__(self, problem: Problem, seed: int) -> None:
        self.problem, self.seed = problem, seed
        self._drawn: tuple[int, Float64s, Float64s] | None = None

    def at(self, iteration: int) -> tuple[Float64s, Float64s]:
        """Return the samples and directions of an iteration, counted from 1.

        Returns
        -------
        samples : ndarray, shape (n, s)
            One sample per node (line 9).
        directions : ndarray, shape (n, d)
            u_i, uniform on the unit sphere (Algorithm 3, line 9). They do not affect
            the samples.
        """
        block, row = divmod(iteration - 1, _BLOCK)
        if self._drawn is None or self._drawn[0] != block:
            self._drawn = (block, *self._draw(block))
        _, samples, directions = self._drawn
        return samples[:, row], directions[:, row]

    def _draw(self, block: int) -> tuple[Float64s, Float64s]:
        samples, directions = [], []
        for row, node in enumerate(self.problem.nodes):
            stream = np.random.default_rng([_NOISE, self.seed, node, block])
            samples.append(self.problem.draw(row, stream, _BLOCK))
            normal = stream.standard_normal((_BLOCK, self.problem.dimension))
            directions.append(normal / np.linalg.norm(normal, axis=1, keepdims=True))
        return np.array(samples), np.array(directions)


def exchange_stream(seed: int, node: int, iteration: int) -> np.random.Generator:
    """Return the generator for a node's message in an iteration, counted from 1."""
    return np.random.default_rng([_EXCHANGE, seed, node, iteration])
