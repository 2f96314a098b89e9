"""A client's personal state, which persists between rounds and is never sent."""

import contextlib
import hashlib
import math
import os
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from logging import ERROR, WARNING
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, Self, cast
from urllib.parse import quote

import numpy as np
from flwr.app import ArrayRecord, Context, RecordDict
from flwr.common import NDArray, log
from safetensors import SafetensorError

from flwr_frl.common import files
from flwr_frl.common.arrays import entries_of, fill, is_finite, memory_record, values_of
from flwr_frl.common.errors import TrainingDivergedError, require
from flwr_frl.common.files import write_atomically
from flwr_frl.common.sealed import Arrays, seal, unseal
from flwr_frl.common.settings import is_possible

PREFIX = "personal-"
# Number of other runs' versions, the newest ones, that a run does not delete.
KEPT = 24
# Age in seconds from which an unfinished file counts as abandoned.
CUT_OFF_AGE = 3600.0
# Path of versions in memory.
NOWHERE = Path(os.devnull)
Shapes = Mapping[str, tuple[int, ...]]

# Prefix of the directory of a single run.
OF_A_RUN = "run-"
# Length above which the name of a directory is truncated and gets a digest.
LONGEST_NAME = 200


class ForeignStateError(ValueError):
    """A file is not a state of this client."""


class Version(NamedTuple):
    """A version of a client's personal arrays, described by the name of its file.

    Parameters
    ----------
    counter : int
        Number of the version among all that the client has written. It orders the
        versions, since clocks and file times are unreliable.
    checkpoint : int
        Last round of the server's newest checkpoint when the version was written.
    run : str
        Name of the run.
    round : int
        The round.
    path : Path
        The file.
    """

    counter: int
    checkpoint: int
    run: str
    round: int
    path: Path


def versions_in(directory: Path | None) -> list[Version]:
    """Return the versions in a directory; none if it is missing."""
    paths = directory.glob("*.safetensors") if directory else ()
    matches = [(path, files.STATE_FILE.fullmatch(path.name)) for path in paths]
    return [Version(int(m[1]), int(m[2]), m[3], int(m[4]), p) for p, m in matches if m]


def usable(
    versions: Iterable[Version],
    run: str,
    acknowledged: int | None,
    checkpointed: int = 0,
) -> list[Version]:
    """Return the versions that a client may continue from, the preferred one first.

    These are the run's own versions up to the round that the server has acknowledged
    last, and then those of earlier runs; of each, the newest first. A version of a
    later round belongs to a reply that did not count, unless the server was restored
    from a backup: if no version is old enough for it, the newest one is used, so that
    nothing learned is lost.

    Parameters
    ----------
    versions : iterable of Version
        All versions of a client.
    run : str
        Name of the run.
    acknowledged : int, optional
        The round; by default all of the run's versions may be used.
    checkpointed : int, default 0
        Last round of the server's newest checkpoint.
    """
    last = math.inf if acknowledged is None else acknowledged
    versions = sorted(versions, reverse=True)
    of_run = [v for v in versions if v.run == run]
    of_run.sort(key=attrgetter("round"), reverse=True)
    counted = [v for v in of_run if v.round <= last]
    is_behind = acknowledged or any(v.checkpoint > checkpointed for v in of_run)
    if not counted and is_behind:
        counted = of_run
    return counted + [v for v in versions if v.run != run]


def needed(
    versions: Collection[Version], acknowledged: int, checkpoint: int
) -> set[Version]:
    """Return the versions of a run that a server may still ask for.

    These are the one that was written last, the two of the latest rounds, that of the
    last acknowledged round and its predecessor, in case its file is damaged, and the
    one from which a server resumes that restarts from its newest checkpoint.

    Parameters
    ----------
    versions : collection of Version
        All versions of a run.
    acknowledged : int
        The last acknowledged round of this client.
    checkpoint : int
        Last round of the server's newest checkpoint.
    """
    # A repeated round replaces its version.
    latest = {version.round: version for version in sorted(versions)}
    rounds, newest = sorted(latest), max(versions)
    counted = [round_ for round_ in rounds if round_ <= acknowledged]
    resumed = [round_ for round_ in counted if round_ <= checkpoint]
    chosen = {newest.round, *rounds[-2:], *counted[-2:], *resumed[-1:]}
    return {latest[round_] for round_ in chosen}


def state_directory(state_dir: str, client: str, run: str, experiment: str) -> Path:
    """Return the directory of a device's state.

    Parameters
    ----------
    state_dir : str
        ``state-dir`` of the node config.
    client : str
        Name of the client.
    run : str
        Name of the run.
    experiment : str
        Name of the experiment, whose runs share their states; may be empty.
    """
    allowed = "a folder that can be made"
    require(is_possible(state_dir), "state-dir", state_dir, allowed)
    root = Path(state_dir).expanduser()
    # A run's name comes from a message or from a file.
    directory = root / (quoted(experiment) or OF_A_RUN + quoted(run))
    directory /= quoted(client)
    files.refuse_links("state-dir", directory.parent, directory)
    return directory


def quoted(name: str) -> str:
    """Return a file name for any text; it contains no path separator and no dot."""
    text = quote(name, safe="", errors="surrogatepass").replace(".", "%2E")
    if len(text) <= LONGEST_NAME:
        return text
    # File systems limit names to 255 bytes.
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()
    return f"{text[:LONGEST_NAME]}-{digest[:16]}"


def read_checked(
    path: Path, about: Mapping[str, str], shapes: Shapes | None = None
) -> tuple[dict[str, str], Arrays]:
    """Return metadata and arrays of a file of a `PersonalState`.

    Raises
    ------
    ForeignStateError
        If the file has another ``client``, ``classes`` or ``algorithm`` than ``about``,
        or its arrays have other shapes.
    ChecksumError, OSError, SafetensorError, ValueError
        If it cannot be read.
    """
    metadata, arrays = unseal(path)
    # Other classes are the usual reason for other shapes.
    for name in ("client", "classes", "algorithm"):
        its, expected = metadata.get(name), about.get(name)
        if its != expected and its is not None and expected is not None:
            raise ForeignStateError(f"its {name}: {its}, not {expected}")
    read = {name: array.shape for name, array in arrays.items()}
    if shapes is not None and read != shapes:
        name = min(n for n, _ in read.items() ^ shapes.items())
        line = f"its shapes: {name!r} has {read.get(name)}, not {shapes.get(name)}"
        raise ForeignStateError(line)
    return metadata, arrays


def arrays_of(record: Any) -> Arrays:
    """Return the arrays of a version in memory, for reading only.

    A node that runs together with others keeps its arrays elsewhere in this process.
    """
    if hasattr(record, "arrays"):
        return cast(Arrays, record.arrays())
    return {name: values_of(array) for name, array in entries_of(record).items()}


def replace_versions(
    records: RecordDict, round_: int, record: ArrayRecord, kept: Iterable[int]
) -> None:
    """Store the version of a round, and delete those of rounds that are not kept."""
    fill(records, {f"{PREFIX}{round_}": record})
    needed = {f"{PREFIX}{each}" for each in kept}
    for name in [n for n in entries_of(records) if n.startswith(PREFIX)]:
        if name not in needed:
            del records[name]


_EMPTY = ArrayRecord().__dict__


class StoredArrays(ArrayRecord):
    """A version in the memory of this process, whose arrays were checked before.

    A copy for another process is a plain ArrayRecord.

    Parameters
    ----------
    stored : dict of str to ndarray
        The arrays, which must not be changed.
    """

    stored: Arrays

    def __init__(self, stored: Arrays) -> None:
        # Flower's constructor takes as long as everything else for a small state.
        self.__dict__.update(_EMPTY, _data={}, stored=stored)

    def arrays(self) -> Arrays:
        """Return the arrays."""
        return self.stored

    def __reduce__(self) -> tuple[Any, ...]:
        """Serialise as a plain record."""
        return memory_record, (self.arrays(),)


class PersonalState:
    """Versions of a client's personal arrays, one per round, in Flower's client state.

    The server reports the last round of this client that it has acknowledged; `usable`
    is the rule by which a version is chosen. Flower keeps client state in memory;
    copies on disk outlive the process.

    The server decides which version is used, but cannot make a client lose data on
    disk: versions are deleted only after a newer one has been written, and the newest
    remain (`needed`).

    Parameters
    ----------
    context : flwr.app.Context
        Its ``state`` holds the versions.
    directory : Path, optional
        Directory of the copies on disk.
    acknowledged : int, optional
        Last round in which this client's reply counted; by default that of the newest
        version.
    checkpointed : int, default 0
        Last round of the server's newest checkpoint.
    run : str, default ""
        Name of the run. Until one of its own versions has been acknowledged, a run
        starts from the newest version of earlier runs in the directory. Of their
        versions, which may also be in directories ``run-RUN/CLIENT`` beside this one,
        it keeps the 24 newest.
    client : str, default ""
        Name of the client. Files of other clients are not used.
    about : mapping of str to str, optional
        Metadata of each file. Files with other ``classes`` (the meaning of the outputs)
        or another ``algorithm`` are not used.
    """

    def __init__(
        self,
        context: Context,
        directory: Path | None = None,
        acknowledged: int | None = None,
        checkpointed: int = 0,
        run: str = "",
        client: str = "",
        about: Mapping[str, str] | None = None,
    ) -> None:
        self._about = {**(about or {}), "client": client}
        self._records = context.state
        self.directory = directory
        self._run = run
        self._checkpointed, self._acknowledged = checkpointed, acknowledged
        in_memory = [
            # Preferred to a file of the same round
            Version(sys.maxsize, 0, run, int(name[len(PREFIX) :]), NOWHERE)
            for name in self._records
            if name.startswith(PREFIX)
        ]
        versions = [*in_memory, *(versions_in(directory) if directory else ())]
        self._usable = usable(versions, run, acknowledged, checkpointed)
        of_run = self._usable and self._usable[0].run == run
        self.round = self._usable[0].round if of_run else 0
        # Reason why `load` did not use the latest version; empty if it did, or if there
        # is none.
        self.unused = ""

    @classmethod
    def holding(cls, arrays: Mapping[str, NDArray]) -> Self:
        """Return a state in memory with one version."""
        context = Context(0, 0, {}, RecordDict(), {})
        cls(context).save(arrays, 1)
        return cls(context)

    def load(self, shapes: Shapes | None = None) -> Arrays | None:
        """Return the arrays of the last acknowledged round; None if there are none.

        If a file cannot be used, an error is logged, and the previous version is
        returned. A damaged file is set aside; a foreign one, for example of another
        model, is left in place.
        ``unused`` then explains why the version that the server expects is not used.

        Parameters
        ----------
        shapes : mapping of str to tuple of int, optional
            Names and shapes that a file must have.
        """
        self.unused, self.round, arrays = "", 0, None
        for version in self._usable:
            if version.path == NOWHERE:
                arrays = arrays_of(self._records[f"{PREFIX}{version.round}"])
            else:
                arrays = self._read(version.path, shapes)
            if arrays is not None:
                if version.run == self._run:
                    self.round = version.round
                elif not self._acknowledged:
                    # This run has not started here, so none of its versions is missing.
                    self.unused = ""
                break
        expected = self._acknowledged or 0
        if self._acknowledged is not None and self.round > expected:
            self.unused = f"the server is behind its state of round {self.round}"
        # An earlier call may have set the damaged file aside.
        if self.round < expected and not self.unused:
            # Third-party clients that never save also end here.
            self.unused = f"the version of round {expected} is missing"
            self.unused += "; restore state-dir from a backup, or go on without it"
        return arrays

    def _read(self, path: Path, shapes: Shapes | None) -> Arrays | None:
        try:
            return read_checked(path, self._about, shapes)[1]
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, ValueError) as error:
            # The error names a device's classes, which the server must not learn.
            self.unused = self.unused or "its file cannot be used"
            log(ERROR, "%s is not used: %s", path, error)
            if not isinstance(error, OSError | ForeignStateError):
                with contextlib.suppress(OSError):
                    path.rename(path.with_name(path.name + files.SET_ASIDE))
        return None

    def save(
        self,
        arrays: Mapping[str, NDArray],
        round_: int,
        record: ArrayRecord | None = None,
    ) -> Path | None:
        """Save arrays as the version of a round; return its file.

        If the disk cannot be written, they are in memory only, and a warning is logged.

        Parameters
        ----------
        arrays : mapping of str to ndarray
            The personal arrays.
        round_ : int
            The round, from 1.
        record : ArrayRecord, optional
            The arrays as they are kept in memory. If it is given, they must be finite,
            and must not be changed.

        Raises
        ------
        TrainingDivergedError
            If a value is not finite.
        """
        if record is None:
            # safetensors writes memory as it is, but convolutions are channels-last.
            # The client also changes these arrays in place.
            arrays = {
                name: np.array(value, order="C") for name, value in arrays.items()
            }
            if not is_finite(*arrays.values()):
                raise TrainingDivergedError(
                    f"the state of round {round_} is not finite, or has too large "
                    f"values; that of round {self.round} stays"
                )
            record = memory_record(arrays)
        path = self._write(arrays, round_, self.directory) if self.directory else None
        # Memory holds the version that was used and the new one.
        replace_versions(self._records, round_, record, (self.round, round_))
        return path

    def _write(
        self, arrays: Mapping[str, NDArray], round_: int, directory: Path
    ) -> Path | None:
        """Write a version to disk, then delete those that no server can need."""
        try:
            places = self._places(directory)
            versions = [version for place in places for version in versions_in(place)]
            counter = 1 + max((version.counter for version in versions), default=0)
            numbers = f"{counter:08d}-{self._checkpointed:08d}-{self._run}-{round_:08d}"
            path = directory / f"{numbers}.safetensors"
            write_atomically(path, seal(arrays, self._about), mode=files.PRIVATE)
        except OSError as error:
            text = "state of round %d is kept in memory only, not in %s: %s"
            log(WARNING, text, round_, directory, error)
            return None
        new = Version(counter, self._checkpointed, self._run, round_, path)
        acknowledged = self.round if self._acknowledged is None else self._acknowledged
        mine = {v for v in (*versions, new) if v.run == self._run}
        others = sorted(version for version in versions if version.run != self._run)
        gone = mine - needed(mine, acknowledged, self._checkpointed)
        gone.update(others[:-KEPT])
        for version in gone:
            # If the disk cannot be written, a later run deletes the file.
            with contextlib.suppress(OSError):
                version.path.unlink(missing_ok=True)
        for place in {directory, *(version.path.parent for version in gone)}:
            _tidy(place)
        return path

    def _places(self, directory: Path) -> list[Path]:
        """Return the directory, and this client's of other runs, if there are any."""
        if directory.parent.name != OF_A_RUN + self._run:
            return [directory]
        runs = directory.parent.parent.glob(f"{OF_A_RUN}*")
        places = [run / directory.name for run in runs if not run.is_symlink()]
        return [place for place in places if not place.is_symlink()]


def _tidy(directory: Path) -> None:
    """Delete unfinished files of killed writers, and the directory if it is empty."""
    with contextlib.suppress(OSError):
        for path in directory.glob(".*"):
            # Another process may still be writing a newer file. On a device without a
            # clock battery, the time may have been ahead.
            age = abs(time.time() - path.lstat().st_mtime)
            if files.unfinished(path.name) and age > CUT_OFF_AGE:
                path.unlink(missing_ok=True)
        # Other clients of this machine may have directories in the parent.
        directory.rmdir()
        directory.parent.rmdir()
