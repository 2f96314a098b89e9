"""What a node of decentralised multi-task optimisation remembers, and what it draws.

See ``flwr_frl.task.saddle_point.algorithm``. Nothing here depends on which process
holds which nodes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from flwr_frl.task.saddle_point.problems import Float64s, Problem

# First words of the seeds; see ``flwr_frl.task.saddle_point.problems``.
_NOISE, _EXCHANGE = 0x4D546, 0x4D547

# Iterations whose noise is drawn at once.
_BLOCK = 64


@dataclass
class State:
    """What a group of n nodes with E edges (each node's own ends) remembers.

    Parameters
    ----------
    raw : ndarray, shape (n, d)
        x~.
    copy : ndarray, shape (n, d)
        x^, the nodes' own.
    known : ndarray, shape (E, d)
        x^ of the neighbour at the other end of each edge, as this node knows it.
    duals : ndarray, shape (E,)
        lambda_ij.
    average : ndarray, shape (n, d)
        Mean of the points of all iterations so far: the algorithms' output.
    iteration : int
        Number of iterations done.
    """

    raw: Float64s
    copy: Float64s
    known: Float64s
    duals: Float64s
    average: Float64s
    iteration: int = 0

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Give everything as arrays by the names above."""
        return {f.name: np.asarray(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Self:
        """Return a copy of what ``arrays`` gave."""
        names = [f.name for f in fields(cls) if f.name != "iteration"]
        values = {name: np.array(arrays[name], np.float64) for name in names}
        return cls(**values, iteration=int(arrays["iteration"]))


class Noise:
    """What is random in an iteration, by seed, node and iteration only.

    A stream per node and block of 64 iterations, drawn as a whole: a device that keeps
    nothing between messages draws a block to use one row, which is cheap, and a long
    run draws every block once.

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
        """Give the samples and directions of an iteration; iterations count from 1.

        Returns
        -------
        samples : ndarray, shape (n, s)
            One for each node (line 9).
        directions : ndarray, shape (n, d)
            u_i, uniform on the unit sphere (Algorithm 3, line 9). The samples are the
            same whether these are used or not.
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
            drawn = stream.standard_normal((_BLOCK, self.problem.dimension))
            directions.append(drawn / np.linalg.norm(drawn, axis=1, keepdims=True))
        return np.array(samples), np.array(directions)


def exchange_stream(seed: int, node: int, iteration: int) -> np.random.Generator:
    """Give the generator of the message that a node sends in an iteration, from 1."""
    return np.random.default_rng([_EXCHANGE, seed, node, iteration])
