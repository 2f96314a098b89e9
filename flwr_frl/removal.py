"""The command ``flwr-frl device remove``: delete what a folder has of one client."""

import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from flwr_frl.clients.device.secure import UNMASKED
from flwr_frl.clients.device.state import quoted
from flwr_frl.common import checkpoint, files
from flwr_frl.common.files import write_atomically
from flwr_frl.common.settings import reading, require
from flwr_frl.results.output import locked
from flwr_frl.results.results import (
    CLIENTS,
    METRICS,
    NEWCOMERS,
    read_journal,
    read_json,
    strict_json,
)

# Other files in the folder of a client's states.
ACCOUNTS = files.ACCOUNT_FILE, f"{UNMASKED}.json"
CHECKPOINTS = checkpoint.FILE, checkpoint.BEST_FILE
# Entries of a checkpoint that are of no client. `in_mean` has the clients whose states
# are in the mean, which cannot be undone.
OTHERS = "model", "paths", "state", "in_mean"
REMAINS = """\
The means to which {name} contributed remain: shared arrays, and metrics of the rounds.
So do reports, status.json, figures, logs, privacy accounts of the server, and copies
elsewhere, such as older checkpoints in backups. To free its key, run on the server:
  flwr supernode unregister NODE_ID federation"""


def remove(name: str, folder: Path) -> str:
    """Delete a client's heads, states and metrics below a folder; return a report.

    The folder is a device's ``state-dir`` or a server's ``output``. Links in it are not
    followed, and other files stay.

    Raises
    ------
    SettingsError
        If nothing of the client is found, a file is damaged, or a run is in progress.
    """
    changed = []
    for parent, _, names in os.walk(folder):
        place = Path(parent)
        with ExitStack() as stack:
            if checkpoint.FILE in names:
                stack.enter_context(locked(place.parent, place.name))
            for path in (place / file for file in sorted(names)):
                if not path.is_symlink() and _remove_from(path, name):
                    changed.append(str(path))
        if place.name == quoted(name) and not any(place.iterdir()):
            place.rmdir()
    require(bool(changed), "NAME", name, f"a client with files in {folder}", "NAME")
    first = f"removed {name} from {len(changed)} files:"
    return "\n".join([first, *changed, REMAINS.format(name=name)])


def _remove_from(path: Path, name: str) -> bool:
    """Remove a client from a file; return whether it was there."""
    file = (files.unfinished(path.name) or path.name).removesuffix(files.SET_ASIDE)
    is_state = files.STATE_FILE.fullmatch(file) or file in ACCOUNTS
    if is_state and path.parent.name == quoted(name):
        path.unlink()
        return True
    with reading(path):
        if path.name in (CLIENTS, NEWCOMERS):
            before = read_json(path)
            after = _without(before, name)
            data = _lines([after], 2)
        elif path.name == METRICS:
            before = [*read_journal(path)]
            after = [_below(row, name) for row in before]
            data = _lines(after)
        elif path.name in CHECKPOINTS:
            content = checkpoint.read(path)
            new = _of_checkpoint(content, name)
            before, after, data = content.about, new.about, checkpoint.pack(new)
        else:
            return False
    if after != before:
        write_atomically(path, data, mode=path.stat().st_mode & 0o777)
    return bool(after != before)


def _lines(values: Iterable[object], indent: int | None = None) -> bytes:
    return "".join(f"{strict_json(value, indent)}\n" for value in values).encode()


def _of_checkpoint(content: checkpoint.Content, name: str) -> checkpoint.Content:
    """Return a checkpoint without a client's entries and arrays."""
    about, shared, arrays = content
    values = _below(about["values"], name)
    values["state"] = _below(values["state"], name)
    # The paths of clients' arrays begin with a group and the client.
    values["paths"] = {n: p for n, p in values["paths"].items() if p[1:2] != [name]}
    left = {n: arrays[n] for n in about["state-names"] if n in values["paths"]}
    about = {**about, "values": values, "state-names": [*left]}
    return checkpoint.Content(about, shared, left)


def _below(tree: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a dict whose entries lack a client's entries."""
    return {
        n: part if n in OTHERS else _without(part, name) for n, part in tree.items()
    }


def _without(part: Any, name: str) -> Any:
    if not isinstance(part, dict):
        return part
    # Clients may also have entries of each other.
    return {n: _without(value, name) for n, value in part.items() if n != name}
