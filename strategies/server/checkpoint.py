"""Checkpoints of a run: everything the server needs to go on after a round."""

from dataclasses import dataclass
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord
from flwr.common import log
from safetensors import SafetensorError

from flwr_frl.strategies.server.replies import Arrays, to_record
from flwr_frl.task.checkpoint import FILE, Content, pack, read, read_about
from flwr_frl.task.files import PRIVATE, write_atomically
from flwr_frl.task.settings import Settings, SettingsError

# What may differ between a run and its continuation.
MAY_DIFFER = frozenset(
    (
        "cache-dir",
        "checkpoint-every",
        "cohort",
        "data-dir",
        "device",
        "evaluate-every",
        "evaluate-last",
        "max-empty-rounds",
        "metrics",
        "min-available-nodes",
        "names-by-key",
        "num-server-rounds",
        "output",
        "page",
        "resume",
        "round-timeout",
        "torch-threads",
        "tracker",
        "tracker-uri",
    )
)
# Defaults of an earlier version and of this one: a run that named neither goes on.
FORMER_DEFAULTS = {"compressor-k": (0.01, 0.1)}


def token_in(path: Path) -> str:
    """Return the name of the run that wrote a checkpoint; ``unknown`` if damaged."""
    try:
        token = read_about(path)["values"]["run"]
    except (SafetensorError, OSError, LookupError, ValueError, TypeError):
        token = ""
    return token if isinstance(token, str) and token.isalnum() else "unknown"


@dataclass(frozen=True)
class Checkpoint:
    """A run's state after a round.

    Parameters
    ----------
    server_round : int
        The round.
    arrays : ArrayRecord
        The shared arrays.
    state : tuple
        The strategy's ``state_dict()``.
    seconds : float
        Time that the run has taken so far.
    settings : mapping
        All settings of the run.
    """

    server_round: int
    arrays: ArrayRecord
    state: tuple[Arrays, dict[str, Any]]
    seconds: float
    settings: Settings

    def write(self, directory: Path) -> None:
        """Replace the checkpoint in a run's output directory, atomically.

        After an `OSError` the former checkpoint is still there.
        """
        own, values = self.state
        about = {
            "round": self.server_round,
            "seconds": self.seconds,
            "settings": dict(self.settings),
            "values": values,
            # The order of names is lost in the file's sorted header.
            "names": list(self.arrays),
            "state-names": list(own),
        }
        shared = {name: array.numpy() for name, array in self.arrays.items()}
        data = pack(Content(about, shared, own))
        write_atomically(directory / FILE, data, mode=PRIVATE)

    @classmethod
    def read(cls, directory: Path, settings: Settings) -> "Checkpoint":
        """Read the checkpoint of a run that is to go on with the same settings.

        Raises `SettingsError` if there is none in the run's output directory, it is
        damaged, or it was made with other settings (`MAY_DIFFER`).
        """
        path = directory / FILE
        if not path.is_file():
            raise SettingsError(
                f"resume: there is no checkpoint {str(path)!r}; a run writes one at "
                "its end, on Ctrl-C and every checkpoint-every rounds"
            )
        try:
            about, shared, own = read(path)
            former = dict(about["settings"])
            arrays = {name: shared[name] for name in about["names"]}
            # Those of older versions do not say it.
            own = {name: own[name] for name in about.get("state-names", own)}
            server_round, seconds = int(about["round"]), float(about["seconds"])
            values = dict(about["values"])
        except (SafetensorError, OSError, LookupError, ValueError, TypeError) as error:
            raise SettingsError(f"resume: {str(path)!r} is damaged: {error}") from None
        differ = []
        for name, value in settings.items():
            was = former.get(name, value)
            if name in MAY_DIFFER or was == value:
                continue
            if FORMER_DEFAULTS.get(name) == (was, value):
                text = "resume: %s was %r by default and is %r now, for what reads it"
                log(WARNING, text, name, was, value)
            else:
                differ.append(f"{name} was {was!r} and is {value!r}")
        if differ:
            raise SettingsError(
                f"resume: {str(directory)!r} was made with other settings: "
                + ", ".join(differ)
            )
        return cls(server_round, to_record(arrays), (own, values), seconds, former)
