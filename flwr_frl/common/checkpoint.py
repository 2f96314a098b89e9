"""The file format of a run's checkpoint. Imports neither torch nor flwr.

The server writes checkpoints and resumes from them; devices read their model from them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flwr_frl.common.sealed import Arrays, seal, unseal

FILE = "checkpoint.safetensors"
# Prefixes of array names in the file: shared arrays, and the strategy's state.
SHARED, STATE = "arrays/", "state/"

# Code of the error if another setting differs.
OTHER_SETTINGS = "other-settings"


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
    # Their order is lost in the file's sorted header.
    order = json.dumps([*tensors])
    return seal(tensors, {"run": json.dumps(content.about), "order": order})


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
    metadata, tensors = unseal(path)
    about = json.loads(metadata["run"])
    tensors = {name: tensors[name] for name in json.loads(metadata["order"])}
    return Content(about, _under(SHARED, tensors), _under(STATE, tensors))


def _under(prefix: str, tensors: Mapping[str, npt.NDArray[np.generic]]) -> Arrays:
    return {n[len(prefix) :]: t for n, t in tensors.items() if n.startswith(prefix)}
