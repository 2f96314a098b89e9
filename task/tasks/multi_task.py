"""The tasks ``qcqp`` and ``multi-task-logistic`` (Singh, UCLA 2024, section 4.5).

Node i has the cost f_i(x_i, ξ_i) with a random sample ξ_i, and F_i(x_i) is its
expectation. All functions work on rows: a group of nodes is an array of shape (n, d),
and a single node is a group with n = 1. Random values depend only on the seed and on
the node, or on the two ends of an edge, so a device can build its own part of a
problem.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import nn

from flwr_frl.common.settings import Checked, setting
from flwr_frl.task.base import BaseTask
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import SplitModel
from flwr_frl.task.saddle_point import Float64s, Pairs, Proximity, dot

DIMENSION = 10
# First words of the random seeds; they separate the random streams.
QUADRATIC, LOGISTIC, COMMON, OFFSETS = 0x4D540, 0x4D541, 0x4D542, 0x4D544
# Degrees of freedom of the Wishart distribution, and the distance of a true model of
# logistic regression from their common centre.
FREEDOM, SPREAD = 10, 0.5


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

    @property
    def dimension(self) -> int:
        """Number of entries d of a node's parameters."""
        return int(self.a.shape[-1])

    @classmethod
    def create(cls, nodes: Sequence[int], seed: int) -> Self:
        """Draw the costs of some nodes."""
        matrices, moments = [], []
        for node in nodes:
            generator = np.random.default_rng([QUADRATIC, seed, node])
            factor = generator.standard_normal((DIMENSION, FREEDOM))
            matrices.append(factor @ factor.T)
            moments.append(generator.random(2))
        mean, variance = np.array(moments).T
        return cls(tuple(nodes), np.array(matrices), mean, variance)

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
        """Return F_i(x_i) = xᵀ A_i x + E[b]ᵀ x of every row, shape (n,)."""
        return self.value(x, self.mean[:, None])

    def _product(self, x: Float64s) -> Float64s:
        return (self.a @ x[..., None])[..., 0]


@dataclass(frozen=True)
class LogisticRegression:
    """Log-loss f_i(x, (p, y)) = log(1 + exp(−y xᵀ p)) (section 4.5.2, equation 4.16).

    p ~ N(0, I_d), and y in {−1, 1} is 1 with probability σ(θ_iᵀ p), σ the logistic
    function. The loss depends on y p only, which is the sample. In the section, the
    true models θ_i are "close (in norm sense) for adjacent nodes". Here
    θ_i = c + u_i / 2, where c, common to all nodes, and u_i are uniform on the unit
    sphere, so two models differ by at most 1, whatever the graph.

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
    """

    nodes: tuple[int, ...]
    models: Float64s

    @property
    def dimension(self) -> int:
        """Number of entries d of a node's parameters."""
        return int(self.models.shape[-1])

    @classmethod
    def create(cls, nodes: Sequence[int], seed: int) -> Self:
        """Draw the true models of some nodes."""
        centre = _direction([COMMON, seed])
        offsets = [_direction([LOGISTIC, seed, node]) for node in nodes]
        return cls(tuple(nodes), centre + SPREAD * np.array(offsets))

    def draw(self, row: int, generator: np.random.Generator, count: int) -> Float64s:
        """Draw y p, shape (count, d)."""
        p = generator.standard_normal((count, self.dimension))
        positive = generator.random(count) < _sigmoid(dot(p, self.models[row]))
        return np.where(positive[:, None], p, -p)

    def value(self, x: Float64s, samples: Float64s) -> Float64s:
        """Return log(1 + exp(−y xᵀ p))."""
        return np.logaddexp(0, -dot(x, samples))

    def gradient(self, x: Float64s, samples: Float64s) -> Float64s:
        """Return −σ(−y xᵀ p) y p."""
        return -_sigmoid(-dot(x, samples))[:, None] * samples

    def expected(self, x: Float64s) -> Float64s:
        """Return F_i(x_i) of every row, shape (n,), accurate to about 1e-12."""
        slope = _sigmoid(np.linalg.norm(self.models, axis=1)[:, None] * _ABSCISSAE)
        agreement = dot(x, self.models) * ((slope * (1 - slope)) @ _DENSITY)
        z = np.linalg.norm(x, axis=1)[:, None] * _ABSCISSAE
        expectation: Float64s = np.logaddexp(0, z) @ _DENSITY - agreement
        return expectation


# Trapezoidal rule for E h(Z), Z ~ N(0, 1). The functions above are analytic in a strip
# around the real line, so its error decays exponentially: below 1e-12 for norms up to
# 20.
_ABSCISSAE = np.linspace(-9, 9, 601)
_DENSITY = np.exp(-(_ABSCISSAE**2) / 2)
_DENSITY /= _DENSITY.sum()


def _direction(seed: list[int]) -> Float64s:
    """Draw a point on the unit sphere."""
    point = np.random.default_rng(seed).standard_normal(DIMENSION)
    return point / np.linalg.norm(point)


def _sigmoid(z: Float64s) -> Float64s:
    """Return 1 / (1 + exp(−z)) without overflow."""
    return np.exp(-np.logaddexp(0, -z))


# Costs and the interval of the offsets c_ij, by the name of the problem.
PROBLEMS: dict[str, tuple[type[QCQP | LogisticRegression], float, float]] = {
    "qcqp": (QCQP, -5.0, -3.0),
    "logistic": (LogisticRegression, -10.0, -7.0),
}


def build_problem(
    name: str, nodes: Sequence[int], pairs: Pairs, seed: int
) -> tuple[QCQP | LogisticRegression, Proximity]:
    """Draw one of the problems, and c_ij from its interval.

    Parameters
    ----------
    name : {"qcqp", "logistic"}
        The problem, with c_ij from U[−5, −3] or U[−10, −7].
    nodes : sequence of int
        The nodes.
    pairs : ndarray of int, shape (E, 2)
        Their edges, as of `Proximity`.
    seed : int
        At least 0.
    """
    kind, low, high = PROBLEMS[name]
    ends = np.sort(pairs, axis=1).tolist()
    draws = [np.random.default_rng([OFFSETS, seed, *end]).random() for end in ends]
    constraint = Proximity(pairs, low + (high - low) * np.array(draws))
    return kind.create(nodes, seed), constraint


@dataclass(frozen=True)
class MultiTaskSetup(Checked, BaseTask):
    """A synthetic problem; nodes draw their costs, and their samples in each iteration.

    Parameters
    ----------
    problem : {"qcqp", "logistic"}
        The problem.
    seed : int, default 0
        Seed of the costs and the constraints.
    """

    problem: str
    seed: int = setting(0, ge=0)

    classes = ()
    # A placeholder; the costs are defined by the problem.
    loss = staticmethod(nn.functional.mse_loss)
    untrainable: ClassVar[str] = "the algorithm for it is multi-task"
    defaults: ClassVar[Mapping[str, Any]] = {
        "num-server-rounds": 500,
        "saddle-step": 0.003,
    }

    def initial_model(self) -> SplitModel:
        """Return a placeholder model: zeros as ``head.weight``, shape (1, d)."""
        head = nn.Linear(DIMENSION, 1, bias=False)
        nn.init.zeros_(head.weight)
        return SplitModel(nn.Identity(), head)

    def train_examples(self, client: int) -> ExampleSet:
        """Return no examples; the algorithm draws its samples."""
        return ExampleSet(torch.empty(0, DIMENSION), torch.empty(0, 1))

    def test_examples(self, client: int) -> ExampleSet:
        """Return no examples."""
        return self.train_examples(client)
