"""A client's personal state, which persists between rounds and is never sent."""

import contextlib
import os
import time
from collections.abc import Container, Iterable, Mapping
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, Context, RecordDict
from flwr.common import log
from safetensors import SafetensorError

from flwr_frl.clients.device.state_file import (
    COUNTER,
    OF_A_RUN,
    ForeignStateError,
    Shapes,
    Version,
    read_checked,
    usable,
    valid_text,
    versions_in,
)
from flwr_frl.common.files import (
    ACCOUNT_FILE,
    PRIVATE,
    SET_ASIDE,
    STATE_FILE,
    unfinished,
    write_atomically,
)
from flwr_frl.common.flower_messages import entries_of, fill
from flwr_frl.common.memory_array import memory_record, values_of
from flwr_frl.common.messages import EXAMPLES, KEPT_CHECKPOINT, KEPT_ROUNDS
from flwr_frl.common.npy import is_finite
from flwr_frl.common.sealed import Arrays, seal
from flwr_frl.task.training import TrainingDivergedError

Key = TypeVar("Key")

PREFIX = "personal-"
# Number of other runs, the newest ones, whose files a run does not delete.
KEPT_RUNS = 8
# Age in seconds from which an unfinished file counts as abandoned.
CUT_OFF_AGE = 3600.0
# Directory of a state that is in memory only; it can contain no files.
NOWHERE = Path(os.devnull)


class StoredArrays(ArrayRecord):
    """A version of a client's state whose arrays are elsewhere in this process."""

    def arrays(self) -> Arrays:
        """Return the arrays."""
        raise NotImplementedError


def replace_versions(
    records: RecordDict, round_: int, record: ArrayRecord, kept: Container[int]
) -> None:
    """Store the version of a round, and delete those of rounds that are not kept."""
    fill(records, {f"{PREFIX}{round_}": record})
    for name in list(entries_of(records)):
        if name.startswith(PREFIX) and int(name[len(PREFIX) :]) not in kept:
            del records[name]


class PersonalState:
    """Versions of a client's personal arrays, one per round, in Flower's client state.

    The server reports the last round of this client that it has acknowledged; `usable`
    is the rule by which a version is chosen. Flower keeps client state in memory;
    copies on disk outlive the process.

    The server decides which version is used, but cannot make a client lose data:
    versions are deleted only after a newer one has been written, and the newest remain.

    Parameters
    ----------
    context : flwr.app.Context
        Its ``state`` holds the versions.
    directory : Path, optional
        Directory of the copies on disk: the two newest versions, the version of the
        last acknowledged round, its predecessor, and the version that the server's
        newest checkpoint needs.
    acknowledged : int, optional
        Last round in which this client's reply counted; by default that of the newest
        version.
    checkpointed : int, default 0
        Last round of the server's newest checkpoint.
    run : str, default ""
        Name of the run. Until one of its own versions has been acknowledged, a run
        starts from the newest version of earlier runs in the directory. It deletes only
        files of runs older than the eight newest, which may be in separate directories,
        ``run-RUN/CLIENT`` beside this one. A counter in each file orders them, since
        clocks and file times are unreliable.
    client : str, default ""
        Name of the client. Files of other clients are not used.
    about : mapping of str to str, optional
        Metadata of each file. Files with other ``classes`` (the meaning of the outputs)
        or another ``algorithm`` are not used; with another ``examples-fingerprint``
        they are, and a line is logged.
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
        self._about = dict(about or {})
        self._records = context.state
        self._directory = directory or NOWHERE
        self._run, self._client = run, valid_text(client)
        self._checkpointed, self._acknowledged = checkpointed, acknowledged
        files = versions_in(directory)
        names = [name for name in self._records if name.startswith(PREFIX)]
        in_memory = {int(name[len(PREFIX) :]) for name in names}
        self._rounds = sorted(in_memory | {v.round for v in files if v.run == run})
        versions = [Version(self.path(r), run, r) for r in self._rounds]
        self._usable = list(usable(versions, run, acknowledged))
        self._earlier = [version for version in files if version.run != run]
        self.round = self._usable[0].round if self._usable else 0
        # Reason why `load` did not use the latest version; empty if it did, or if there
        # is none.
        self.unused = ""

    def kept(self) -> dict[str, list[int] | int]:
        """Return properties for a server that has been rolled back.

        ``kept-rounds`` are the rounds of this run's versions, ``kept-checkpoint`` is
        the newest checkpoint that a server has reported.
        """
        newest = self._checkpoint_of(self._rounds[-1]) if self._rounds else 0
        return {KEPT_ROUNDS: self._rounds, KEPT_CHECKPOINT: newest}

    def _checkpoint_of(self, round_: int) -> int:
        """Return the server's newest checkpoint when a version was written."""
        return Version(self.path(round_), self._run, round_).number("checkpoint")

    @classmethod
    def holding(cls, arrays: Mapping[str, npt.NDArray[np.generic]]) -> Self:
        """Return a state in memory with one version."""
        context = Context(0, 0, {}, RecordDict(), {})
        cls(context).save(arrays, 1)
        return cls(context)

    def path(self, round_: int) -> Path:
        """Return the path of a version on disk."""
        prefix = f"{self._run}-" if self._run else ""
        return self._directory / f"{prefix}{round_:08d}.safetensors"

    def load(self, shapes: Shapes | None = None) -> Arrays | None:
        """Return the arrays of the last acknowledged round; None if there are none.

        A damaged file is set aside, an error is logged, and the previous version is
        returned. A foreign file, for example of another model, is left in place.
        ``unused`` then explains why the version that the server expects is not used.

        Parameters
        ----------
        shapes : mapping of str to tuple of int, optional
            Names and shapes that a file must have.
        """
        self.unused, arrays = "", None
        for version in usable([*self._usable, *self._earlier], self._run, None):
            of_run = version.run == self._run
            self.round = version.round if of_run else 0
            record = self._records.get(f"{PREFIX}{version.round}") if of_run else None
            if isinstance(record, StoredArrays):
                arrays = record.arrays()
            elif isinstance(record, ArrayRecord):
                arrays = {name: values_of(array) for name, array in record.items()}
            else:
                arrays = self._read(version.path, shapes)
            if arrays is not None:
                if not of_run and not self._acknowledged:
                    # This run has not started here, so none of its versions is missing.
                    self.unused = ""
                break
        else:
            self.round = 0
        expected = self._acknowledged or 0
        # An earlier call may have set the damaged file aside.
        if self.round < expected and not self.unused:
            partly = f"the version of round {expected} is missing"
            # Third-party clients that never call `save()` also end here.
            lost = "no version is left: it is lost"
            self.unused = partly if self.round else lost
        return arrays

    def _read(self, path: Path, shapes: Shapes | None) -> Arrays | None:
        if not path.exists():
            return None
        try:
            about, arrays = read_checked(path, self._client, shapes, self._about)
            now = self._about.get(EXAMPLES)
            if now and about.get(EXAMPLES, now) != now:
                text = "the examples of client %s are other ones than in %s"
                log(INFO, text, self._client, path)
            return arrays
        except ForeignStateError as error:
            self.unused = self.unused or error.public
            if (path, str(error)) not in _logged:
                _logged.add((path, str(error)))
                log(WARNING, "%s is not used: %s", path, error)
        except (SafetensorError, ValueError) as error:
            log(ERROR, "%s is not used and set aside: %s", path, error)
            self.unused = self.unused or "its file is damaged"
            with contextlib.suppress(OSError):
                path.rename(path.with_name(path.name + SET_ASIDE))
        except OSError as error:
            log(ERROR, "%s cannot be read: %s", path, error)
            self.unused = self.unused or "its file cannot be read"
        return None

    def save(self, arrays: Mapping[str, npt.NDArray[np.generic]], round_: int) -> bool:
        """Save arrays as the version of a round; return whether it is on disk.

        If the disk cannot be written, they are in memory only, and a warning is logged.

        Parameters
        ----------
        arrays : mapping of str to ndarray
            The personal arrays.
        round_ : int
            The round, from 1.

        Raises
        ------
        TrainingDivergedError
            If a value is not finite.
        """
        # safetensors writes memory as it is, but convolutions are channels-last. The
        # client also changes these arrays in place, and the state must not change.
        kept = {name: np.array(value, order="C") for name, value in arrays.items()}
        if not all(map(is_finite, kept.values())):
            raise TrainingDivergedError(
                f"the state of round {round_} is not finite; that of round "
                f"{self.round} stays"
            )
        written = self._directory != NOWHERE and self._write(kept, round_)
        # Memory holds the acknowledged and the new version and, if there is no disk,
        # the newest.
        in_memory = {self.round, round_}
        if self._directory == NOWHERE:
            in_memory.add(max(self._rounds, default=0))
        replace_versions(self._records, round_, memory_record(kept), in_memory)
        return written

    def _write(self, arrays: Arrays, round_: int) -> bool:
        """Write a version to disk, then delete those that no server can need.

        Return whether it was written.
        """
        about = {
            **self._about,
            "client": self._client,
            "checkpoint": str(self._checkpointed),
        }
        try:
            others = {place: versions_in(place) for place in self._other_places()}
            here = versions_in(self._directory)
            about[COUNTER] = str(1 + max(map(_newest, (here, *others.values()))))
            write_atomically(self.path(round_), seal(arrays, about), mode=PRIVATE)
        except OSError as error:
            text = "state of round %d is kept in memory only, not in %s: %s"
            log(WARNING, text, round_, self.path(round_), error)
            return False
        # If this fails, the next round tries again.
        with contextlib.suppress(OSError):
            self._delete_superseded(round_)
            self._delete_unfinished()
            self._delete_old_runs(here, others)
        return True

    def _delete_superseded(self, round_: int) -> None:
        """Delete files of this run that no server can need."""
        acknowledged = self.round if self._acknowledged is None else self._acknowledged
        # Their replies never count unless the server has been rolled back.
        between = [r for r in self._rounds if acknowledged < r < round_]
        if between and self._checkpoint_of(between[-1]) <= self._checkpointed:
            _remove(self.path(r) for r in between)
            self._rounds = [r for r in self._rounds if r not in between]
        rounds = sorted({*self._rounds, round_})
        acknowledged_rounds = [version.round for version in self._usable]
        needed = {round_, *rounds[-2:], *acknowledged_rounds[:2]}
        # A server that resumes from its checkpoint needs this version.
        before = (r for r in acknowledged_rounds if r <= self._checkpointed)
        needed.add(max(before, default=0))
        _remove(self.path(r) for r in rounds if r not in needed)

    def _delete_unfinished(self) -> None:
        """Delete unfinished files of killed writers."""
        for path in self._directory.glob(".*"):
            name = unfinished(path.name)
            match = STATE_FILE.fullmatch(name)
            if match is None and name != ACCOUNT_FILE:
                continue
            this_run = match is not None and (match[1] or "") == self._run
            # Another process of this run may still be writing a later version.
            over = this_run and match is not None and int(match[2]) <= self.round
            # On a device without a clock battery, the time may have been ahead.
            if over or abs(time.time() - path.lstat().st_mtime) > CUT_OFF_AGE:
                _remove([path])

    def _other_places(self) -> list[Path]:
        """Return this client's directories of other runs, if runs have directories."""
        here = self._directory
        if here.parent.name != OF_A_RUN + self._run:
            return []
        runs = [p for p in here.parent.parent.glob(f"{OF_A_RUN}*") if p != here.parent]
        places = [run / here.name for run in runs if not run.is_symlink()]
        return [p for p in places if p.is_dir() and not p.is_symlink()]

    def _delete_old_runs(
        self, here: list[Version], others: Mapping[Path, list[Version]]
    ) -> None:
        """Delete the files of all other runs but the `KEPT_RUNS` newest.

        They are in this directory, or in ``others``, this client's directories of other
        runs. Of these, one with other files, such as an account of private training,
        remains.
        """
        by_run: dict[str, list[Version]] = {}
        for version in here:
            if version.run != self._run:
                by_run.setdefault(version.run, []).append(version)
        for run in _old(by_run):
            _remove(version.path for version in by_run[run])
        for place in _old(others):
            run, files = place.parent.name.removeprefix(OF_A_RUN), list(place.iterdir())
            names = [unfinished(path.name) or path.name for path in files]
            matches = [STATE_FILE.fullmatch(name) for name in names]
            if all(match and match[1] == run for match in matches):
                _remove(files)
                # Other clients of this machine may have directories there.
                with contextlib.suppress(OSError):
                    place.rmdir()
                    place.parent.rmdir()


# Foreign files that have been logged, with the reasons.
_logged: set[tuple[Path, str]] = set()


def _newest(versions: Iterable[Version]) -> int:
    """Return the largest counter of some versions; 0 without any."""
    return max((version.counter for version in versions), default=0)


def _old(runs: Mapping[Key, list[Version]]) -> list[Key]:
    """Return the keys of all runs but the `KEPT_RUNS` that have written last."""
    newest = {key: _newest(versions) for key, versions in runs.items()}
    return sorted(newest, key=newest.__getitem__)[:-KEPT_RUNS]


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        # If the disk cannot be written, a later run deletes the file.
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
