"""Euclidean projection onto a simplex."""

import numpy as np
import numpy.typing as npt


def nearest_in_simplex(
    x: npt.NDArray[np.float64], total: float = 1.0
) -> npt.NDArray[np.float64]:
    """Return the points with x_k ≥ 0 and Σ_k x_k = total that are nearest to rows.

    They are max(0, x − θ), with θ from the largest entries (Held, Wolfe and Crowder,
    1974).

    Parameters
    ----------
    x : ndarray, shape (n, d)
        The rows, with d ≥ 1.
    total : float, default 1
        Sum of the entries of each point, above 0.
    """
    # A common shift of a row has no effect; small numbers would vanish beside it.
    x = x - x.max(axis=1, keepdims=True)
    excess = (-np.sort(-x, axis=1)).cumsum(axis=1) - total
    theta = (excess / np.arange(1, x.shape[1] + 1)).max(axis=1, keepdims=True)
    return np.asarray(np.maximum(x - theta, 0.0))
