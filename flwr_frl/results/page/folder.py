"""The runs in a results folder, as far as the page shows them.

The folder may be empty, half-written or about to be deleted, and clients choose their
names: no file is trusted to have a certain form.
"""

import math
import os
import platform
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr_frl.common.text import one_line
from flwr_frl.results.page.charts import Point
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
MAX_NAME = 120
# Larger values of staleness are not shown.
MAX_STALENESS = 10_000
STATES = ("running", "finished", "stopped")
# The series of the bytes sent and received so far, in MB.
TRAFFIC = "traffic"
# The series of the client updates so far, dropped ones included.
UPDATES = "updates"


@dataclass(frozen=True)
class RunView:
    """A run of an algorithm.

    Parameters
    ----------
    name : str
        The run's folder, relative to the results folder.
    series : dict
        The points of each numeric metric in ``metrics.jsonl``, of `TRAFFIC` and of
        `UPDATES`.
    last_round : int
        The last round; 0 before the first.
    state : str
        One of `STATES`; empty if unknown.
    rounds : float, optional
        The number of rounds of the run.
    left : float, optional
        The remaining time, in seconds, when the status was written.
    written : float
        When the metrics or the status were last written, in seconds since the epoch.
    measure : str
        The metric by which clients are shown.
    clients : list of dict
        Entries of ``status.json``, unchecked, with the numbers of rounds in which the
        client's reply was rejected (``rejected``) or missing (``unanswered``).
    staleness : tuple of int
        Number of changes by their staleness, from 0; empty for synchronous rounds.
    """

    name: str
    series: dict[str, list[Point]]
    last_round: int
    state: str
    rounds: float | None
    left: float | None
    written: float
    measure: str
    clients: list[dict[str, Any]]
    staleness: tuple[int, ...]

    @property
    def algorithm(self) -> str:
        """The algorithm, after which the run's folder is named."""
        return self.name.rpartition("/")[2]


class Results:
    """A results folder. Only changed runs are read again.

    A run has changed if the size or the modification time of one of its files has.

    Parameters
    ----------
    folder : Path
        The folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._cache: dict[Path, tuple[Any, RunView]] = {}
        self._drawn: tuple[list[RunView], str] = [], ""

    def drawn(self, draw: Callable[[list[RunView]], str]) -> str:
        """Return ``draw(runs)``, or its former result if no run has changed."""
        runs, (former, text) = self.runs(), self._drawn
        # Unchanged runs are the same objects.
        if not text or list(map(id, runs)) != list(map(id, former)):
            text = draw(runs)
            self._drawn = runs, text
        return text

    def runs(self) -> list[RunView]:
        """Return all runs, sorted by depth and name."""
        former, self._cache = self._cache, {}
        for directory in _directories(self.folder, DEPTH):
            stamps = [_stamp(directory / name) for name in (METRICS, STATUS, CLIENTS)]
            if stamps[0] or stamps[1]:
                cached = former.get(directory)
                if cached is None or cached[0] != stamps:
                    cached = stamps, _view(directory, self.folder)
                self._cache[directory] = cached
        views = [view for _, view in self._cache.values()]
        return sorted(views, key=lambda view: (view.name.count("/"), view.name))


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


def _view(directory: Path, folder: Path) -> RunView:
    try:
        rows = read_rows(directory / METRICS)
    except OSError:
        rows = []
    # An integer may be too large for the axis.
    rows = [row for row in rows if number(row["round"]) is not None]
    status, series = read_object(directory / STATUS), _series(rows)
    measure, listed = quality(series), status.get("clients")
    if isinstance(listed, list):
        clients = [client for client in listed if isinstance(client, dict)]
        measure = str(status.get("measure", measure))
    else:
        # The status is missing or damaged, for example because the disk was full.
        final = objects_in(read_object(directory / CLIENTS))
        clients = [
            {"client": name, **entry, "quality": entry.get(measure)}
            for name, entry in final.items()
        ]
    for kind in ("rejected", "unanswered"):
        lists = [row.get(f"{kind}-clients") for row in rows]
        counts = Counter(
            str(n) for names in lists if isinstance(names, list) for n in names
        )
        clients = [{**c, kind: counts[str(c.get("client"))]} for c in clients]
    state, left = status.get("state"), number(status.get("left"))
    if state == "running" and _was_killed(status):
        state, left = "stopped", None
    path = directory.relative_to(folder).as_posix()
    stamps = [_stamp(directory / name) for name in (METRICS, STATUS)]
    return RunView(
        name=shown(path if path != "." else folder.resolve().name),
        series=series,
        last_round=rows[-1]["round"] if rows else 0,
        state=state if isinstance(state, str) and state in STATES else "",
        rounds=number(status.get("rounds")),
        left=left,
        written=max(stamp[0] / 1e9 if stamp else 0.0 for stamp in stamps),
        measure=shown(measure),
        clients=clients,
        staleness=_histogram(rows),
    )


def _histogram(rows: list[Row]) -> tuple[int, ...]:
    lists = (row.get("staleness") for row in rows)
    ages = Counter(
        age
        for values in lists
        if isinstance(values, list)
        for age in values
        if isinstance(age, int) and 0 <= age < MAX_STALENESS
    )
    return tuple(ages[age] for age in range(max(ages, default=-1) + 1))


def _series(rows: list[Row]) -> dict[str, list[Point]]:
    series: dict[str, list[Point]] = {}
    traffic = updates = 0.0
    for row in rows:
        for name, value in row.items():
            points = series.setdefault(name, [])
            if (finite := number(value)) is not None:
                points.append((row["round"], finite))
        traffic += sum(number(row.get(n)) or 0.0 for n in ("bytes-down", "bytes-up"))
        series.setdefault(TRAFFIC, []).append((row["round"], traffic / 1e6))
        updates += sum(number(row.get(n)) or 0.0 for n in ("clients", "dropped"))
        series.setdefault(UPDATES, []).append((row["round"], updates))
    return series


def _was_killed(status: dict[str, Any]) -> bool:
    """Return True if the process that wrote a status ran here and no longer exists."""
    process, processes = status.get("process"), Path("/proc")
    return (
        status.get("host") == platform.node()
        and isinstance(process, int)
        and (processes / "self").exists()
        and not (processes / str(process)).exists()
    )


def shown(name: object) -> str:
    """Return a name without invisible characters, cut to `MAX_NAME`."""
    return one_line(name, MAX_NAME)


def number(value: object) -> float | None:
    """Return a finite number; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # An integer may be too large for a float.
    return value if abs(value) < 1e300 and math.isfinite(value) else None
