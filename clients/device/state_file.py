"""Files of a client's personal state: format and order of versions."""

import contextlib
import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

Arrays = dict[str, npt.NDArray[np.generic]]
Shapes = Mapping[str, tuple[int, ...]]

# Metadata key: the number of a version among all that a client has written.
COUNTER = "counter"


class ForeignStateError(ValueError):
    """A file is not a state of this client.

    Parameters
    ----------
    message : str
        Reason, for the device's log.
    public : str, default ""
        Reason for the server, without names of classes; by default the message.
    """

    def __init__(self, message: str, public: str = "") -> None:
        super().__init__(message)
        self.public = public or message


class DamagedStateError(ValueError):
    """A file differs from what was written."""


def pack(
    arrays: Mapping[str, npt.NDArray[np.generic]], about: Mapping[str, str]
) -> bytes:
    """Return the contents of a file; the arrays must be in C order."""
    return save(dict(arrays), metadata={**about, "sha256": _digest(arrays, about)})


def number_in(path: Path, name: str) -> int:
    """Return a number from a file's metadata; 0 if it is missing."""
    with contextlib.suppress(SafetensorError, OSError, ValueError):
        return int(_metadata(path).get(name, 0))
    return 0


def age_key(path: Path) -> tuple[int, int, str]:
    """Return a sort key that orders versions by age, the oldest first.

    The key is the counter. File times, unreliable on a device without a battery-backed
    clock, order only files of earlier releases, which have no counter and come first.
    """
    try:
        counter = int(_metadata(path).get(COUNTER, 0))
    except (SafetensorError, OSError, ValueError):
        # Sorted as the newest, so that it is read and the damage is logged.
        counter = sys.maxsize
    return counter, 0 if counter else path.stat().st_mtime_ns, path.name


def _metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="np") as file:
        return file.metadata() or {}


def read_checked(
    path: Path,
    client: str,
    shapes: Shapes | None = None,
    about: Mapping[str, str] | None = None,
) -> tuple[dict[str, str], Arrays]:
    """Return metadata and arrays of a file of a `PersonalState`.

    Raises
    ------
    ForeignStateError
        If the file belongs to another client, its arrays have other shapes, or it has
        other ``classes`` or another ``algorithm`` than ``about``.
    DamagedStateError, OSError, SafetensorError, ValueError
        If it cannot be read.
    """
    with safe_open(path, framework="np") as file:
        metadata = file.metadata() or {}
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if metadata.pop("sha256", "") != _digest(arrays, metadata):
        raise DamagedStateError("its checksum is wrong")
    if metadata.get("client", "") != client:
        raise ForeignStateError(f"it is of client {metadata.get('client')!r}")
    # Classes first: other classes are the usual reason for other shapes.
    for name, what in (("classes", "for the classes"), ("algorithm", "of")):
        written = metadata.get(name)
        now = (about or {}).get(name, written)
        # Earlier releases installed our packages without the name `flwr_frl`.
        if written is not None and now not in (written, f"flwr_frl.{written}"):
            message = f"it is {what} {written}, not {now}"
            raise ForeignStateError(message, _CLASSES if name == "classes" else "")
    for name in sorted(arrays.keys() | shapes) if shapes is not None else ():
        wanted = shapes.get(name) if shapes else None
        shape = arrays[name].shape if name in arrays else None
        if shape != wanted:
            raise ForeignStateError(
                f"it does not fit the model: its {name!r} has the shape {shape}, not "
                f"{wanted}"
            )
    return metadata, arrays


# For the server, which must not learn the names of a device's classes.
_CLASSES = "it is for other classes than the client has now"


def _digest(
    arrays: Mapping[str, npt.NDArray[np.generic]], about: Mapping[str, str]
) -> str:
    digest = hashlib.sha256(repr(sorted(about.items())).encode())
    for name in sorted(arrays):
        value = arrays[name]
        digest.update(f"{name}/{value.dtype.str}/{value.shape}/".encode())
        digest.update(np.asarray(value, order="C").tobytes())
    return digest.hexdigest()
