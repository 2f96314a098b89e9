"""The file format of a run's checkpoint. Imports neither torch nor flwr.

The server writes checkpoints and resumes from them; devices read their model from them.
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
# Checkpoint of the round with the best mean on the validation sets.
BEST_FILE = "checkpoint-best-validation.safetensors"
# Prefixes of array names in the file: shared arrays, and the strategy's state.
SHARED, STATE = "arrays/", "state/"


class ChecksumError(ValueError):
    """A checkpoint whose content has changed since it was written."""


class Content(NamedTuple):
    """Content of a checkpoint.

    Parameters
    ----------
    about : dict
        JSON values: the run's ``settings``, its last ``round``, the strategy's
        ``values``, and others.
    arrays : dict of str to ndarray
        Shared arrays, by name.
    state : dict of str to ndarray
        Arrays of the strategy's state, by name.
    """

    about: dict[str, Any]
    arrays: Arrays
    state: Arrays


def pack(content: Content) -> bytes:
    """Serialise a checkpoint for `read`."""
    tensors = {SHARED + name: array for name, array in content.arrays.items()}
    tensors |= {STATE + name: array for name, array in content.state.items()}
    # safetensors writes the memory as is, so arrays must be C-contiguous.
    tensors = {n: np.asarray(array, order="C") for n, array in tensors.items()}
    text = json.dumps(content.about)
    return save(tensors, metadata={"run": text, "sha256": _digest(text, tensors)})


def read(path: Path) -> Content:
    """Read a checkpoint.

    Parameters
    ----------
    path : Path
        The file.

    Raises
    ------
    ChecksumError
        If the content has changed since it was written.
    OSError, SafetensorError
        If the file cannot be read.
    LookupError, TypeError, ValueError
        If the file is not a checkpoint.
    """
    with safe_open(path, framework="np") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    text = metadata["run"]
    # Checkpoints of early versions have no checksum.
    if metadata.get("sha256", digest := _digest(text, tensors)) != digest:
        raise ChecksumError("its checksum is wrong")
    return Content(json.loads(text), _under(SHARED, tensors), _under(STATE, tensors))


def read_about(path: Path) -> dict[str, Any]:
    """Read a checkpoint's ``about`` without its arrays; raises as `read`."""
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
