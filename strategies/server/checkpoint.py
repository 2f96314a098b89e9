"""Checkpoints: everything that the server needs to continue a run after a round."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord
from safetensors import SafetensorError

from flwr_frl.common.checkpoint import (
    FILE,
    OTHER_SETTINGS,
    Content,
    pack,
    read,
)
from flwr_frl.common.files import PRIVATE, write_atomically
from flwr_frl.common.memory_array import values_of
from flwr_frl.common.settings import Settings, SettingsError, facts
from flwr_frl.common.text import one_line
from flwr_frl.strategies.server.replies import Arrays, to_record

# Types of scalar JSON values, which are also the types of keys that JSON can encode.
PLAIN = (str, int, float, type(None))
PLAIN_TYPES = frozenset(PLAIN)


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


def snapshot_of(tree: dict[str, Any], values: dict[str, Any]) -> Callable[[], State]:
    """Return a function that returns a tree and values as they are now.

    Called after each round, so it only copies the dicts, which takes far less time than
    encoding them. The returned function encodes the copies.

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
    listed, rest = _split(tree, [])
    for path, array in listed:
        name = "/".join(path)
        if name in arrays:
            raise SettingsError(
                f"two arrays of the strategy's state are named {name!r}"
            )
        arrays[name] = array
        if _path_of(name) != path:
            paths[name] = path
    copies = {n: dict(v) if isinstance(v, dict) else v for n, v in values.items()}
    saved = {**copies, "state": rest, "paths": paths}
    return lambda: State(arrays, json.loads(json.dumps(saved)))


def restore_tree(tree: dict[str, Any], state: State) -> None:
    """Restore a tree in place; keys that the state lacks keep their values."""
    restored: dict[str, Any] = {}
    for name, array in state.arrays.items():
        *keys, last = state.values["paths"].get(name) or _path_of(name)
        place = restored
        for key in keys:
            place = place.setdefault(key, {})
        place[last] = array
    _merge(restored, state.values["state"])
    for key, value in restored.items():
        if isinstance(value, dict) and isinstance(former := tree.get(key), dict):
            former.clear()
            former.update(value)
        else:
            tree[key] = value


def _split(
    tree: dict[str, Any], path: list[str]
) -> tuple[list[tuple[list[str], np.ndarray]], dict[str, Any]]:
    """Return the arrays of a tree with their paths, and a copy of it without them."""
    arrays: list[tuple[list[str], np.ndarray]] = []
    if PLAIN_TYPES.issuperset(map(type, [*tree, *tree.values()])):
        return arrays, dict(tree)
    rest: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, PLAIN) and isinstance(key, PLAIN):
            rest[key] = value
            continue
        place = [*path, str(key)]
        if isinstance(value, np.ndarray):
            arrays.append((place, value))
        elif isinstance(value, dict):
            inner, values = _split(value, place)
            arrays += inner
            if values or not value:
                rest[key] = values
        else:
            rest[key] = _copied({key: value})[key]
    return arrays, rest


def _copied(value: Any) -> Any:
    """Return a copy of a JSON value; raise `SettingsError` if it is none."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, list | tuple):
        return [_copied(each) for each in value]
    if isinstance(value, dict) and all(isinstance(key, PLAIN) for key in value):
        return {key: _copied(each) for key, each in value.items()}
    raise SettingsError(
        f"the strategy's state cannot be saved: it has {one_line(repr(value))} of type "
        f"{type(value).__name__}; expected a tree of dicts with arrays and JSON values"
    )


def _path_of(name: str) -> list[str]:
    """Split a name into at most three keys; the middle one may contain ``/``."""
    first, slash, rest = name.partition("/")
    if not slash:
        return [name]
    middle, slash, last = rest.rpartition("/")
    return [first, middle, last] if slash else [first, last]


def _merge(tree: dict[str, Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
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
        The strategy's `Strategy.snapshot`.
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

    def write(self, directory: Path, name: str = FILE) -> None:
        """Replace the checkpoint of a name in a run's output directory, atomically.

        After an `OSError` the former checkpoint is still there.
        """
        state_arrays, values = self.state
        about = {
            "round": self.server_round,
            "seconds": self.seconds,
            "settings": dict(self.settings),
            "values": values,
            # The order of names is lost in the file's sorted header.
            "names": list(self.arrays),
            "state-names": list(state_arrays),
        }
        shared = {name: values_of(array) for name, array in self.arrays.items()}
        data = pack(Content(about, shared, state_arrays))
        write_atomically(directory / name, data, mode=PRIVATE)

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
            arrays = {name: shared[name] for name in about["names"]}
            saved = {name: saved[name] for name in about["state-names"]}
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
            server_round, to_record(arrays), State(saved, values), seconds, former
        )
