"""Matrices of low rank."""

from typing import Any

import numpy as np
import numpy.typing as npt


def low_rank(array: npt.NDArray[Any], energy: float) -> npt.NDArray[Any]:
    """Return an array of lower rank.

    The rank K is the smallest with Σ_{i ≤ K} σ_i² > T Σ_i σ_i² (FedKD: Wu et al., 2022,
    Nature Communications 13, 2032).

    Parameters
    ----------
    array : ndarray
        With more than two dimensions, all but the first are flattened. Vectors,
        integers and arrays that are not finite are returned unchanged.
    energy : float
        T, in [0, 1]; with 1 the array is returned unchanged.
    """
    if array.ndim < 2 or energy >= 1 or not np.isfinite(array).all():
        return array
    matrix = array.reshape(len(array), -1).astype(np.float64)
    u, sigma, v = np.linalg.svd(matrix, full_matrices=False)
    total = np.cumsum(sigma**2)
    rank = min(int((total <= energy * total[-1]).sum()) + 1, len(sigma))
    values: npt.NDArray[Any] = (u[:, :rank] * sigma[:rank]) @ v[:rank]
    return values.reshape(array.shape).astype(array.dtype, copy=False)
