"""A client's personal state: what it keeps between rounds and never sends."""

import contextlib
import hashlib
import re
import time
from collections.abc import Iterable, Mapping
from logging import ERROR, WARNING
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, Context, RecordDict
from flwr.common import log
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from clients.device.arrays import from_array, to_record
from task.files import write_atomically
from task.messages import KEPT_CHECKPOINT, KEPT_ROUNDS
from task.training import TrainingDivergedError

Arrays = dict[str, npt.NDArray[np.generic]]
Shapes = Mapping[str, tuple[int, ...]]

PREFIX = "personal-"
FILE = re.compile(r"(?:(\w+)-)?(\d{8})\.safetensors")
# What `write_atomically` leaves behind when it is killed.
CUT_OFF = re.compile(rf"\.{FILE.pattern}\.\d+")
SET_ASIDE = ".set-aside"


# Runs whose files a run leaves alone, in its directory or beside it: the newest.
KEPT_RUNS = 8
# What the directory of a run's own is called, before the run's name.
OF_A_RUN = "run-"
# Seconds after which nobody is still writing a file.
CUT_OFF_AGE = 3600.0


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
        have directories of their own, ``run-RUN/CLIENT`` beside this one.
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
        told = self._written(self.rounds[-1], "checkpoint") if self.rounds else 0
        return {KEPT_ROUNDS: self.rounds, KEPT_CHECKPOINT: told}

    def _written(self, round_: int, name: str) -> int:
        """Return a round that was written along with a version on the disk."""
        path = self.path(round_)
        if path is not None and path.exists():
            with (
                contextlib.suppress(SafetensorError, OSError, ValueError),
                safe_open(path, framework="np") as file,
            ):
                return int((file.metadata() or {}).get(name, 0))
        return 0

    @classmethod
    def holding(cls, arrays: Mapping[str, npt.NDArray[np.generic]]) -> Self:
        """Return a state in memory that holds these arrays."""
        context = Context(0, 0, {}, RecordDict(), {})
        cls(context).save(arrays, 1)
        return cls(context)

    def _files(self, kind: re.Pattern[str] = FILE) -> list[tuple[Path, str, int]]:
        if self._directory is None or not self._directory.is_dir():
            return []
        found = [(p, kind.fullmatch(p.name)) for p in self._directory.iterdir()]
        return [(p, m[1] or "", int(m[2])) for p, m in found if m]

    def _rounds(self) -> list[int]:
        names = [name for name in self._records if name.startswith(PREFIX)]
        memory = {int(name.removeprefix(PREFIX)) for name in names}
        disk = {r for _, run, r in self._files() if run == self._run}
        return sorted(memory | disk)

    def _inherited(self) -> list[Path]:
        """Return what earlier runs have left, the newest first."""
        paths = [path for path, run, _ in self._files() if run != self._run]
        return sorted(paths, key=lambda p: (p.stat().st_mtime_ns, p.name), reverse=True)

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
            about["sha256"] = _digest(kept, about)
            try:
                write_atomically(path, save(kept, metadata=about))
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
        if between and self._written(between[-1], "checkpoint") <= self._checkpointed:
            _remove(self.path(r) for r in between)
            self.rounds = [r for r in self.rounds if r not in between]
        rounds = sorted({*self.rounds, round_})
        needed = {round_, *rounds[-2:], *self._usable[-2:], self._fallback}
        _remove(self.path(r) for r in rounds if r not in needed)
        now = time.time()
        for path, run, r in self._files(CUT_OFF):
            # Another process of this run may be writing a later one right now.
            if (run == self._run and r <= self.round) or (
                now - path.stat().st_mtime > CUT_OFF_AGE
            ):
                _remove([path])
        newest: dict[str, int] = {}
        for path in self._inherited():
            run = FILE.fullmatch(path.name)[1] or ""  # type: ignore[index]
            if newest.setdefault(run, len(newest)) >= KEPT_RUNS:
                _remove([path])
        if not self.rounds:
            # Once a run. What cannot be dropped now will be another time.
            with contextlib.suppress(OSError):
                self._forget_runs()

    def _forget_runs(self) -> None:
        """Drop the directories of this client's runs before the newest ones.

        What has anything else in it than its run's versions stays: an account of
        private training, say.
        """
        own = self._directory
        if own is None or own.parent.name != OF_A_RUN + self._run:
            return
        runs = [p for p in own.parent.parent.glob(f"{OF_A_RUN}*") if p != own.parent]
        places = [p / own.name for p in runs if (p / own.name).is_dir()]
        places.sort(key=lambda p: (p.stat().st_mtime_ns, p), reverse=True)
        for place in places[KEPT_RUNS:]:
            run, files = place.parent.name.removeprefix(OF_A_RUN), list(place.iterdir())
            found = [FILE.fullmatch(path.name) for path in files]
            if all(match and match[1] == run for match in found):
                _remove(files)
                place.rmdir()
                # Other clients of this machine may have theirs there.
                with contextlib.suppress(OSError):
                    place.parent.rmdir()


# Files of which the log has said why they are not used.
_said: set[tuple[Path, str]] = set()


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
        if said is not None and now != said:
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


def _remove(paths: Iterable[Path | None]) -> None:
    for path in paths:
        if path is not None:
            # A disk that cannot be written: the file will be dropped another time.
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
