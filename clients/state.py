"""A client's personal state: what it keeps between rounds and never sends."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, Context
from safetensors.numpy import load_file, save

from task.files import write_atomically

Arrays = dict[str, npt.NDArray[np.generic]]

PREFIX = "personal-"


class PersonalState:
    """Versions of a client's personal arrays, one a round, over Flower's client state.

    The server says which round of this client it has acknowledged. A version from a
    later round belongs to a reply that never counted, so it is dropped; one from an
    earlier round is no longer needed, unless a checkpoint may go back to it.

    Parameters
    ----------
    context : flwr.app.Context
        The versions live in its ``state``.
    directory : Path, optional
        Where a copy of each version is kept on disk.
    acknowledged : int, optional
        Last round in which this client's reply counted; by default the newest version.
    checkpointed : int, default 0
        Last round of the server's newest checkpoint.
    """

    def __init__(
        self,
        context: Context,
        directory: Path | None = None,
        acknowledged: int | None = None,
        checkpointed: int = 0,
    ) -> None:
        self._records = context.state
        self._directory = directory
        rounds = self._rounds()
        usable = [r for r in rounds if acknowledged is None or r <= acknowledged]
        self.round = max(usable, default=0)
        # A resumed run goes back to this one.
        fallback = max((r for r in usable if r <= checkpointed), default=0)
        # A server that only asks who is there has not said what it may go back to.
        if acknowledged is not None:
            for r in rounds:
                if r not in (self.round, fallback):
                    self._drop(r)

    def _rounds(self) -> list[int]:
        memory = {
            int(name.removeprefix(PREFIX))
            for name in self._records
            if name.startswith(PREFIX)
        }
        disk: set[int] = set()
        if self._directory is not None and self._directory.is_dir():
            disk = {int(p.stem) for p in self._directory.glob("[0-9]*.safetensors")}
        return sorted(memory | disk)

    def _path(self, round_: int) -> Path | None:
        if self._directory is None:
            return None
        return self._directory / f"{round_:08d}.safetensors"

    def _drop(self, round_: int) -> None:
        self._records.pop(f"{PREFIX}{round_}", None)
        path = self._path(round_)
        if path is not None:
            path.unlink(missing_ok=True)

    def load(self) -> Arrays | None:
        """Return the arrays of the last acknowledged round.

        Returns
        -------
        dict of str to ndarray, or None
            By name; None if this client has kept nothing yet.
        """
        if self.round == 0:
            return None
        record = self._records.get(f"{PREFIX}{self.round}")
        if isinstance(record, ArrayRecord):
            return {name: array.numpy() for name, array in record.items()}
        path = self._path(self.round)
        assert path is not None
        return dict(load_file(path))

    def save(self, arrays: Mapping[str, npt.NDArray[np.generic]], round_: int) -> None:
        """Keep arrays as the version of a round.

        Parameters
        ----------
        arrays : mapping of str to ndarray
            What is kept, by name.
        round_ : int
            The round, from 1.
        """
        # safetensors takes the memory as it lies, and convolutions are channels last.
        kept = {name: np.asarray(value, order="C") for name, value in arrays.items()}
        path = self._path(round_)
        if path is not None:
            write_atomically(path, save(kept))
        self._records[f"{PREFIX}{round_}"] = ArrayRecord(
            {name: Array(value) for name, value in kept.items()}
        )
        # In memory the acknowledged version and the new one are enough.
        for name in [n for n in self._records if n.startswith(PREFIX)]:
            if int(name.removeprefix(PREFIX)) not in (self.round, round_):
                del self._records[name]
