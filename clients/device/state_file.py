"""The file of one version of a client's personal state: its format and its order."""

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

# The number of a version among all that a client has written, of all its runs.
COUNTER = "counter"


class ForeignStateError(ValueError):
    """A file that is no state of this client; the message says why.

    Parameters
    ----------
    message : str
        For the device's own log.
    told : str, default ""
        What others may know of it; by default the message.
    """

    def __init__(self, message: str, told: str = "") -> None:
        super().__init__(message)
        self.told = told or message


class DamagedStateError(ValueError):
    """A file that is no longer what was written."""


def pack(
    arrays: Mapping[str, npt.NDArray[np.generic]], about: Mapping[str, str]
) -> bytes:
    """Return a file of arrays, which lie in C order, as `read_checked` reads it."""
    return save(dict(arrays), metadata={**about, "sha256": _digest(arrays, about)})


def number_in(path: Path, name: str) -> int:
    """Return a number that was written along; 0 if there is none or no such file."""
    with contextlib.suppress(SafetensorError, OSError, ValueError):
        return int(_metadata(path).get(name, 0))
    return 0


def age_key(path: Path) -> tuple[int, int, str]:
    """Return by what versions are sorted, the oldest first: by their counter.

    A device without a clock's battery gives its files any time, so times order only
    files of earlier releases, which have no counter and come before all others.
    """
    try:
        counter = int(_metadata(path).get(COUNTER, 0))
    except (SafetensorError, OSError, ValueError):
        # Tried first, so that somebody learns of the damage.
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
    """Return what was written along, and the arrays, of a `PersonalState`'s file.

    Raises `ForeignStateError` if it is not of this client, these shapes, or the
    ``classes`` and ``algorithm`` of ``about`` (where both name any);
    `DamagedStateError`, `OSError`, `SafetensorError` or `ValueError` if it cannot be
    read.
    """
    with safe_open(path, framework="np") as file:
        found = file.metadata() or {}
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if found.pop("sha256", "") != _digest(arrays, found):
        raise DamagedStateError("its checksum is wrong")
    if found.get("client", "") != client:
        raise ForeignStateError(f"it is of client {found.get('client')!r}")
    # Other classes are why shapes differ, so they come first.
    for name, what in (("classes", "for the classes"), ("algorithm", "of")):
        said = found.get(name)
        now = (about or {}).get(name, said)
        # Earlier releases installed our packages without the name `flwr_frl`.
        if said is not None and now not in (said, f"flwr_frl.{said}"):
            message = f"it is {what} {said}, not {now}"
            raise ForeignStateError(message, _CLASSES if name == "classes" else "")
    for name in sorted(arrays.keys() | shapes) if shapes is not None else ():
        wanted = shapes.get(name) if shapes else None
        shape = arrays[name].shape if name in arrays else None
        if shape != wanted:
            raise ForeignStateError(
                f"it does not fit the model: its {name!r} has the shape {shape}, not "
                f"{wanted}"
            )
    return found, arrays


# Their names are nobody else's business.
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
