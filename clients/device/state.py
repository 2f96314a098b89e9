"""A client's personal state: what it keeps between rounds and never sends."""

import contextlib
import hashlib
import re
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
from task.training import TrainingDivergedError

Arrays = dict[str, npt.NDArray[np.generic]]
Shapes = Mapping[str, tuple[int, ...]]

PREFIX = "personal-"
FILE = re.compile(r"(?:(\w+)-)?(\d{8})\.safetensors")
# What `write_atomically` leaves behind when it is killed.
CUT_OFF = re.compile(rf"\.{FILE.pattern}\.\d+")
SET_ASIDE = ".set-aside"


class ForeignStateError(ValueError):
    """A file that is no state of this client; the message says why."""


class PersonalState:
    """Versions of a client's personal arrays, one a round, over Flower's client state.

    The server says which round of this client it has acknowledged. A version from a
    later round belongs to a reply that never counted, so it is dropped. Flower keeps
    client state in memory only; a copy on disk outlives the process.

    Parameters
    ----------
    context : flwr.app.Context
        The versions live in its ``state``.
    directory : Path, optional
        Where a copy of each version is kept on disk: that of the last acknowledged
        round, the one before it, and the one that the server's newest checkpoint would
        go back to.
    acknowledged : int, optional
        Last round in which this client's reply counted; by default the newest version.
    checkpointed : int, default 0
        Last round of the server's newest checkpoint.
    run : str, default ""
        The run whose rounds these are. Until one of its own has counted, a run goes on
        from the newest version that an earlier run left in the directory.
    client : str, default ""
        Whose state it is. Files of other clients are not used.
    about : mapping of str to str, optional
        Written into each file. ``classes`` is what the outputs mean: a file of other
        classes is not used.
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
        self._run, self._client = run, client
        rounds = self._rounds()
        self._usable = [r for r in rounds if acknowledged is None or r <= acknowledged]
        self.round = max(self._usable, default=0)
        # A resumed run goes back to this one.
        fallback = max((r for r in self._usable if r <= checkpointed), default=0)
        # A server that only asks who is there has not said what it may go back to.
        if acknowledged is not None:
            on_disk = {*self._usable[-2:], fallback}
            for r in rounds:
                if r not in (self.round, fallback):
                    self._records.pop(f"{PREFIX}{r}", None)
                if r not in on_disk:
                    _remove([self._path(r)])
            cut_off = self._files(CUT_OFF)
            # Later rounds of this run may be being written right now.
            _remove(p for p, of, r in cut_off if of != run or r <= acknowledged)
            if self.round:
                _remove(self._inherited())

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

    def _path(self, round_: int) -> Path | None:
        if self._directory is None:
            return None
        prefix = f"{self._run}-" if self._run else ""
        return self._directory / f"{prefix}{round_:08d}.safetensors"

    def load(self, shapes: Shapes | None = None) -> Arrays | None:
        """Return the arrays of the last acknowledged round; None if there are none yet.

        A file that is damaged or foreign is set aside, with an error in the log, and
        the version before it is taken. ``shapes`` is what a file must hold; another
        model's state is foreign.
        """
        for round_ in reversed(self._usable):
            self.round = round_
            record = self._records.get(f"{PREFIX}{round_}")
            if isinstance(record, ArrayRecord):
                return {name: from_array(array) for name, array in record.items()}
            arrays = self._read(self._path(round_), shapes)
            if arrays is not None:
                return arrays
        self.round = 0
        inherited = (self._read(path, shapes) for path in self._inherited())
        return next((arrays for arrays in inherited if arrays is not None), None)

    def _read(self, path: Path | None, shapes: Shapes | None) -> Arrays | None:
        if path is None or not path.exists():
            return None
        try:
            return read_checked(path, self._client, shapes, self._about)[1]
        except (SafetensorError, ForeignStateError, ValueError) as error:
            log(ERROR, "%s is not used and set aside: %s", path, error)
            with contextlib.suppress(OSError):
                path.rename(path.with_name(path.name + SET_ASIDE))
        except OSError as error:
            log(ERROR, "%s cannot be read: %s", path, error)
        return None

    def save(self, arrays: Mapping[str, npt.NDArray[np.generic]], round_: int) -> None:
        """Keep arrays as the version of a round, from 1.

        Where the disk refuses them, they are kept in memory, and the log says so. What
        is not finite is no state: `TrainingDivergedError`.
        """
        # safetensors takes the memory as it lies, and convolutions are channels last.
        kept = {name: np.asarray(value, order="C") for name, value in arrays.items()}
        if not all(np.all(np.isfinite(value)) for value in kept.values()):
            raise TrainingDivergedError(
                f"the state of round {round_} is not finite; that of round "
                f"{self.round} stays"
            )
        path = self._path(round_)
        if path is not None:
            about = {**self._about, "client": self._client}
            about["sha256"] = _digest(kept, about)
            try:
                write_atomically(path, save(kept, metadata=about))
            except OSError as error:
                log(
                    WARNING,
                    "state of round %d is kept in memory only, not in %s: %s",
                    round_,
                    path,
                    error,
                )
        self._records[f"{PREFIX}{round_}"] = to_record(kept)
        # In memory the acknowledged version and the new one are enough.
        for name in [n for n in self._records if n.startswith(PREFIX)]:
            if int(name.removeprefix(PREFIX)) not in (self.round, round_):
                del self._records[name]


def read_checked(
    path: Path,
    client: str,
    shapes: Shapes | None = None,
    about: Mapping[str, str] | None = None,
) -> tuple[dict[str, str], Arrays]:
    """Return what was written along, and the arrays, of a `PersonalState`'s file.

    Raises `ForeignStateError` if it is damaged, or not of this client, these shapes, or
    the ``classes`` of ``about`` (where both name any); `OSError`, `SafetensorError` or
    `ValueError` if it cannot be read.
    """
    with safe_open(path, framework="np") as file:
        found = file.metadata() or {}
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if found.pop("sha256", "") != _digest(arrays, found):
        raise ForeignStateError("its checksum is wrong")
    if found.get("client", "") != client:
        raise ForeignStateError(f"it is of client {found.get('client')!r}")
    for name in sorted(arrays.keys() | shapes) if shapes is not None else ():
        wanted = shapes.get(name) if shapes else None
        shape = arrays[name].shape if name in arrays else None
        if shape != wanted:
            raise ForeignStateError(
                f"it does not fit the model: its {name!r} has the shape {shape}, not "
                f"{wanted}"
            )
    classes = found.get("classes")
    if classes is not None and (about or {}).get("classes", classes) != classes:
        raise ForeignStateError(f"it is for the classes {classes}")
    return found, arrays


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
