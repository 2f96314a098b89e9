"""The tasks ``qcqp`` and ``multi-task-logistic``: chapter 4's generated problems."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from task.base import BaseTask
from task.examples import ExampleSet
from task.models import SplitModel
from task.saddle_point.algorithm import SaddlePoint
from task.saddle_point.constraints import Ball, Pairs, build_problem
from task.settings import Settings
from task.training import Loss

# Names of the tasks and of the problems they are.
MULTI_TASKS = {"qcqp": "qcqp", "multi-task-logistic": "logistic"}
DIMENSION = 10


@dataclass(frozen=True)
class MultiTaskSetup(BaseTask):
    """A problem of section 4.5; nodes draw their own costs, and samples as they go.

    Parameters
    ----------
    problem : {"qcqp", "logistic"}
        The problem.
    seed : int, default 0
        Of costs, constraints, start and samples.
    radius : float, default 20
        Of the ball X.
    step : float, default 1e-3
        η.
    regularizer : float, default 100
        δ.
    zeta : float, default 0
        ζ of bandit feedback; 0 is sample feedback.
    """

    problem: str
    seed: int = 0
    radius: float = 20.0
    step: float = 1e-3
    regularizer: float = 100.0
    zeta: float = 0.0

    classes: tuple[str, ...] = ()

    @property
    def loss(self) -> Loss:
        """Of nothing: the costs are the problem's."""
        return nn.functional.mse_loss

    @classmethod
    def from_settings(cls, settings: Settings) -> "MultiTaskSetup":
        """Return the setup that the settings describe.

        Parameters
        ----------
        settings : mapping
            All settings.

        Returns
        -------
        MultiTaskSetup
            The setup.

        Raises
        ------
        SettingsError
            If a number is out of its range.
        """
        setup = cls(
            problem=MULTI_TASKS[str(settings["task"])],
            seed=int(settings["seed"]),
            radius=float(settings["radius"]),
            step=float(settings["saddle-step"]),
            regularizer=float(settings["dual-regularizer"]),
            zeta=float(settings["bandit-radius"]),
        )
        setup.saddle_point([0], [(0, 1)])
        return setup

    def saddle_point(
        self, nodes: Sequence[int], pairs: Sequence[tuple[int, int]]
    ) -> SaddlePoint:
        """Return the algorithm for some nodes.

        Parameters
        ----------
        nodes : sequence of int
            Numbers of the nodes.
        pairs : sequence of (int, int)
            Their edges, in lexicographic order.

        Returns
        -------
        SaddlePoint
            With these nodes' costs and these edges' constraints.
        """
        edges: Pairs = np.array(pairs, np.int64)
        problem, constraint = build_problem(self.problem, nodes, edges, self.seed)
        return SaddlePoint(
            problem,
            constraint,
            edges,
            feasible=Ball(self.radius),
            step=self.step,
            regularizer=self.regularizer,
            zeta=self.zeta,
        )

    def initial_model(self) -> SplitModel:
        """Return a linear model of zeros, which the algorithm does not use.

        Returns
        -------
        SplitModel
            ``head.weight`` of shape (1, d).
        """
        head = nn.Linear(DIMENSION, 1, bias=False)
        nn.init.zeros_(head.weight)
        return SplitModel(nn.Identity(), head)

    def train_examples(self, client: int) -> ExampleSet:
        """Return no examples: samples are drawn as the algorithm goes.

        Parameters
        ----------
        client : int
            Ignored.

        Returns
        -------
        ExampleSet
            Empty.
        """
        return ExampleSet(torch.empty(0, DIMENSION), torch.empty(0, 1))

    def test_examples(self, client: int) -> ExampleSet:
        """Return no examples.

        Parameters
        ----------
        client : int
            Ignored.

        Returns
        -------
        ExampleSet
            Empty.
        """
        return self.train_examples(client)
