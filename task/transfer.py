"""Representation transfer for linear regression (Singh, UCLA 2024, chapter 5).

The two phases as functions of NumPy arrays.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]

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
        One or more matrices B_i with finite entries, not all 0.
    tolerance : float, default 0.01
        In (0, 1).

    Returns
    -------
    ndarray, shape (d, q)
        V.
    """
    stacked = np.concatenate(representations, axis=1)
    u, singular_values, _ = np.linalg.svd(stacked, full_matrices=False)
    return u[:, singular_values > tolerance * singular_values[0]]


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
    return v @ np.linalg.lstsq(x @ v, y, rcond=None)[0]


def phase_two(theta: Matrix, x: Matrix, y: Matrix) -> Matrix:
    """Return θ₂ = θ + X⁺(y − X θ), the least-squares solution nearest to θ.

    Equation 5.7, with θ = θ₁. With fewer samples than dimensions, θ₂ interpolates them.
    For θ = 0 it is the least-norm model, "from scratch" in Table 5.1.
    """
    return theta + np.linalg.lstsq(x, y - x @ theta, rcond=None)[0]


def phase_two_descent(
    theta: Matrix, x: Matrix, y: Matrix, *, max_steps: int = 100_000
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
