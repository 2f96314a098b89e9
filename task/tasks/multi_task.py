"""The tasks ``qcqp`` and ``multi-task-logistic`` (Singh, UCLA 2024, section 4.5)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from flwr_frl.common.settings import Checked, setting
from flwr_frl.task.base import BaseTask
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import SplitModel
from flwr_frl.task.saddle_point.algorithm import SaddlePoint
from flwr_frl.task.saddle_point.problems import Pairs, build_problem
from flwr_frl.task.saddle_point.sets import Ball
from flwr_frl.task.saddle_point.settings import SaddlePointSettings
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
        Seed of the costs and the constraints.
    """

    problem: str
    seed: int = setting(0, ge=0)

    classes: ClassVar[tuple[str, ...]] = ()
    untrainable: ClassVar[str] = "the algorithm for it is multi-task"

    @property
    def loss(self) -> Loss:
        """Placeholder; the costs are defined by the problem."""
        return nn.functional.mse_loss

    def saddle_point(
        self,
        nodes: Sequence[int],
        pairs: Sequence[tuple[int, int]],
        settings: SaddlePointSettings,
    ) -> SaddlePoint:
        """Return the algorithm for some nodes; by default X is a ball of radius 20.

        Parameters
        ----------
        nodes : sequence of int
            The nodes, in increasing order.
        pairs : sequence of (int, int)
            Their edges (i, j), in lexicographic order.
        settings : SaddlePointSettings
            The algorithm's settings.
        """
        edges: Pairs = np.array(pairs, np.int64)
        problem, constraint = build_problem(self.problem, nodes, edges, self.seed)
        return settings.algorithm(problem, constraint, edges, Ball())

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
