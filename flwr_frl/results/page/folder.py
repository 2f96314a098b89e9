"""The runs in a results folder, as far as the page shows them.

The folder may be empty, half-written or about to be deleted, and clients choose their
names: no file is trusted to have a certain form.
"""

import math
import os
import platform
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flwr_frl.common.text import one_line
from flwr_frl.results.results import (
    CLIENTS,
    METRICS,
    STATUS,
    Row,
    objects_in,
    quality,
    read_object,
    read_rows,
)

# How deep folders are searched for runs. The deepest are archived runs of a search over
# several seeds: ALGORITHM/POINT/SEED/EARLIER/ALGORITHM.
DEPTH = 5
# The most points of a curve.
MOST_POINTS = 400
MAX_NAME = 120
# Larger values of staleness are not shown.
MAX_STALENESS = 10_000
STATES = ("running", "finished", "stopped")
OF_CLIENTS = (
    *("last-seen", "last-round", "quality", "num-examples", "num-test-examples"),
    "updates",
)
# Metrics that the quality is drawn against: simulated time, client updates so far
# (dropped ones included) and MB sent and received so far.
COSTS = ("seconds-simulated", "updates", "traffic")

# A run, as `document` describes it.
Run = dict[str, Any]
# Runs by folder, each with sizes and modification times of its files.
Cache = dict[Path, tuple[Any, Run]]


def read_folder(folder: Path, cache: Cache | None = None) -> dict[str, Any]:
    """Return the data of the page, as JSON values.

    Parameters
    ----------
    folder : Path
        The results folder.
    cache : dict, optional
        The runs of an earlier call. Runs whose files have not changed since are not
        read again.

    Returns
    -------
    dict
        ``folder``, the folder's name; ``quality``, the main metric of its runs; and
        ``runs``, sorted by depth and name. A run has its ``name``, ``state`` (one of
        `STATES`, or empty), ``round``, ``rounds`` and remaining seconds (``left``);
        ``written``, the time of the last change in seconds since the epoch;
        ``quality`` and ``measure``, its main metric and that of its clients; ``down``
        and ``up``, MB in all; the curves ``series`` by metric and ``costs`` by cost,
        each as two lists; its ``clients``; and the ``staleness`` of its updates,
        numbers of updates from staleness 0.
    """
    cache, runs = {} if cache is None else cache, []
    for directory in _directories(folder, DEPTH):
        stamps = [_stamp(directory / name) for name in (METRICS, STATUS, CLIENTS)]
        if stamps[0] or stamps[1]:
            if directory not in cache or cache[directory][0] != stamps:
                cache[directory] = stamps, _run(directory, folder)
            runs.append(cache[directory][1])
    return {
        # The name only: the page may be sent to others, who need not know the path.
        "folder": _shown(folder.absolute().name),
        "quality": quality({name for run in runs for name in run["series"]}),
        "runs": sorted(runs, key=lambda run: (run["name"].count("/"), run["name"])),
    }


def _directories(folder: Path, depth: int) -> list[Path]:
    """Return a folder and its subfolders, except those of clients' states."""
    try:
        with os.scandir(folder) as entries:
            inner = [e.path for e in entries if e.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    inner = [path for path in sorted(inner) if not path.endswith(f"{os.sep}clients")]
    nested = [_directories(Path(path), depth - 1) for path in inner if depth]
    return [folder, *(path for paths in nested for path in paths)]


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_mtime_ns, about.st_size


def _run(directory: Path, folder: Path) -> Run:
    try:
        rows = read_rows(directory / METRICS)
    except OSError:
        rows = []
    # An integer may be too large for the axis.
    rows = [row for row in rows if _number(row["round"]) is not None]
    status, series = read_object(directory / STATUS), _series(rows)
    main, listed = quality(series), status.get("clients")
    if isinstance(listed, list):
        clients = [client for client in listed if isinstance(client, dict)]
        measure = str(status.get("measure", main))
    else:
        # The status is missing or damaged, for example because the disk was full.
        final, measure = objects_in(read_object(directory / CLIENTS)), main
        clients = [
            {"client": name, **entry, "quality": entry.get(main)}
            for name, entry in final.items()
        ]
    lost = {
        kind: _count(rows, f"{kind}-clients") for kind in ("rejected", "unanswered")
    }
    state, left = status.get("state"), _number(status.get("left"))
    if state == "running" and _was_killed(status):
        state, left = "stopped", None
    path = directory.relative_to(folder).as_posix()
    stamps = [_stamp(directory / name) for name in (METRICS, STATUS)]
    ages = {n: k for n, k in _count(rows, "staleness").items() if type(n) is int}
    ages = {n: k for n, k in ages.items() if 0 <= n < MAX_STALENESS}
    points = series.get(main, {})
    return {
        "name": _shown(path if path != "." else folder.resolve().name),
        "state": state if state in STATES else "",
        "round": rows[-1]["round"] if rows else 0,
        "rounds": _number(status.get("rounds")),
        "left": left,
        "written": max(stamp[0] / 1e9 if stamp else 0.0 for stamp in stamps),
        "quality": main,
        "measure": _shown(measure),
        "down": _sum(rows, "bytes-down") / 1e6,
        "up": _sum(rows, "bytes-up") / 1e6,
        "series": {_shown(n): _curve(values.items()) for n, values in series.items()},
        "costs": {
            cost: _curve((at[n], points[n]) for n in points if n in at)
            for cost in COSTS
            if (at := series.get(cost))
        },
        "clients": [_client(client, lost) for client in clients],
        "staleness": [ages.get(n, 0) for n in range(max(ages, default=-1) + 1)],
    }


def _client(client: dict[str, Any], lost: dict[str, Counter[Any]]) -> dict[str, Any]:
    name = client.get("client", "?")
    return {
        "client": _shown(name),
        "node": _shown(client.get("node") or ""),
        **{key: _number(client.get(key)) for key in OF_CLIENTS},
        **{kind: counts[str(name)] for kind, counts in lost.items()},
        "reason": one_line(client.get("reason") or ""),
    }


def _count(rows: list[Row], name: str) -> Counter[Any]:
    """Count the texts and integers in the lists that rows have under a name."""
    lists = (row.get(name) for row in rows)
    return Counter(
        entry
        for entries in lists
        if isinstance(entries, list)
        for entry in entries
        if isinstance(entry, str | int)
    )


def _series(rows: list[Row]) -> dict[str, dict[int, float]]:
    """Return the finite values of each metric by round, and the costs so far."""
    series: dict[str, dict[int, float]] = {}
    sums = {"traffic": 0.0, "updates": 0.0}
    for row in rows:
        sums["traffic"] += _sum([row], "bytes-down", "bytes-up") / 1e6
        sums["updates"] += _sum([row], "clients", "dropped")
        for name, value in (row | sums).items():
            if (finite := _number(value)) is not None:
                series.setdefault(name, {})[row["round"]] = finite
    return series


def _sum(rows: list[Row], *names: str) -> float:
    return sum(_number(row.get(name)) or 0.0 for row in rows for name in names)


def _curve(points: Iterable[tuple[float, float]]) -> list[list[float]]:
    """Return the positions and the values of at most `MOST_POINTS` points."""
    every = list(points)
    # Every n-th point, counted from the last one, which is always shown.
    step = math.ceil(len(every) / MOST_POINTS) or 1
    kept = every[::-1][::step][::-1]
    return [[x for x, _ in kept], [y for _, y in kept]]


def _was_killed(status: dict[str, Any]) -> bool:
    """Return True if the process that wrote a status ran here and no longer exists."""
    process, processes = status.get("process"), Path("/proc")
    return (
        status.get("host") == platform.node()
        and isinstance(process, int)
        and (processes / "self").exists()
        and not (processes / str(process)).exists()
    )


def _shown(name: object) -> str:
    """Return a name without invisible characters, cut to `MAX_NAME`."""
    return one_line(name, MAX_NAME)


def _number(value: object) -> float | None:
    """Return a finite number; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # An integer may be too large for a float.
    return value if abs(value) < 1e300 and math.isfinite(value) else None
