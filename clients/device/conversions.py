"""Conversions between arrays of messages and tensors of models, and names of groups."""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Tensors = dict[str, Tensor]

# Tensors of received arrays share read-only memory, of which torch warns once.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"0", np.uint8))


def under(group: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """Return the arrays of a group by their names within it."""
    return {n[len(group) :]: t for n, t in tensors.items() if n.startswith(group)}


def within(group: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """Prefix names with a group; the inverse of `under`."""
    return {group + n: t for n, t in tensors.items()}


def to_numpy(tensor: Tensor) -> npt.NDArray[Any]:
    """Return a tensor as an array, which shares its memory on the CPU."""
    array: npt.NDArray[Any] = tensor.detach().cpu().numpy()
    return array


def to_tensors(
    arrays: Mapping[str, npt.NDArray[np.generic]], device: torch.device
) -> Tensors:
    """Return copies of arrays on a device."""
    return {n: torch.from_numpy(np.array(a)).to(device) for n, a in arrays.items()}


def difference(after: Tensors, before: Mapping[str, Tensor]) -> Tensors:
    """Return the changes of arrays; for booleans, whether they have changed."""
    return {
        n: value ^ before[n] if value.dtype == torch.bool else value - before[n]
        for n, value in after.items()
    }
