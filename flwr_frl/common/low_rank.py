"""Matrices of low rank: truncated decompositions, and the names of LoRA matrices."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

# Matrix A in the names that ``peft`` gives to the arrays of an adapter.
_A = re.compile(r"\.lora_(embedding_)?A(?=\.|$)")


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


class Adapter(NamedTuple):
    """Names of a layer with a LoRA adapter, and of the matrices A and B."""

    layer: str
    a: str
    b: str


def adapters_in(names: Iterable[str]) -> list[Adapter]:
    """Return the LoRA adapters among the names of a model's arrays."""
    adapters = []
    for name in names:
        if match := _A.search(name):
            layer, b = name[: match.start()], _A.sub(r".lora_\1B", name)
            adapters.append(Adapter(layer, name, b))
    return adapters


def first_ranks(arrays: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return the first rows of A and columns of B of LoRA adapters, by name.

    Adapters whose rank is not larger are left out.
    """
    parts = {}
    for _, a, b in adapters_in(arrays):
        if rank < len(arrays[a]):
            parts[a], parts[b] = arrays[a][:rank], arrays[b][:, :rank]
    return parts


def padded(array: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Return an array with zeros after its entries, up to a shape."""
    if array.shape == shape:
        return array
    full = np.zeros(shape, array.dtype)
    full[tuple(map(slice, array.shape))] = array
    return full
