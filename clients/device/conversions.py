"""Conversions between arrays of messages and tensors of models, and names of groups."""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flwr_frl.task.devices import CPU

Tensors = dict[str, Tensor]

# Minimum size in bytes of received arrays that are not copied.
LARGE = 2**20


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
    copies = {n: torch.from_numpy(np.array(value)) for n, value in arrays.items()}
    if device == CPU:
        return copies
    return {name: tensor.to(device) for name, tensor in copies.items()}


def received_tensors(
    arrays: Mapping[str, npt.NDArray[np.generic]], device: torch.device
) -> Tensors:
    """Return arrays on a device; large read-only ones on the CPU are not copied.

    All clients of a process then share this memory, so they must not change it
    (`check_received`).
    """
    large = {
        name: value
        for name, value in arrays.items()
        if device == CPU and value.nbytes >= LARGE and not value.flags.writeable
    }
    if not large:
        return to_tensors(arrays, device)
    tensors = to_tensors({n: v for n, v in arrays.items() if n not in large}, device)
    with warnings.catch_warnings():
        # torch cannot mark a tensor as read-only, and warns.
        warnings.simplefilter("ignore", UserWarning)
        tensors |= {name: torch.from_numpy(value) for name, value in large.items()}
    return {name: tensors[name] for name in arrays}


def difference(after: Tensors, before: Mapping[str, Tensor]) -> Tensors:
    """Return the changes of arrays; for booleans, whether they have changed."""
    return {
        n: value ^ before[n] if value.dtype == torch.bool else value - before[n]
        for n, value in after.items()
    }
