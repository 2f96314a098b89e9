"""Settings of the saddle-point method (Singh, UCLA 2024, chapter 4)."""

import math
from dataclasses import dataclass, replace
from typing import Self, cast

import numpy as np
from numpy.typing import NDArray

from flwr_frl.common.settings import Checked, require, setting
from flwr_frl.task.saddle_point.algorithm import LARGEST_DECAY, SaddlePoint
from flwr_frl.task.saddle_point.noise import Direction
from flwr_frl.task.saddle_point.problems import PairConstraint, Pairs, Problem
from flwr_frl.task.saddle_point.sets import Ball, ConvexSet, Everywhere
from flwr_frl.task.theory import MultiTaskTheory

RADII = "auto or a number above 0"
REGULARIZERS = "auto, theory or a number above 0"
PERTURBATIONS = "theory or a number, at least 0"


@dataclass(frozen=True)
class SaddlePointSettings(Checked):
    """Settings of decentralised multi-task optimisation.

    Parameters
    ----------
    saddle_step : float, default 1e-3
        Step size η of the parameters and of the dual variables.
    dual_regularizer : float or str, default "auto"
        δ, with δ η² ≤ 1 (appendix B): ``auto`` is 100, and ``theory`` is the value of
        theorem 3 or 4, computed by `resolved`.
    radius : float or str, default "auto"
        Radius of the ball X, which contains all parameters. ``auto`` is 20 for the
        chapter's problems, and sets no bound for other tasks.
    bandit_radius : float or str, default "0"
        ζ of bandit feedback (Algorithm 3); 0 means sample feedback (Algorithm 2), and
        ``theory`` is 1 / T for T rounds (theorem 4).
    bandit_direction : {"sphere", "bernoulli", "gaussian"}, default "sphere"
        Distribution of the perturbations of bandit feedback (section 4.4.1).
    primal_steps : int, default 1
        Number of updates of the parameters between two exchanges. The chapter has 1,
        and local iterations as future work (section 4.6).
    seed : int, default 0
        Seed of a random start, the samples, the perturbations and random compressors.
    num_server_rounds : int, default 30
        Rounds T, for ``theory``.
    """

    saddle_step: float = setting(1e-3, gt=0)
    dual_regularizer: float | str = setting("auto", form=REGULARIZERS)
    radius: float | str = setting("auto", form=RADII)
    bandit_radius: float | str = setting("0", form=PERTURBATIONS)
    bandit_direction: Direction = setting("sphere")
    primal_steps: int = setting(1, ge=1)
    seed: int = setting(0, ge=0)
    num_server_rounds: int = setting(30, ge=1)

    def __post_init__(self) -> None:
        """Check the ranges, also in combination."""
        super().__post_init__()
        require(self.zeta >= 0, "bandit-radius", self.bandit_radius, PERTURBATIONS)
        if self.dual_regularizer != "theory":
            delta = self.delta
            require(delta > 0, "dual-regularizer", self.dual_regularizer, REGULARIZERS)
            small = delta * self.saddle_step**2 <= LARGEST_DECAY
            allowed = f"at most {1 / self.saddle_step**2:g}, 1 / saddle-step squared"
            require(small, "dual-regularizer", self.dual_regularizer, allowed)
        self.feasible(Everywhere())

    @property
    def delta(self) -> float:
        """δ, unless it is ``theory``; 0 if the setting is not a number."""
        value = self.dual_regularizer
        return 100.0 if value == "auto" else _number(value)

    @property
    def zeta(self) -> float:
        """ζ; 0 for sample feedback, negative if the setting is not a number."""
        if self.bandit_radius == "theory":
            return 1 / self.num_server_rounds
        return _number(self.bandit_radius, -1.0)

    def feasible(self, default: ConvexSet) -> ConvexSet:
        """Return X, which is ``default`` if ``radius`` is ``auto``.

        Raises
        ------
        SettingsError
            If ``radius`` is not a positive number, or at most ``bandit-radius``.
        """
        x = default
        if self.radius != "auto":
            radius = _number(self.radius)
            require(radius > 0, "radius", self.radius, RADII)
            x = Ball(radius)
        if isinstance(x, Ball):
            allowed = f"below {x.radius:g}, the radius of the feasible set"
            valid = self.zeta < x.radius
            require(valid, "bandit-radius", self.bandit_radius, allowed)
        return x

    def resolved(self, feasible: ConvexSet, dual_variables: int, omega: float) -> Self:
        """Return the settings with a number as δ.

        Parameters
        ----------
        feasible : ConvexSet
            X if ``radius`` is ``auto``.
        dual_variables, omega
            See `MultiTaskTheory`; the constraints are those of `Proximity`.

        Raises
        ------
        SettingsError
            If it is ``theory``, and X is not a ball or the step size is too large.
        """
        if self.dual_regularizer != "theory":
            return self
        x = self.feasible(feasible)
        allowed = "auto or a number, as theory needs a radius"
        bounded = isinstance(x, Ball)
        require(bounded, "dual-regularizer", self.dual_regularizer, allowed)
        # ‖(2 (x_i − x_j), 2 (x_j − x_i))‖ for points at a distance of twice the radius.
        bound = 4 * math.sqrt(2) * cast(Ball, x).radius
        theory = MultiTaskTheory(dual_variables, bound, omega, self.zeta > 0)
        allowed = f"at most {theory.largest_step:.3g} with dual-regularizer='theory'"
        small = self.saddle_step <= theory.largest_step
        require(small, "saddle-step", self.saddle_step, allowed)
        return replace(self, dual_regularizer=theory.regularizer(self.saddle_step))

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
            regularizer=self.delta,
            zeta=self.zeta,
            exchanged=exchanged,
        )


def _number(text: float | str, otherwise: float = 0.0) -> float:
    """Return a finite number, or ``otherwise`` if there is none."""
    try:
        number = float(text)
    except ValueError:
        return otherwise
    return number if math.isfinite(number) else otherwise
