"""The tasks ``qcqp`` and ``multi-task-logistic`` (Singh, UCLA 2024, section 4.5)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from torch import nn

from flwr_frl.task.base import BaseTask
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import SplitModel
from flwr_frl.task.saddle_point.algorithm import SaddlePoint
from flwr_frl.task.saddle_point.noise import DIRECTIONS
from flwr_frl.task.saddle_point.problems import Ball, Pairs, build_problem
from flwr_frl.task.settings import Checked, Choice, Range, Seed
from flwr_frl.task.training import Loss

DIMENSION = 10


@dataclass(frozen=True)
class MultiTaskSetup(Checked, BaseTask):
    """A synthetic problem; nodes draw their costs, and their samples in each iteration.

    Parameters
    ----------
    problem : {"qcqp", "logistic"}
        The problem.
    seed : int, default 0
        Seed of the costs, the constraints, the start and the samples.
    radius : float, default 20
        Radius of the ball X, which contains all models.
    saddle_step : float, default 1e-3
        Step size η.
    dual_regularizer : float, default 100
        δ, with δ η² ≤ 1 (appendix B).
    bandit_radius : float, default 0
        ζ of bandit feedback (Algorithm 3); 0 means sample feedback (Algorithm 2).
    bandit_direction : {"sphere", "bernoulli", "gaussian"}, default "sphere"
        Distribution of the perturbations of bandit feedback (section 4.4.1).
    """

    problem: str
    seed: Annotated[int, Seed] = 0
    radius: Annotated[float, Range("(0, inf)")] = 20.0
    saddle_step: Annotated[float, Range("(0, inf)")] = 1e-3
    dual_regularizer: Annotated[float, Range("(0, inf)")] = 100.0
    bandit_radius: Annotated[float, Range("[0, inf)")] = 0.0
    bandit_direction: Annotated[str, Choice(*DIRECTIONS)] = DIRECTIONS[0]

    classes: ClassVar[tuple[str, ...]] = ()
    untrainable: ClassVar[str] = "the algorithm for it is multi-task"

    def __post_init__(self) -> None:
        """Check the ranges, also in combination."""
        super().__post_init__()
        self.saddle_point([0], [(0, 1)])

    @property
    def loss(self) -> Loss:
        """Placeholder; the costs are defined by the problem."""
        return nn.functional.mse_loss

    def saddle_point(
        self, nodes: Sequence[int], pairs: Sequence[tuple[int, int]]
    ) -> SaddlePoint:
        """Return the algorithm for some nodes.

        Parameters
        ----------
        nodes : sequence of int
            The nodes, in increasing order.
        pairs : sequence of (int, int)
            Their edges (i, j), in lexicographic order.
        """
        edges: Pairs = np.array(pairs, np.int64)
        problem, constraint = build_problem(self.problem, nodes, edges, self.seed)
        return SaddlePoint(
            problem,
            constraint,
            edges,
            feasible=Ball(self.radius),
            step=self.saddle_step,
            regularizer=self.dual_regularizer,
            zeta=self.bandit_radius,
        )

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
