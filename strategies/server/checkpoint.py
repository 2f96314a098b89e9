"""Checkpoints: everything that the server needs to continue a run after a round."""

import json
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord
from safetensors import SafetensorError

from flwr_frl.common.arrays import values_of
from flwr_frl.common.checkpoint import FILE, OTHER_SETTINGS, Content, pack, read
from flwr_frl.common.errors import SettingsError
from flwr_frl.common.files import PRIVATE, write_atomically
from flwr_frl.common.settings import Settings, facts
from flwr_frl.strategies.server.replies import Arrays, to_record


class State(NamedTuple):
    """A strategy's state as a checkpoint has it.

    Parameters
    ----------
    arrays : dict of str to ndarray
        Arrays of the tree ``strategy.state``, by the keys on their paths, joined by
        ``/``.
    values : dict
        JSON values: those that every strategy saves, and the rest of the tree under
        ``state``.
    """

    arrays: Arrays
    values: dict[str, Any]


def snapshot_of(tree: dict[str, Any], values: dict[str, Any]) -> State:
    """Return a tree and values as they are now.

    Called after each round, so it only copies the dicts, which takes far less time than
    encoding them for a file.

    Parameters
    ----------
    tree : dict
        Dicts with arrays and JSON values. Arrays must be replaced, not changed in
        place.
    values : dict
        Strings, and dicts with strings and numbers only.

    Raises
    ------
    SettingsError
        If a leaf of the tree is neither an array nor a JSON value.
    """
    arrays: Arrays = {}
    paths: dict[str, list[str]] = {}

    def copied(inner: dict[str, Any], path: list[str]) -> dict[str, Any]:
        """Return a copy of a tree without its arrays, which are listed."""
        rest: dict[str, Any] = {}
        for key, value in inner.items():
            if isinstance(value, (str, int, float, NoneType)):
                rest[key] = value
                continue
            place = [*path, str(key)]
            if isinstance(value, np.ndarray):
                name = "/".join(place)
                if name in arrays:
                    text = f"two arrays of the strategy's state are named {name!r}"
                    raise SettingsError(text)
                arrays[name], paths[name] = value, place
            elif isinstance(value, dict):
                rest[key] = copied(value, place)
            else:
                try:
                    rest[key] = json.loads(json.dumps(value))
                except (TypeError, ValueError) as error:
                    raise SettingsError(
                        f"the strategy's state cannot be saved: {'/'.join(place)}: "
                        f"{error}; expected a tree of dicts with arrays and JSON values"
                    ) from None
        return rest

    about = {n: dict(v) if isinstance(v, dict) else v for n, v in values.items()}
    about |= {"state": copied(tree, []), "paths": paths}
    return State(arrays, about)


def restore_tree(tree: dict[str, Any], state: State) -> None:
    """Restore a tree in place; keys that the state lacks keep their values."""
    restored = deepcopy(state.values["state"])
    for name, array in state.arrays.items():
        *outer, last = state.values["paths"][name]
        place = restored
        for key in outer:
            place = place[key]
        place[last] = array
    for key, value in restored.items():
        if isinstance(value, dict) and isinstance(former := tree.get(key), dict):
            former.clear()
            former.update(value)
        else:
            tree[key] = value


@dataclass(frozen=True)
class Checkpoint:
    """A run's state after a round.

    Parameters
    ----------
    server_round : int
        The round.
    arrays : ArrayRecord
        The shared arrays.
    state : State
        The strategy's `Strategy._snapshot`.
    seconds : float
        Time that the run has taken so far.
    settings : mapping
        All settings of the run.
    """

    server_round: int
    arrays: ArrayRecord
    state: State
    seconds: float
    settings: Settings

    def write(self, directory: Path) -> None:
        """Replace the checkpoint in a run's output directory, atomically.

        After an `OSError` the former checkpoint is still there.
        """
        state_arrays, values = self.state
        about = {
            "round": self.server_round,
            "seconds": self.seconds,
            "settings": dict(self.settings),
            "values": values,
        }
        shared = {name: values_of(array) for name, array in self.arrays.items()}
        data = pack(Content(about, shared, state_arrays))
        write_atomically(directory / FILE, data, mode=PRIVATE)

    @classmethod
    def read(cls, directory: Path, settings: Settings) -> "Checkpoint":
        """Read the checkpoint of a run that is to be resumed with these settings.

        Raises `SettingsError` if there is none in the run's output directory, it is
        damaged, or a setting differs that may not.
        """
        path = directory / FILE
        if not path.is_file():
            raise SettingsError(
                f"resume: there is no checkpoint {str(path)!r}; a run writes one at "
                "its end, on Ctrl-C and every checkpoint-every rounds"
            )
        try:
            about, shared, saved = read(path)
            former = dict(about["settings"])
            server_round, seconds = int(about["round"]), float(about["seconds"])
            values = dict(about["values"])
        except (SafetensorError, OSError, LookupError, ValueError, TypeError) as error:
            raise SettingsError(f"resume: {str(path)!r} is damaged: {error}") from None
        differ = [
            f"{name} was {former[name]!r} and is {value!r}"
            for name, value in settings.items()
            if name not in facts("on-resume") and former.get(name, value) != value
        ]
        if differ:
            line = f"resume: {str(directory)!r} was made with other settings: "
            raise SettingsError(line + ", ".join(differ), OTHER_SETTINGS)
        return cls(
            server_round, to_record(shared), State(saved, values), seconds, former
        )
