"""Files of a client's personal state: their directory, format and order."""

import contextlib
import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from safetensors import SafetensorError, safe_open

from flwr_frl.common.files import STATE_FILE, refuse_links
from flwr_frl.common.sealed import Arrays, unseal
from flwr_frl.common.settings import Settings, is_possible, require

Shapes = Mapping[str, tuple[int, ...]]

# Metadata key of a version's number among all that a client has written.
COUNTER = "counter"
# Prefix of the directory of a single run.
OF_A_RUN = "run-"
# Length above which the name of a directory is truncated and gets a digest.
LONGEST_NAME = 200


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


class Version(NamedTuple):
    """A version of a client's personal arrays: the file, the run and the round."""

    path: Path
    run: str
    round: int

    @property
    def counter(self) -> int:
        """The number of the version among all that the client has written."""
        return self.number(COUNTER)

    def number(self, name: str, otherwise: int = 0) -> int:
        """Return a number from the file's metadata, or a default if it is missing."""
        with contextlib.suppress(SafetensorError, OSError, ValueError, KeyError):
            return int(_metadata(self.path)[name])
        return otherwise


def versions_in(directory: Path | None) -> list[Version]:
    """Return the versions in a directory; none if it is missing."""
    try:
        paths = list(directory.iterdir()) if directory else []
    # Another process may have deleted the directory of an old run.
    except (FileNotFoundError, NotADirectoryError):
        return []
    matches = [(path, STATE_FILE.fullmatch(path.name)) for path in paths]
    return [Version(p, m[1] or "", int(m[2])) for p, m in matches if m]


def usable(
    versions: Iterable[Version], run: str, acknowledged: int | None
) -> Iterator[Version]:
    """Yield the versions that a client may continue from, the preferred one first.

    These are the run's own versions up to the round that the server has acknowledged
    last, and then those of earlier runs; of each, the newest first. A version of a
    later round belongs to a reply that did not count.

    Parameters
    ----------
    versions : iterable of Version
        All versions of a client.
    run : str
        Name of the run.
    acknowledged : int, optional
        The round; by default all of the run's versions may be used.
    """
    of_run, others = list[Version](), list[Version]()
    for version in versions:
        (of_run if version.run == run else others).append(version)
    for version in sorted(of_run, key=lambda v: v.round, reverse=True):
        if acknowledged is None or version.round <= acknowledged:
            yield version
    # A damaged file counts as the newest, so that it is read and the damage is logged.
    yield from sorted(
        others,
        key=lambda v: (v.number(COUNTER, sys.maxsize), v.path.name),
        reverse=True,
    )


def state_directory(
    node: Settings, client: str, run: str, experiment: str, states: Path | None = None
) -> Path | None:
    """Return the directory of a client's state; None if it is in memory only.

    Parameters
    ----------
    node : mapping
        The node config; a device's may have ``state-dir``.
    client : str
        Name of the client.
    run : str
        Name of the run.
    experiment : str
        Name of the experiment, whose runs share their states; may be empty.
    states : Path, optional
        Directory of the simulated clients' states.
    """
    if "state-dir" in node:
        state_dir = str(node["state-dir"])
        allowed = "a folder that can be made"
        require(is_possible(state_dir), "state-dir", state_dir, allowed)
        root = Path(state_dir).expanduser()
        # A run's name comes from a message or from a file.
        directory = root / (quoted(experiment) or OF_A_RUN + quoted(run))
        directory /= quoted(client)
        refuse_links("state-dir", directory.parent, directory)
        return directory
    return states / quoted(client) if states and "partition-id" in node else None


def quoted(name: str) -> str:
    """Return a file name for any text; it contains no path separator and no dot."""
    text = quote(name, safe="", errors="surrogatepass").replace(".", "%2E")
    if len(text) <= LONGEST_NAME:
        return text
    # File systems limit names to 255 bytes.
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()
    return f"{text[:LONGEST_NAME]}-{digest[:16]}"


def valid_text(name: str) -> str:
    """Return a name as in metadata, which must be valid; a folder's need not be."""
    return name.encode(errors="backslashreplace").decode()


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
    ChecksumError, OSError, SafetensorError, ValueError
        If it cannot be read.
    """
    metadata, arrays = unseal(path)
    if metadata.get("client", "") != valid_text(client):
        raise ForeignStateError(f"it is of client {metadata.get('client')!r}")
    # Classes first: other classes are the usual reason for other shapes.
    for name, what in (("classes", "for the classes"), ("algorithm", "of")):
        written = metadata.get(name)
        now = (about or {}).get(name, written)
        if written is not None and now != written:
            message = f"it is {what} {written}, not {now}"
            raise ForeignStateError(message, _CLASSES if name == "classes" else "")
    for name in sorted(arrays.keys() | shapes.keys()) if shapes is not None else ():
        wanted = shapes.get(name) if shapes else None
        shape = arrays[name].shape if name in arrays else None
        if shape != wanted:
            raise ForeignStateError(
                f"it does not fit the model: its {name!r} has the shape {shape}, not "
                f"{wanted}"
            )
    return metadata, arrays


# Message for the server, which must not learn the names of a device's classes.
_CLASSES = "it is for other classes than the client has now"
