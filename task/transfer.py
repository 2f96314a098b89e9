"""Representation transfer for linear regression (Singh, UCLA 2024, chapter 5).

The two phases as functions, and the synthetic data of Table 5.1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from flwr_frl.common.settings import Checked, require, require_drawable, setting

Matrix = npt.NDArray[np.float64]

TEST_EXAMPLES = 500
# `phase_two_descent` stops at this norm of the gradient, relative to the first one.
GRADIENT_TOLERANCE = 1e-12
Role = Literal["auto", "source", "target"]


def is_source(role: str, client: int, num_sources: int) -> bool:
    """Return whether a client is a source; ``auto`` decides by its index."""
    return client < num_sources if role == "auto" else role == "source"


def basis(representations: Sequence[Matrix], tolerance: float = 0.01) -> Matrix:
    """Return an orthonormal basis V of the columns of [B_1 … B_m] (section 5.3.1).

    V consists of the left singular vectors of [B_1 … B_m] whose singular values are
    above ``tolerance`` times the largest.

    Parameters
    ----------
    representations : sequence of ndarray, shapes (d, k_i)
        One or more matrices B_i with finite entries.
    tolerance : float, default 0.01
        In (0, 1).

    Returns
    -------
    ndarray, shape (d, q)
        V.

    Raises
    ------
    SettingsError
        If all entries are 0.
    """
    stacked = np.concatenate(representations, axis=1)
    if not stacked.any():  # Also true without columns, which LAPACK cannot handle.
        require(False, "rank of the basis", 0, "at least 1: all representations are 0")
    u, singular_values, _ = np.linalg.svd(stacked, full_matrices=False)
    v: Matrix = u[:, singular_values > tolerance * singular_values[0]]
    return v


def unit_columns(representation: Matrix) -> Matrix:
    """Return the non-zero columns of B_i (d × k), scaled to length 1.

    Only their span matters (section 5.3.1). Scaling prevents a source with large values
    from pushing the columns of others below the tolerance of `basis`.
    """
    # Dividing by the largest entry first avoids overflow of the squares.
    largest = np.abs(representation).max(axis=0, initial=0.0)
    columns = representation[:, largest > 0] / largest[largest > 0]
    unit: Matrix = columns / np.linalg.norm(columns, axis=0)
    return unit


def halves(x: Matrix, y: Matrix) -> tuple[Matrix, Matrix, Matrix, Matrix]:
    """Return X1, y1, X2 and y2: the first n // 2 of a target's samples, and the others.

    Each phase uses one half (section 5.3).
    """
    n = len(y)
    return x[: n // 2], y[: n // 2], x[n // 2 :], y[n // 2 :]


def phase_one(v: Matrix, x: Matrix, y: Matrix) -> Matrix:
    """Return θ₁ = V argmin_w ‖y − X V w‖ (equation 5.5).

    V is the basis (d × q); X (n × d) and y are the samples. If several heads w attain
    the minimum, the one of least norm is used.
    """
    theta: Matrix = v @ np.linalg.lstsq(x @ v, y, rcond=None)[0]
    return theta


def phase_two(theta: Matrix, x: Matrix, y: Matrix) -> Matrix:
    """Return θ₂ = θ + X⁺(y − X θ), the least-squares solution nearest to θ.

    Equation 5.7, with θ = θ₁. With fewer samples than dimensions, θ₂ interpolates them.
    For θ = 0 it is the least-norm model, "from scratch" in Table 5.1.
    """
    return theta + np.linalg.lstsq(x, y - x @ theta, rcond=None)[0]


def phase_two_descent(
    theta: Matrix,
    x: Matrix,
    y: Matrix,
    *,
    max_steps: int = 100_000,
) -> Matrix:
    """Minimise ½ ‖y − X θ‖² by gradient descent (equation 5.6).

    The step size is 1 / σ_max(X)². The iterates converge to the result of `phase_two`.

    Parameters
    ----------
    theta : ndarray, shape (d,)
        Initial θ: θ₁.
    x : ndarray, shape (n, d)
        Inputs.
    y : ndarray, shape (n,)
        Outputs.
    max_steps : int, default 100,000
        Maximum number of steps; fewer are taken if the gradient's norm becomes 1e-12
        times its initial value.

    Returns
    -------
    ndarray, shape (d,)
        The last iterate.
    """
    if len(x) > x.shape[1]:
        # XᵀX = RᵀR and Xᵀy = Rᵀ(Qᵀy), so R and Qᵀy yield the same gradients.
        q, x = np.linalg.qr(x)
        y = q.T @ y
    # All iterates have the form θ + Xᵀ a, so it suffices to update a (n numbers).
    kernel = x @ x.T
    residual = y - x @ theta
    a = np.zeros_like(residual)
    largest = float(np.linalg.norm(x, 2)) ** 2
    threshold = GRADIENT_TOLERANCE**2 * float(residual @ kernel @ residual)
    for _ in range(max_steps):
        change = kernel @ residual
        # rᵀ X Xᵀ r is the squared norm of the gradient.
        if residual @ change <= threshold:
            break
        a += residual / largest
        residual = residual - change / largest
    return theta + x.T @ a


def effective_ranks(eigenvalues: Matrix, k: int) -> tuple[float, float]:
    """Return r_k(Σ) and R_k(Σ) of a covariance matrix (theorem 6).

    r_k = Σ_{i>k} λ_i / λ_{k+1} and R_k = (Σ_{i>k} λ_i)² / Σ_{i>k} λ_i², with the
    eigenvalues λ_1 ≥ … ≥ λ_d and 0 ≤ k < d.
    """
    tail = np.sort(eigenvalues)[::-1][k:]
    total = float(tail.sum())
    return total / float(tail[0]), total**2 / float(tail @ tail)


def benign_index(eigenvalues: Matrix, samples: int, b: float = 1.0) -> int | None:
    """Return k* = min {k ≥ 0: r_k(Σ) ≥ b n} (theorem 6); None if there is no such k.

    ``samples`` is the n of phase 2. The theorem leaves its constant b > 1 open.
    """
    for k in range(len(eigenvalues)):
        if effective_ranks(eigenvalues, k)[0] >= b * samples:
            return k
    return None


@dataclass(frozen=True)
class TransferData(Checked):
    """Source and target tasks with a nearly common representation (section 5.5.1).

    V* (d × q) has standard normal entries. Sources have θ*_i = V* w_i with x ~ N(0, I);
    with k outputs, each output has a head w_i of its own.
    Targets have θ* = u + v with u = V* w, v ~ N(0, σ_T² I) and x ~ N(0, Σ_T), where Σ_T
    has the eigenvalues exp(−j/τ) + 1e-4. Outputs are y = xᵀ θ* + N(0, σ²).

    We made these choices where the dissertation is not specific:

    - Heads are w ~ N(0, I/q), so that E‖u‖² = d.
    - The ratio in dB is the power ratio 10 log₁₀ (E‖u‖² / E‖v‖²), so that
      σ_T² = 10^(−ratio/10).
    - v is not projected out of the span, which contains q/d of its power; the
      dissertation states only "Gaussian with covariance I σ_T²".
    - Σ_T is diagonal, without loss of generality: V*, w and v are rotation invariant.
    - The inputs of sources, which Table 5.1 does not need, are white. Assumption 11
      then holds with r = 1 / λ_max(Σ_T).
    - σ² is a parameter.

    A client's data depend on the seed and its index, and are drawn on demand.

    Parameters
    ----------
    dimension : int, default 10
        Input dimension d.
    rank : int, default 2
        Dimension q of the sources' span.
    num_sources : int, default 10
        Clients below this index are sources, the others are targets.
    source_samples : int, default 100
        Training samples of a source, n_S.
    target_samples : int, default 8
        Training samples of a target for both phases, n_T.
    ratio_db : float, default 20
        In-out mixture ratio in dB.
    tau : float, default 1
        Decay τ of the eigenvalues.
    noise_variance : float, default 1e-3
        σ² > 0, since errors are relative to the error of θ*.
    seed : int, default 0
        Seed of all random values.
    role : {"auto", "source", "target"}, default "auto"
        Role of every client, for a device's own data; ``auto`` decides by the index.
    source_outputs : int, default 1
        Number k of outputs of a source, and of directions of its representation. The
        larger it is, the fewer sources are needed to span V*. Algorithms other than
        representation transfer use the first output.

    Raises
    ------
    SettingsError
        If a value is out of range.
    """

    dimension: int = setting(10, ge=1)
    rank: int = setting(2, ge=1)
    num_sources: int = setting(10, ge=0)
    source_samples: int = setting(100, ge=1)
    # At least one per phase.
    target_samples: int = setting(8, ge=2)
    ratio_db: float = setting(20.0)
    tau: float = setting(1.0, gt=0)
    noise_variance: float = setting(1e-3, gt=0)
    seed: int = setting(0, ge=0)
    role: Role = setting("auto")
    source_outputs: int = setting(1, ge=1)

    def __post_init__(self) -> None:
        """Check the ranges."""
        super().__post_init__()
        allowed = f"from 1 to {self.dimension}, the dimension"
        require(self.rank <= self.dimension, "rank", self.rank, allowed)
        samples = self.source_samples, self.target_samples, TEST_EXAMPLES
        longest = max(self.rank, self.source_outputs, *samples)
        what = "dimension times the largest of rank, source-outputs and samples"
        require_drawable(self.dimension * longest, what)

    @cached_property
    def span(self) -> Matrix:
        """V*, shape (dimension, rank)."""
        rng = np.random.default_rng([self.seed, 0x7A51])
        return rng.standard_normal((self.dimension, self.rank))

    @cached_property
    def eigenvalues(self) -> Matrix:
        """Eigenvalues of Σ_T, shape (dimension,)."""
        decay: Matrix = np.exp(-np.arange(1, self.dimension + 1) / self.tau)
        return decay + 1e-4

    def is_source(self, client: int) -> bool:
        """Return whether a client is a source."""
        return is_source(self.role, client, self.num_sources)

    def model(self, client: int) -> Matrix:
        """Return a client's true model θ*, shape (dimension,).

        For a source with k > 1 outputs, the shape is (dimension, k).
        """
        rng = np.random.default_rng([self.seed, 0x7A52, client])
        source = self.is_source(client)
        several = source and self.source_outputs > 1
        shape = (self.rank, self.source_outputs) if several else (self.rank,)
        u: Matrix = self.span @ (rng.standard_normal(shape) / np.sqrt(self.rank))
        if source:
            return u
        return u + rng.standard_normal(self.dimension) * 10 ** (-self.ratio_db / 20)

    def draw(
        self, client: int, draw: int = 0, samples: int | None = None
    ) -> tuple[Matrix, Matrix]:
        """Return samples of a client: draw 0 for training, draw 1 for testing.

        y has the shape (n,), or (n, k) for a source with k > 1 outputs.
        """
        source = self.is_source(client)
        n = samples or (self.source_samples if source else self.target_samples)
        rng = np.random.default_rng([self.seed, 0x7A53, client, draw])
        x = rng.standard_normal((n, self.dimension))
        if not source:
            x *= np.sqrt(self.eigenvalues)
        outputs = x @ self.model(client)
        noise = rng.standard_normal(outputs.shape) * np.sqrt(self.noise_variance)
        return x, outputs + noise

    def excess_risk(self, client: int, model: Matrix) -> float:
        """Return EER(θ, θ*) = R(θ) − R(θ*), with R(θ) = E (y − xᵀ θ)² (equation 5.2).

        It is (θ − θ*)ᵀ Σ (θ − θ*), as the noise is independent of x; for several
        outputs, the sum over them.
        """
        difference = model - self.model(client)
        source = self.is_source(client)
        variances = np.ones(self.dimension) if source else self.eigenvalues
        return float(np.sum(variances @ difference**2))

    def errors(self, client: int, *models: Matrix) -> list[float]:
        """Return the test errors of models relative to that of θ* (Table 5.1).

        Parameters
        ----------
        client : int
            The client.
        *models : ndarray, shape (dimension,)
            Learned models.

        Returns
        -------
        list of float
            The mean squared error of θ* on 500 test samples, then the error of each
            model divided by it.
        """
        x, y = self.draw(client, 1, TEST_EXAMPLES)
        mse = [float(np.mean((y - x @ m) ** 2)) for m in (self.model(client), *models)]
        return [mse[0], *(error / mse[0] for error in mse[1:])]
