"""A client's personal state: what it keeps between rounds and never sends."""

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
# Runs whose files a run leaves alone, in its directory or beside it: the newest.
KEPT_RUNS = 8
# What the directory of a run's own is called, before the run's name.
OF_A_RUN = "run-"
# Seconds after which nobody is still writing a file.
CUT_OFF_AGE = 3600.0


class PersonalState:
    """Versions of a client's personal arrays, one a round, over Flower's client state.

    The server says which round of this client it has acknowledged. A version from a
    later round belongs to a reply that never counted, so it is not used. Flower keeps
    client state in memory only; a copy on disk outlives the process.

    What the server says decides what is used, never what is lost: versions go only
    when a newer one has been written, and the newest stay.

    Parameters
    ----------
    context : flwr.app.Context
        The versions live in its ``state``.
    directory : Path, optional
        Where a copy of each version is kept on disk: the two newest, that of the last
        acknowledged round, the one before it, and the one that the server's newest
        checkpoint would go back to.
    acknowledged : int, optional
        Last round in which this client's reply counted; by default the newest version.
    checkpointed : int, default 0
        Last round of the server's newest checkpoint.
    run : str, default ""
        The run whose rounds these are. Until one of its own has counted, a run goes on
        from the newest version that an earlier run left in the directory. It touches
        no other run's files, but for those of runs before the eight newest; they may
        have directories of their own, ``run-RUN/CLIENT`` beside this one. A counter in
        each file says which is newer; clocks and times of files do not.
    client : str, default ""
        Whose state it is. Files of other clients are not used.
    about : mapping of str to str, optional
        Written into each file. ``classes`` is what the outputs mean, ``algorithm`` who
        keeps it: files in which they differ are not used.
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
        # A folder's name need not be text, as what is written into a file must.
        name = client.encode(errors="backslashreplace").decode()
        self._run, self._client = run, name
        self._checkpointed, self._acknowledged = checkpointed, acknowledged
        self.rounds = self._rounds()
        self._usable = [
            r for r in self.rounds if acknowledged is None or r <= acknowledged
        ]
        self.round = max(self._usable, default=0)
        # Why `load` did not find what this client kept last, where there was something.
        self.unused = ""
        # A resumed run goes back to this one.
        self._fallback = max((r for r in self._usable if r <= checkpointed), default=0)

    def kept(self) -> dict[str, list[int] | int]:
        """Return what a server that has been set back needs to know.

        ``kept-rounds`` are this run's versions, ``kept-checkpoint`` the newest
        checkpoint of which a server has told.
        """
        told = self._checkpoint_of(self.rounds[-1]) if self.rounds else 0
        return {KEPT_ROUNDS: self.rounds, KEPT_CHECKPOINT: told}

    def _checkpoint_of(self, round_: int) -> int:
        """Return the server's checkpoint that was written along with a version."""
        path = self.path(round_)
        return 0 if path is None else number_in(path, "checkpoint")

    @classmethod
    def holding(cls, arrays: Mapping[str, npt.NDArray[np.generic]]) -> Self:
        """Return a state in memory that holds these arrays."""
        context = Context(0, 0, {}, RecordDict(), {})
        cls(context).save(arrays, 1)
        return cls(context)

    def _files(self) -> list[tuple[Path, str, int]]:
        if self._directory is None or not self._directory.is_dir():
            return []
        found = [(p, STATE_FILE.fullmatch(p.name)) for p in self._directory.iterdir()]
        return [(p, m[1] or "", int(m[2])) for p, m in found if m]

    def _rounds(self) -> list[int]:
        names = [name for name in self._records if name.startswith(PREFIX)]
        memory = {int(name.removeprefix(PREFIX)) for name in names}
        disk = {r for _, run, r in self._files() if run == self._run}
        return sorted(memory | disk)

    def _inherited(self) -> list[Path]:
        """Return what earlier runs have left, the newest first."""
        paths = [path for path, run, _ in self._files() if run != self._run]
        return sorted(paths, key=age_key, reverse=True)

    def _other_places(self) -> list[Path]:
        """Return this client's directories of other runs, where each has its own."""
        own = self._directory
        if own is None or own.parent.name != OF_A_RUN + self._run:
            return []
        runs = [p for p in own.parent.parent.glob(f"{OF_A_RUN}*") if p != own.parent]
        places = [run / own.name for run in runs if not run.is_symlink()]
        return [p for p in places if p.is_dir() and not p.is_symlink()]

    def _next_counter(self) -> int:
        """Return the counter of the version that is written next."""
        paths = [path for path, _, _ in self._files()]
        for place in self._other_places():
            paths += place.glob("*.safetensors")
        return 1 + max((number_in(path, COUNTER) for path in paths), default=0)

    def path(self, round_: int) -> Path | None:
        """Return where the copy of a version is, if any is kept on the disk."""
        if self._directory is None:
            return None
        prefix = f"{self._run}-" if self._run else ""
        return self._directory / f"{prefix}{round_:08d}.safetensors"

    def is_on_disk(self, round_: int) -> bool:
        """Return whether there is a copy of a version on the disk."""
        path = self.path(round_)
        return path is not None and path.exists()

    def load(self, shapes: Shapes | None = None) -> Arrays | None:
        """Return the arrays of the last acknowledged round; None if there are none yet.

        A file that is damaged is set aside, with an error in the log, and the version
        before it is taken; one that is foreign stays as it is. ``shapes`` is what a
        file must hold; another model's state is foreign. Whatever is taken instead,
        ``unused`` says why it is not what the server relies on.
        """
        self.unused = ""
        arrays = self._newest(shapes)
        known = self._acknowledged or 0
        # Also where the damage was found before, and the file is no longer there.
        if self.round < known and not self.unused:
            left = f"that of round {known} is gone"
            # As a client of somebody's own says that forgets it, too.
            lost = "nothing of it is left: it is lost, or fit has not called self.keep"
            self.unused = left if self.round else lost
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
                # This run has not begun here: nothing of its own is lost.
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
            self.unused = self.unused or error.told
            if (path, str(error)) not in _said:
                _said.add((path, str(error)))
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
        """Keep arrays as the version of a round, from 1.

        Where the disk refuses them, they are kept in memory, and the log says so. What
        is not finite is no state: `TrainingDivergedError`.
        """
        # safetensors takes the memory as it lies, and convolutions are channels last.
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
        # In memory the acknowledged version and the new one are enough, and the newest
        # where it is nowhere else.
        in_memory = {self.round, round_}
        if self._directory is None:
            in_memory.add(max(self.rounds, default=0))
        for name in [n for n in self._records if n.startswith(PREFIX)]:
            if int(name.removeprefix(PREFIX)) not in in_memory:
                del self._records[name]

    def _tidy(self, round_: int) -> None:
        """Drop what nobody can go back to, now that a new version is on the disk."""
        known = self.round if self._acknowledged is None else self._acknowledged
        # Those never counted, and never will, unless the server has been set back.
        between = [r for r in self.rounds if known < r < round_]
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
            # Once a run. What cannot be dropped now will be another time.
            with contextlib.suppress(OSError):
                self._forget_runs()

    def _remove_cut_off(self) -> None:
        """Drop what killed writers have left."""
        for path in self._directory.glob(".*") if self._directory else ():
            name = unfinished(path.name)
            match = STATE_FILE.fullmatch(name)
            if match is None and name != ACCOUNT_FILE:
                continue
            own = match is not None and (match[1] or "") == self._run
            # Another process of this run may be writing a later one right now.
            over = own and match is not None and int(match[2]) <= self.round
            # A clock without a battery may have been ahead when it was written.
            if over or abs(time.time() - path.lstat().st_mtime) > CUT_OFF_AGE:
                _remove([path])

    def _forget_runs(self) -> None:
        """Drop the directories of this client's runs before the newest ones.

        What has anything else in it than its run's versions stays: an account of
        private training, say.
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
            found = [STATE_FILE.fullmatch(name) for name in names]
            if all(match and match[1] == run for match in found):
                _remove(files)
                place.rmdir()
                # Other clients of this machine may have theirs there.
                with contextlib.suppress(OSError):
                    place.parent.rmdir()


# Files of which the log has said why they are not used.
_said: set[tuple[Path, str]] = set()


def _least_kept(counters: Iterable[int]) -> int:
    """Return the counter of the oldest run that stays, of each run's newest; or 0.

    Files of earlier releases have no counter. As nobody can tell which is the newest,
    they stay until there are enough runs that have one.
    """
    newest = sorted(counters, reverse=True)[:KEPT_RUNS]
    return newest[-1] if len(newest) == KEPT_RUNS else 0


def _remove(paths: Iterable[Path | None]) -> None:
    for path in paths:
        if path is not None:
            # A disk that cannot be written: the file will be dropped another time.
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
