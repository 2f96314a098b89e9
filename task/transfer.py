"""Representation transfer for linear regression (Singh, UCLA 2024, chapter 5).

The pure mathematics, and the generator of the data of Table 5.1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import numpy as np
import numpy.typing as npt

from flwr_frl.task.settings import Checked, Range, Seed, require, require_drawable

Matrix = npt.NDArray[np.float64]

TEST_EXAMPLES = 500


def basis(representations: Sequence[Matrix], tolerance: float = 0.01) -> Matrix:
    """Return an orthonormal basis V of the columns of [B_1 … B_m] (section 5.3.1).

    Parameters
    ----------
    representations : sequence of ndarray, shapes (d, k_i)
        The B_i.
    tolerance : float, default 0.01
        In (0, 1). The rank is the number of singular values of [B_1 … B_m] above
        ``tolerance`` times the largest; the basis is their left singular vectors.

    Returns
    -------
    ndarray, shape (d, q)
        V.

    Raises
    ------
    SettingsError
        If the input dimensions differ, a value is not finite, or the rank is 0.
    """
    require(0 < tolerance < 1, "rank-tolerance", tolerance, "in (0, 1)")
    number = len(representations)
    require(number > 0, "number of representations", number, "at least 1")
    dimensions = sorted({len(b) for b in representations})
    name = "input dimension of the representations"
    require(len(dimensions) == 1, name, dimensions, "the same for all")
    stacked = np.concatenate(representations, axis=1)
    require(bool(np.isfinite(stacked).all()), "a representation", "NaN", "finite")
    # LAPACK cannot take a matrix without columns.
    if not stacked.any():
        require(False, "rank of the basis", 0, "at least 1: all representations are 0")
    u, singular_values, _ = np.linalg.svd(stacked, full_matrices=False)
    v: Matrix = u[:, singular_values > tolerance * singular_values[0]]
    require(v.shape[1] > 0, "rank of the basis", 0, "at least 1")
    return v


def unit_columns(representation: Matrix) -> Matrix:
    """Return the columns of B_i (d × k), each of length 1; zero ones are left out.

    Only their span counts (section 5.3.1), so no source decides by the size of its
    numbers what of the others' columns is above a tolerance.
    """
    # First by the largest entry, whose square may not be a number any more.
    largest = np.abs(representation).max(axis=0, initial=0.0)
    columns = representation[:, largest > 0] / largest[largest > 0]
    unit: Matrix = columns / np.linalg.norm(columns, axis=0)
    return unit


def halves(x: Matrix, y: Matrix) -> tuple[Matrix, Matrix, Matrix, Matrix]:
    """Split a target's samples over the two phases: the first n // 2, and the others.

    Returns
    -------
    x1, y1, x2, y2 : ndarray
        Inputs and outputs.

    Raises
    ------
    SettingsError
        If there are fewer than two samples.
    """
    n = len(y)
    require(n >= 2, "target-samples", n, "at least 2, one for each phase")
    return x[: n // 2], y[: n // 2], x[n // 2 :], y[n // 2 :]


def phase_one(v: Matrix, x: Matrix, y: Matrix) -> Matrix:
    """Return θ₁ = V argmin_w ‖y − X V w‖ (equation 5.5).

    V is the basis (d × q), X (n × d) and y are the samples. Of the heads w that are
    equally good it takes the one of least norm.
    """
    theta: Matrix = v @ np.linalg.lstsq(x @ v, y, rcond=None)[0]
    return theta


def phase_two(theta: Matrix, x: Matrix, y: Matrix) -> Matrix:
    """Return θ₂ = θ + X⁺(y − X θ), the least-squares solution nearest to θ.

    Equation 5.7, where θ is θ₁. With fewer samples than dimensions it interpolates
    them. From θ = 0 it is the model of least norm, the tables' "from scratch".
    """
    return theta + np.linalg.lstsq(x, y - x @ theta, rcond=None)[0]


def phase_two_descent(
    theta: Matrix,
    x: Matrix,
    y: Matrix,
    *,
    max_steps: int = 100_000,
    tolerance: float = 1e-12,
) -> Matrix:
    """Descend from θ along the gradient of ½ ‖y − X θ‖² (equation 5.6).

    Its limit is that of `phase_two`. The step is 1 / σ_max(X)².

    Parameters
    ----------
    theta : ndarray, shape (d,)
        Where to start: θ₁.
    x : ndarray, shape (n, d)
        Inputs.
    y : ndarray, shape (n,)
        Outputs.
    max_steps : int, default 100,000
        At most so many steps.
    tolerance : float, default 1e-12
        Stop when the gradient's norm has fallen to this part of its first value.

    Returns
    -------
    ndarray, shape (d,)
        The last iterate.
    """
    if len(x) > x.shape[1]:
        # XᵀX = RᵀR and Xᵀy = Rᵀ(Qᵀy): the same gradients from fewer rows.
        q, x = np.linalg.qr(x)
        y = q.T @ y
    # All iterates are θ + Xᵀ a, so steps on a (n numbers) are steps on θ (d numbers).
    kernel = x @ x.T
    residual = y - x @ theta
    a = np.zeros_like(residual)
    largest = float(np.linalg.norm(x, 2)) ** 2
    enough = tolerance**2 * float(residual @ kernel @ residual)
    for _ in range(max_steps):
        change = kernel @ residual
        # rᵀ X Xᵀ r, the squared norm of the gradient
        if residual @ change <= enough:
            break
        a += residual / largest
        residual = residual - change / largest
    return theta + x.T @ a


@dataclass(frozen=True)
class TransferData(Checked):
    """Source and target tasks that nearly share a representation (section 5.5.1).

    V* (d × q) has standard normal entries. Sources have θ*_i = V* w_i with x ~ N(0, I);
    targets have θ* = u + v with u = V* w, v ~ N(0, σ_T² I) and x ~ N(0, Σ_T), where
    Σ_T has the eigenvalues exp(−j/τ) + 1e-4. Outputs are y = xᵀ θ* + N(0, σ²).

    The dissertation leaves open, and here it is: heads w ~ N(0, I/q), so that E‖u‖² = d
    (it names no distribution); the ratio in dB is 10 log₁₀ (E‖u‖² / E‖v‖²), one of
    powers, so that σ_T² = 10^(−ratio/10); v is not projected out of the span, where q/d
    of its power lies (it says no more than "Gaussian with covariance I σ_T²"); Σ_T is
    diagonal, which loses nothing as V*, w and v are rotation invariant; the sources'
    inputs, which Table 5.1 does without, are white, so that assumption 11 holds with
    r = 1 / λ_max(Σ_T); σ² is a parameter.

    A client's data follow from the seed and its number, and no two clients are held at
    once.

    Parameters
    ----------
    dimension : int, default 10
        Input dimension d.
    rank : int, default 2
        Dimension q of the sources' span.
    num_sources : int, default 10
        The first so many clients are sources, the others targets.
    source_samples : int, default 100
        Training samples of a source, n_S.
    target_samples : int, default 8
        Training samples of a target, n_T, of both phases.
    ratio_db : float, default 20
        In-out mixture ratio in dB.
    tau : float, default 1
        Decay τ of the eigenvalues.
    noise_variance : float, default 1e-3
        σ², above 0: errors are relative to that of θ*.
    seed : int, default 0
        Fixes everything.

    Raises
    ------
    SettingsError
        If a value is out of its range.
    """

    dimension: Annotated[int, Range("[1, inf)")] = 10
    rank: Annotated[int, Range("[1, inf)")] = 2
    num_sources: Annotated[int, Range("[0, inf)")] = 10
    source_samples: Annotated[int, Range("[1, inf)")] = 100
    # One for each phase.
    target_samples: Annotated[int, Range("[2, inf)")] = 8
    ratio_db: Annotated[float, Range("(-inf, inf)")] = 20.0
    tau: Annotated[float, Range("(0, inf)")] = 1.0
    noise_variance: Annotated[float, Range("(0, inf)")] = 1e-3
    seed: Annotated[int, Seed] = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        super().__post_init__()
        allowed = f"from 1 to {self.dimension}, the dimension"
        require(self.rank <= self.dimension, "rank", self.rank, allowed)
        samples = self.source_samples, self.target_samples, TEST_EXAMPLES
        longest = max(self.rank, *samples)
        what = "dimension times the largest of rank, source- and target-samples"
        require_drawable(self.dimension * longest, what)

    @cached_property
    def span(self) -> Matrix:
        """V*, shape (dimension, rank)."""
        rng = np.random.default_rng([self.seed, 0x7A51])
        return rng.standard_normal((self.dimension, self.rank))

    @cached_property
    def eigenvalues(self) -> Matrix:
        """Those of Σ_T, shape (dimension,)."""
        decay: Matrix = np.exp(-np.arange(1, self.dimension + 1) / self.tau)
        return decay + 1e-4

    def is_source(self, client: int) -> bool:
        """Return whether a client is a source."""
        return client < self.num_sources

    def model(self, client: int) -> Matrix:
        """Return a client's true model θ*, shape (dimension,)."""
        rng = np.random.default_rng([self.seed, 0x7A52, client])
        u: Matrix = self.span @ (rng.standard_normal(self.rank) / np.sqrt(self.rank))
        if self.is_source(client):
            return u
        return u + rng.standard_normal(self.dimension) * 10 ** (-self.ratio_db / 20)

    def draw(
        self, client: int, draw: int = 0, samples: int | None = None
    ) -> tuple[Matrix, Matrix]:
        """Draw samples of a source or target; draw 0 trains, draw 1 tests."""
        source = self.is_source(client)
        n = samples or (self.source_samples if source else self.target_samples)
        rng = np.random.default_rng([self.seed, 0x7A53, client, draw])
        x = rng.standard_normal((n, self.dimension))
        if not source:
            x *= np.sqrt(self.eigenvalues)
        noise = rng.standard_normal(n) * np.sqrt(self.noise_variance)
        return x, x @ self.model(client) + noise

    def errors(self, client: int, *models: Matrix) -> list[float]:
        """Return the entries of Table 5.1: errors of models relative to that of θ*.

        Parameters
        ----------
        client : int
            The client.
        *models : ndarray, shape (dimension,)
            Learned models.

        Returns
        -------
        list of float
            The mean squared error of θ* on 500 test samples, then that of each model
            divided by it.
        """
        x, y = self.draw(client, 1, TEST_EXAMPLES)
        mse = [float(np.mean((y - x @ m) ** 2)) for m in (self.model(client), *models)]
        return [mse[0], *(error / mse[0] for error in mse[1:])]
