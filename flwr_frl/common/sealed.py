"""Safetensors files with a checksum in their metadata. Imports neither torch nor flwr.

Checkpoints, clients' states and exported models are such files.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.numpy import save

Arrays = dict[str, npt.NDArray[np.generic]]
# Metadata key of the checksum.
SHA256 = "sha256"


class ChecksumError(ValueError):
    """A file whose content has changed since it was written."""


def seal(
    arrays: Mapping[str, npt.NDArray[np.generic]], about: Mapping[str, str]
) -> bytes:
    """Return the content of a file with arrays and metadata, for `unseal`."""
    # safetensors writes the memory as is, so arrays must be C-contiguous.
    arrays = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    return save(arrays, metadata={**about, SHA256: digest(arrays, about)})


def unseal(path: Path) -> tuple[dict[str, str], Arrays]:
    """Return the metadata and the arrays of a file.

    Raises
    ------
    ChecksumError
        If the content has changed since it was written.
    OSError, SafetensorError
        If the file cannot be read.
    """
    with safe_open(path, framework="np") as file:
        metadata = file.metadata() or {}
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    check(metadata, arrays)
    return metadata, arrays


def check(
    metadata: dict[str, str], arrays: Mapping[str, npt.NDArray[np.generic]]
) -> None:
    """Remove the checksum from metadata; raise `ChecksumError` if it is wrong."""
    if (written := metadata.pop(SHA256, "")) != digest(arrays, metadata):
        missing = "it has no checksum; expected a file that flwr-frl has written"
        raise ChecksumError("its checksum is wrong" if written else missing)


def digest(
    arrays: Mapping[str, npt.NDArray[np.generic]], about: Mapping[str, str]
) -> str:
    """Return the checksum of names, types, shapes and values, and of metadata."""
    sha256 = hashlib.sha256(repr(sorted(about.items())).encode())
    for name in sorted(arrays):
        array = arrays[name]
        sha256.update(f"{name}/{array.dtype.str}/{array.shape}/".encode())
        sha256.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return sha256.hexdigest()
