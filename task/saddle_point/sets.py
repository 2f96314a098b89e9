"""Sets X of feasible parameters (Singh, UCLA 2024, chapter 4, equation 4.1)."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from flwr_frl.common.settings import require
from flwr_frl.task.saddle_point.problems import Float64s, dot


class ConvexSet(Protocol):
    """A closed and convex set X, bounded in the theory."""

    def project(self, x: Float64s) -> Float64s:
        """Return the point of X nearest to each row of `x`, shape (n, d)."""

    def shrunk(self, zeta: float) -> "ConvexSet":
        """Return {(1 − ζ/r) x + (ζ/r) y0: x in X} (section 4.4).

        B(y0, r) is a ball inside X. All points within ζ of the result lie in X.

        Parameters
        ----------
        zeta : float
            The perturbation ζ, in (0, r).

        Raises
        ------
        SettingsError
            If `zeta` is out of range.
        """


class Everywhere:
    """The whole space, where X has no bound; the theory needs a bounded X."""

    def project(self, x: Float64s) -> Float64s:
        """Return `x`."""
        return x

    def shrunk(self, zeta: float) -> "Everywhere":
        """Return the whole space."""
        return self


@dataclass(frozen=True)
class Ball:
    """A ball around the origin.

    Parameters
    ----------
    radius : float, default 20
        R/2; chapter 4 has R = 40.

    Raises
    ------
    SettingsError
        If the radius is not a positive number.
    """

    radius: float = 20.0

    def __post_init__(self) -> None:
        """Check the radius."""
        require(0 < self.radius < np.inf, "the ball's radius", self.radius, "above 0")

    def project(self, x: Float64s) -> Float64s:
        """Scale each row to a length of at most the radius."""
        norms = np.sqrt(dot(x, x))
        return x * (self.radius / np.maximum(norms, self.radius))[:, None]

    def shrunk(self, zeta: float) -> "Ball":
        """Return the ball with radius reduced by ζ."""
        allowed = f"above 0 and below {self.radius}"
        require(0 < zeta < self.radius, "zeta", zeta, allowed)
        return Ball(self.radius - zeta)
