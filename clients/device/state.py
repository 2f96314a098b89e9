"""A client's personal state, which persists between rounds and is never sent."""

import contextlib
import time
from collections.abc import Iterable, Mapping
from logging import ERROR, WARNING
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, Context, RecordDict
from flwr.common import log
from safetensors import SafetensorError

from flwr_frl.clients.device.arrays import from_array, to_record
from flwr_frl.clients.device.state_file import (
    COUNTER,
    Arrays,
    DamagedStateError,
    ForeignStateError,
    Shapes,
    age_key,
    number_in,
    pack,
    read_checked,
)
from flwr_frl.task.files import (
    ACCOUNT_FILE,
    PRIVATE,
    SET_ASIDE,
    STATE_FILE,
    unfinished,
    write_atomically,
)
from flwr_frl.task.messages import KEPT_CHECKPOINT, KEPT_ROUNDS
from flwr_frl.task.training import TrainingDivergedError

PREFIX = "personal-"
# Number of newest other runs whose files a run does not delete.
KEPT_RUNS = 8
# Prefix of the directory of a single run.
OF_A_RUN = "run-"
# Age in seconds after which an unfinished file is abandoned.
CUT_OFF_AGE = 3600.0


class PersonalState:
    """Versions of a client's personal arrays, one per round, in Flower's client state.

    The server reports the last round of this client that it has acknowledged. A version
    of a later round belongs to a reply that did not count, so it is not used. Flower
    keeps client state in memory; copies on disk outlive the process.

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
        Last round in which this client's reply counted; by default the newest version.
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
        self._about = dict(about or {})
        self._records = context.state
        self._directory = directory
        # Metadata must be valid text; a folder's name need not be.
        name = client.encode(errors="backslashreplace").decode()
        self._run, self._client = run, name
        self._checkpointed, self._acknowledged = checkpointed, acknowledged
        self.rounds = self._rounds()
        self._usable = [
            r for r in self.rounds if acknowledged is None or r <= acknowledged
        ]
        self.round = max(self._usable, default=0)
        # Why `load` did not use the latest version; empty if it did or there is none.
        self.unused = ""
        # A server that resumes from its checkpoint needs this version.
        self._fallback = max((r for r in self._usable if r <= checkpointed), default=0)

    def kept(self) -> dict[str, list[int] | int]:
        """Return properties for a server that has been rolled back.

        ``kept-rounds`` are the rounds of this run's versions, ``kept-checkpoint`` is
        the newest checkpoint that a server has reported.
        """
        newest = self._checkpoint_of(self.rounds[-1]) if self.rounds else 0
        return {KEPT_ROUNDS: self.rounds, KEPT_CHECKPOINT: newest}

    def _checkpoint_of(self, round_: int) -> int:
        """Return the server's newest checkpoint when a version was written."""
        path = self.path(round_)
        return 0 if path is None else number_in(path, "checkpoint")

    @classmethod
    def holding(cls, arrays: Mapping[str, npt.NDArray[np.generic]]) -> Self:
        """Return a state in memory with one version."""
        context = Context(0, 0, {}, RecordDict(), {})
        cls(context).save(arrays, 1)
        return cls(context)

    def _files(self) -> list[tuple[Path, str, int]]:
        if self._directory is None or not self._directory.is_dir():
            return []
        matches = [(p, STATE_FILE.fullmatch(p.name)) for p in self._directory.iterdir()]
        return [(p, m[1] or "", int(m[2])) for p, m in matches if m]

    def _rounds(self) -> list[int]:
        names = [name for name in self._records if name.startswith(PREFIX)]
        memory = {int(name.removeprefix(PREFIX)) for name in names}
        disk = {r for _, run, r in self._files() if run == self._run}
        return sorted(memory | disk)

    def _inherited(self) -> list[Path]:
        """Return the files of earlier runs, the newest first."""
        paths = [path for path, run, _ in self._files() if run != self._run]
        return sorted(paths, key=age_key, reverse=True)

    def _other_places(self) -> list[Path]:
        """Return this client's directories of other runs, if runs have directories."""
        here = self._directory
        if here is None or here.parent.name != OF_A_RUN + self._run:
            return []
        runs = [p for p in here.parent.parent.glob(f"{OF_A_RUN}*") if p != here.parent]
        places = [run / here.name for run in runs if not run.is_symlink()]
        return [p for p in places if p.is_dir() and not p.is_symlink()]

    def _next_counter(self) -> int:
        """Return the counter of the next version."""
        paths = [path for path, _, _ in self._files()]
        for place in self._other_places():
            paths += place.glob("*.safetensors")
        return 1 + max((number_in(path, COUNTER) for path in paths), default=0)

    def path(self, round_: int) -> Path | None:
        """Return the path of a version on disk; None without a directory."""
        if self._directory is None:
            return None
        prefix = f"{self._run}-" if self._run else ""
        return self._directory / f"{prefix}{round_:08d}.safetensors"

    def is_on_disk(self, round_: int) -> bool:
        """Return whether a version is on disk."""
        path = self.path(round_)
        return path is not None and path.exists()

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
        self.unused = ""
        arrays = self._newest(shapes)
        expected = self._acknowledged or 0
        # An earlier call may have set the damaged file aside.
        if self.round < expected and not self.unused:
            partly = f"the version of round {expected} is missing"
            # Third-party clients that never call `save()` also end here.
            lost = "no version is left: it is lost, or fit has not called self.save"
            self.unused = partly if self.round else lost
        return arrays

    def _newest(self, shapes: Shapes | None) -> Arrays | None:
        for round_ in reversed(self._usable):
            self.round = round_
            record = self._records.get(f"{PREFIX}{round_}")
            if isinstance(record, ArrayRecord):
                return {name: from_array(array) for name, array in record.items()}
            arrays = self._read(self.path(round_), shapes)
            if arrays is not None:
                return arrays
        self.round = 0
        for path in self._inherited():
            arrays = self._read(path, shapes)
            if arrays is not None:
                # This run has not started here, so none of its versions is missing.
                if not self._acknowledged:
                    self.unused = ""
                return arrays
        return None

    def _read(self, path: Path | None, shapes: Shapes | None) -> Arrays | None:
        if path is None or not path.exists():
            return None
        try:
            return read_checked(path, self._client, shapes, self._about)[1]
        except ForeignStateError as error:
            self.unused = self.unused or error.public
            if (path, str(error)) not in _logged:
                _logged.add((path, str(error)))
                log(WARNING, "%s is not used: %s", path, error)
        except (SafetensorError, DamagedStateError, ValueError) as error:
            log(ERROR, "%s is not used and set aside: %s", path, error)
            self.unused = self.unused or "its file is damaged"
            with contextlib.suppress(OSError):
                path.rename(path.with_name(path.name + SET_ASIDE))
        except OSError as error:
            log(ERROR, "%s cannot be read: %s", path, error)
            self.unused = self.unused or "its file cannot be read"
        return None

    def save(self, arrays: Mapping[str, npt.NDArray[np.generic]], round_: int) -> None:
        """Save arrays as the version of a round.

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
        # safetensors copies memory as it is, and convolutions are channels-last.
        kept = {name: np.asarray(value, order="C") for name, value in arrays.items()}
        if not all(np.isfinite(value).all() for value in kept.values()):
            raise TrainingDivergedError(
                f"the state of round {round_} is not finite; that of round "
                f"{self.round} stays"
            )
        path = self.path(round_)
        if path is not None:
            about = {
                **self._about,
                "client": self._client,
                "checkpoint": str(self._checkpointed),
            }
            try:
                about[COUNTER] = str(self._next_counter())
                write_atomically(path, pack(kept, about), mode=PRIVATE)
                self._tidy(round_)
            except OSError as error:
                log(
                    WARNING,
                    "state of round %d is kept in memory only, not in %s: %s",
                    round_,
                    path,
                    error,
                )
        self._records[f"{PREFIX}{round_}"] = to_record(kept)
        # Memory holds the acknowledged and the new version and, if there is no disk,
        # the newest.
        in_memory = {self.round, round_}
        if self._directory is None:
            in_memory.add(max(self.rounds, default=0))
        for name in [n for n in self._records if n.startswith(PREFIX)]:
            if int(name.removeprefix(PREFIX)) not in in_memory:
                del self._records[name]

    def _tidy(self, round_: int) -> None:
        """Delete files that no server can need, once a newer version is on disk."""
        acknowledged = self.round if self._acknowledged is None else self._acknowledged
        # Their replies never count unless the server has been rolled back.
        between = [r for r in self.rounds if acknowledged < r < round_]
        if between and self._checkpoint_of(between[-1]) <= self._checkpointed:
            _remove(self.path(r) for r in between)
            self.rounds = [r for r in self.rounds if r not in between]
        rounds = sorted({*self.rounds, round_})
        needed = {round_, *rounds[-2:], *self._usable[-2:], self._fallback}
        _remove(self.path(r) for r in rounds if r not in needed)
        self._remove_cut_off()
        others = [(path, run) for path, run, _ in self._files() if run != self._run]
        newest: dict[str, int] = {}
        for path, run in others:
            newest[run] = max(newest.get(run, 0), number_in(path, COUNTER))
        least = _least_kept(newest.values())
        _remove(path for path, run in others if newest[run] < least)
        if not self.rounds:
            # Once per run; a failure is retried by the next run.
            with contextlib.suppress(OSError):
                self._delete_old_runs()

    def _remove_cut_off(self) -> None:
        """Delete unfinished files of killed writers."""
        for path in self._directory.glob(".*") if self._directory else ():
            name = unfinished(path.name)
            match = STATE_FILE.fullmatch(name)
            if match is None and name != ACCOUNT_FILE:
                continue
            this_run = match is not None and (match[1] or "") == self._run
            # Another process of this run may still be writing a later version.
            over = this_run and match is not None and int(match[2]) <= self.round
            # Without a battery, the clock may have been ahead at that time.
            if over or abs(time.time() - path.lstat().st_mtime) > CUT_OFF_AGE:
                _remove([path])

    def _delete_old_runs(self) -> None:
        """Delete this client's directories of old runs.

        A directory with other files, such as an account of private training, remains.
        """
        places = {place: list(place.iterdir()) for place in self._other_places()}
        newest = {
            place: max((number_in(path, COUNTER) for path in files), default=0)
            for place, files in places.items()
        }
        least = _least_kept(newest.values())
        for place in (place for place, counter in newest.items() if counter < least):
            run, files = place.parent.name.removeprefix(OF_A_RUN), places[place]
            names = [unfinished(path.name) or path.name for path in files]
            matches = [STATE_FILE.fullmatch(name) for name in names]
            if all(match and match[1] == run for match in matches):
                _remove(files)
                place.rmdir()
                # Other clients of this machine may have directories there.
                with contextlib.suppress(OSError):
                    place.parent.rmdir()


# Foreign files that have been logged, and why.
_logged: set[tuple[Path, str]] = set()


def _least_kept(counters: Iterable[int]) -> int:
    """Return the counter of the oldest run to keep, given each run's newest counter.

    Files of earlier releases have no counter and cannot be ordered, so the result is 0,
    which keeps them, until enough runs have one.
    """
    newest = sorted(counters, reverse=True)[:KEPT_RUNS]
    return newest[-1] if len(newest) == KEPT_RUNS else 0


def _remove(paths: Iterable[Path | None]) -> None:
    for path in paths:
        if path is not None:
            # If the disk cannot be written, a later run deletes the file.
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
