"""The runs in a results folder, as far as the page shows them.

The folder may be empty, half-written or about to be deleted.
"""

import os
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.common import log

from flwr_frl.results.results import (
    METRICS,
    STATUS,
    Row,
    is_number,
    quality,
    read_object,
    read_rows,
)

# The most points of a curve.
MOST_POINTS = 200


def read_folder(folder: Path) -> dict[str, Any]:
    """Return the data of the page, as JSON values.

    Parameters
    ----------
    folder : Path
        The results folder.

    Returns
    -------
    dict
        ``folder``, the folder's name, and ``runs``, sorted by depth and name. A run has
        its ``name``, ``state``, ``round``, ``rounds`` and remaining seconds (``left``);
        ``written``, the time of the last change in seconds since the epoch; ``quality``
        and ``measure``, its main metric and that of its clients; the ``columns`` of its
        rows, by metric; and its ``clients``. A damaged run is left out.
    """
    runs = list[dict[str, Any]]()
    for directory in _directories(folder):
        stamps = tuple(_stamp(directory / name) for name in (METRICS, STATUS))
        try:
            run = _run(directory, stamps)
        except Exception as error:
            log(WARNING, "the page does not show %s: %r", directory, error)
            continue
        path = directory.relative_to(folder).as_posix()
        name = path if path != "." else folder.absolute().name
        runs.append({"name": name, **run})
    return {
        # The name only: the page may be sent to others, who need not know the path.
        "folder": folder.absolute().name,
        "runs": sorted(runs, key=lambda run: (run["name"].count("/"), run["name"])),
    }


def _directories(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        # Clients' states are many.
        folders[:] = [name for name in folders if name != "clients"]
        if METRICS in files or STATUS in files:
            yield Path(place)


def _stamp(path: Path) -> tuple[float, int]:
    """Return the time of a file's last change and its size, or zeros."""
    try:
        about = path.stat()
    except OSError:
        return 0.0, 0
    return about.st_mtime, about.st_size


@lru_cache(maxsize=1024)
def _run(directory: Path, stamps: tuple[tuple[float, int], ...]) -> dict[str, Any]:
    """Return a run; it is read again when the ``stamps`` of its files change."""
    rows, status = read_rows(directory / METRICS), read_object(directory / STATUS)
    columns = _columns(rows)
    main = quality(columns)
    lost = {
        kind: _count(rows, f"{kind}-clients") for kind in ("rejected", "unanswered")
    }
    return {
        "state": status.get("state", ""),
        "round": rows[-1]["round"] if rows else 0,
        "rounds": status.get("rounds"),
        "left": status.get("left"),
        "written": max(time for time, _ in stamps),
        "quality": main,
        "measure": status.get("measure", main),
        "columns": columns,
        "clients": [
            {**client, **{kind: each[client["client"]] for kind, each in lost.items()}}
            for client in status.get("clients", [])
        ],
    }


def _count(rows: list[Row], name: str) -> Counter[str]:
    """Count the names in the lists of some rows."""
    # A client's metric may have the name of the list.
    lists = (row[name] for row in rows if isinstance(row.get(name), list))
    return Counter(client for clients in lists for client in clients)


def _columns(rows: list[Row]) -> dict[str, list[float | None]]:
    """Return the numbers of some rows by metric, and the costs so far.

    A long run is thinned to at most `MOST_POINTS` rows; evaluated rows come first.
    """
    updates, traffic, every = 0, 0.0, list[Row]()
    for row in rows:
        updates += row.get("clients", 0) + row.get("dropped", 0)
        traffic += (row.get("bytes-down", 0) + row.get("bytes-up", 0)) / 1e6
        every.append({**row, "updates": updates, "traffic": traffic})
    step = -(-len(rows) // MOST_POINTS) or 1
    # Counted from the last row, which is always shown.
    ends = range(len(rows), 0, -step)
    parts = [every[max(0, end - step) : end] for end in reversed(ends)]
    kept = [max(part, key=lambda row: "evaluated" in row) for part in parts]
    kept[-1:] = every[-1:]
    names = sorted({name for row in kept for name, v in row.items() if is_number(v)})
    return {n: [r[n] if is_number(r.get(n)) else None for r in kept] for n in names}
