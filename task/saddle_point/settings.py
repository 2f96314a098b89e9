"""Settings of the saddle-point method (Singh, UCLA 2024, chapter 4)."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from flwr_frl.task.saddle_point.algorithm import LARGEST_DECAY, SaddlePoint
from flwr_frl.task.saddle_point.noise import DIRECTIONS
from flwr_frl.task.saddle_point.problems import PairConstraint, Pairs, Problem
from flwr_frl.task.saddle_point.sets import Ball, ConvexSet, Everywhere
from flwr_frl.task.settings import Checked, Choice, Free, Range, Seed, require

RADII = "auto or a number above 0"


@dataclass(frozen=True)
class SaddlePointSettings(Checked):
    """Settings of decentralised multi-task optimisation.

    Parameters
    ----------
    saddle_step : float, default 1e-3
        Step size η of the parameters and of the dual variables.
    dual_regularizer : float, default 100
        δ, with δ η² ≤ 1 (appendix B).
    radius : float or str, default "auto"
        Radius of the ball X, which contains all parameters. ``auto`` is 20 for the
        chapter's problems, and sets no bound for other tasks.
    bandit_radius : float, default 0
        ζ of bandit feedback (Algorithm 3); 0 means sample feedback (Algorithm 2).
    bandit_direction : {"sphere", "bernoulli", "gaussian"}, default "sphere"
        Distribution of the perturbations of bandit feedback (section 4.4.1).
    primal_steps : int, default 1
        Number of updates of the parameters between two exchanges. The chapter has 1,
        and local iterations as future work (section 4.6).
    seed : int, default 0
        Seed of a random start, the samples, the perturbations and random compressors.
    """

    saddle_step: Annotated[float, Range("(0, inf)")] = 1e-3
    dual_regularizer: Annotated[float, Range("(0, inf)")] = 100.0
    radius: Annotated[float | str, Free(RADII)] = "auto"
    bandit_radius: Annotated[float, Range("[0, inf)")] = 0.0
    bandit_direction: Annotated[str, Choice(*DIRECTIONS)] = DIRECTIONS[0]
    primal_steps: Annotated[int, Range("[1, inf)")] = 1
    seed: Annotated[int, Seed] = 0

    def __post_init__(self) -> None:
        """Check the ranges, also in combination."""
        super().__post_init__()
        decay = self.dual_regularizer * self.saddle_step**2
        allowed = f"at most {1 / self.saddle_step**2:g}, 1 / saddle-step squared"
        small = decay <= LARGEST_DECAY
        require(small, "dual-regularizer", self.dual_regularizer, allowed)
        self.feasible(Everywhere())

    def feasible(self, default: ConvexSet) -> ConvexSet:
        """Return X, which is ``default`` if ``radius`` is ``auto``.

        Raises
        ------
        SettingsError
            If ``radius`` is not a positive number, or at most ``bandit-radius``.
        """
        if self.radius == "auto":
            x = default
        else:
            try:
                radius = float(self.radius)
            except ValueError:
                radius = 0.0
            require(0 < radius < float("inf"), "radius", self.radius, RADII)
            x = Ball(radius)
        if isinstance(x, Ball):
            allowed = f"below {x.radius:g}, the radius of the feasible set"
            valid = self.bandit_radius < x.radius
            require(valid, "bandit-radius", self.bandit_radius, allowed)
        return x

    def algorithm(
        self,
        problem: Problem,
        constraint: PairConstraint,
        pairs: Pairs,
        feasible: ConvexSet,
        exchanged: NDArray[np.int64] | None = None,
    ) -> SaddlePoint:
        """Return the algorithm for a group of nodes; arguments as of `SaddlePoint`.

        ``feasible`` is X if ``radius`` is ``auto``.
        """
        return SaddlePoint(
            problem,
            constraint,
            pairs,
            feasible=self.feasible(feasible),
            step=self.saddle_step,
            regularizer=self.dual_regularizer,
            zeta=self.bandit_radius,
            exchanged=exchanged,
        )
