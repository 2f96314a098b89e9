"""The file of a run's checkpoint: its format. Needs neither torch nor flwr.

The server writes it and goes on from it; devices take their model out of it.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.numpy import save

Arrays = dict[str, npt.NDArray[np.generic]]

FILE = "checkpoint.safetensors"
# What the names of a file's arrays begin with: the shared ones, the strategy's own.
SHARED, STATE = "arrays/", "state/"


class ChecksumError(ValueError):
    """A checkpoint that is no longer what was written."""


class Content(NamedTuple):
    """What a checkpoint holds.

    Parameters
    ----------
    about : dict
        ``settings`` of the run, its last ``round``, the strategy's ``values``, ….
    arrays : dict of str to ndarray
        The shared ones, by name.
    state : dict of str to ndarray
        The strategy's own, by name.
    """

    about: dict[str, Any]
    arrays: Arrays
    state: Arrays


def pack(content: Content) -> bytes:
    """Return what `read` reads."""
    tensors = {SHARED + name: array for name, array in content.arrays.items()}
    tensors |= {STATE + name: array for name, array in content.state.items()}
    # safetensors writes memory as it lies.
    tensors = {n: np.asarray(array, order="C") for n, array in tensors.items()}
    text = json.dumps(content.about)
    return save(tensors, metadata={"run": text, "sha256": _digest(text, tensors)})


def read(path: Path) -> Content:
    """Return what a checkpoint holds.

    Raises
    ------
    ChecksumError
        If it is no longer what was written.
    OSError, SafetensorError
        If it cannot be read.
    LookupError, TypeError, ValueError
        If it is something else.
    """
    with safe_open(path, framework="np") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    text = metadata["run"]
    # Those of older versions have none.
    if metadata.get("sha256", digest := _digest(text, tensors)) != digest:
        raise ChecksumError("its checksum is wrong")
    return Content(json.loads(text), _under(SHARED, tensors), _under(STATE, tensors))


def read_about(path: Path) -> dict[str, Any]:
    """Return what a checkpoint says of its run, without its arrays; as `read`."""
    with safe_open(path, framework="np") as file:
        about: dict[str, Any] = json.loads((file.metadata() or {})["run"])
    return about


def _under(prefix: str, tensors: Mapping[str, npt.NDArray[np.generic]]) -> Arrays:
    return {n[len(prefix) :]: t for n, t in tensors.items() if n.startswith(prefix)}


def _digest(about: str, tensors: Mapping[str, npt.NDArray[np.generic]]) -> str:
    digest = hashlib.sha256(about.encode())
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name}/{value.dtype.str}/{value.shape}/".encode())
        digest.update(np.ascontiguousarray(value).data)
    return digest.hexdigest()
