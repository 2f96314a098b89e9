"""What runs have written into a results folder, as far as a page shows it.

The folder may be empty, half-written or on its way out, and clients chose their names:
nothing in it is trusted to be of a certain form.
"""

import math
import os
import platform
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr_frl.strategies.report.page.charts import Point
from flwr_frl.strategies.report.results import (
    CLIENTS,
    METRICS,
    STATUS,
    Row,
    quality,
    read_json,
    read_rows,
)
from flwr_frl.strategies.server.checks import one_line

# A run is in a folder of its name, which may be of a seed or an earlier run.
DEPTH = 4
# Of a name in the page.
LONGEST_NAME = 120


@dataclass(frozen=True)
class Client:
    """What is known of one client; None where it is not.

    Parameters
    ----------
    name, node, reason : str
        Fit to be shown; the reason is why it did not count or takes no part.
    last_seen : float, optional
        Time of day, in seconds.
    last_round : int, optional
        The last one in which it counted.
    quality : float, optional
        By the run's measure.
    examples, test_examples : int, optional
        How many it has.
    rejected, unanswered : int
        In how many rounds its reply did not count, or none came.
    """

    name: str
    node: str = ""
    last_seen: float | None = None
    last_round: float | None = None
    quality: float | None = None
    examples: float | None = None
    test_examples: float | None = None
    rejected: int = 0
    unanswered: int = 0
    reason: str = ""


@dataclass(frozen=True)
class RunView:
    """One run of one algorithm.

    Parameters
    ----------
    name : str
        Its folder within the results folder.
    series : dict
        Points of each metric in ``metrics.jsonl`` by round, where it is a number.
    traffic : list of (float, float)
        Megabytes down and up so far, by round.
    last_round : int
        The last round in ``metrics.jsonl``; 0 before the first.
    state : str
        ``running``, ``finished``, ``stopped``, or empty where nothing says it.
    rounds : int, optional
        How many there will be.
    left : float, optional
        Seconds that the others will take, when the state was written.
    written : float
        When something of it was written last.
    measure : str
        By what its clients are shown.
    clients : list of Client
        In the order of their names.
    """

    name: str
    series: dict[str, list[Point]]
    traffic: list[Point]
    last_round: int = 0
    state: str = ""
    rounds: float | None = None
    left: float | None = None
    written: float = 0.0
    measure: str = "accuracy"
    clients: list[Client] = field(default_factory=list)

    @property
    def algorithm(self) -> str:
        """The algorithm, which gives its folder the name."""
        return self.name.rpartition("/")[2]


class Results:
    """A results folder, of which only what has changed is read and drawn again.

    Files are known by their sizes and the times of their last changes.

    Parameters
    ----------
    folder : Path
        The folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[Path, tuple[Any, RunView]] = {}
        self._drawn: tuple[list[RunView], str] = [], ""

    def drawn(self, draw: Callable[[list[RunView]], str]) -> str:
        """Return a drawing of all runs: the last one, if no run has changed since."""
        runs, (former, text) = self.runs(), self._drawn
        # Runs that have not changed are the same objects.
        if not text or list(map(id, runs)) != list(map(id, former)):
            text = draw(runs)
            self._drawn = runs, text
        return text

    def runs(self) -> list[RunView]:
        """Return all runs in the folder, in the order of their names."""
        found: dict[Path, tuple[Any, RunView]] = {}
        for directory in _directories(self.folder, DEPTH):
            stamp = [_stamp(directory / name) for name in (METRICS, STATUS, CLIENTS)]
            if not any(stamp[:2]):
                continue
            known = self._read.get(directory)
            if known is None or known[0] != stamp:
                known = stamp, _view(directory, self.folder)
            found[directory] = known
        self._read = found
        views = [view for _, view in found.values()]
        return sorted(views, key=lambda view: (view.name.count("/"), view.name))


def _directories(folder: Path, depth: int) -> list[Path]:
    """Return a folder and those in it; one that disappears meanwhile has none."""
    found = [folder]
    try:
        if depth:
            with os.scandir(folder) as entries:
                inner = [e.path for e in entries if e.is_dir(follow_symlinks=False)]
            # What a run keeps of its simulated clients are no runs.
            inner = [path for path in inner if not path.endswith(f"{os.sep}clients")]
            for path in sorted(inner):
                found += _directories(Path(path), depth - 1)
    except OSError:
        return []
    return found


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_mtime_ns, about.st_size


def _json(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _view(directory: Path, folder: Path) -> RunView:
    try:
        read = read_rows(directory / METRICS)
    except OSError:
        read = []
    # An integer may be too long for the axis.
    rows = [row for row in read if number(row["round"]) is not None]
    status, times = _json(directory / STATUS), [0.0]
    for name in (METRICS, STATUS):
        if stamp := _stamp(directory / name):
            times.append(stamp[0] / 1e9)
    inner = directory.relative_to(folder).as_posix()
    series = _series(rows)
    own = quality(series)
    listed = status.get("clients")
    if isinstance(listed, list):
        clients = [c for c in listed if isinstance(c, dict)]
        measure = str(status.get("measure", own))
    else:
        # That of an older version, which is there at the end.
        measure = own
        final = _json(directory / CLIENTS)
        clients = [
            {"client": name, **about, "quality": about.get(measure)}
            for name, about in final.items()
            if isinstance(about, dict)
        ]
    state = status.get("state")
    if killed := state == "running" and _is_gone(status):
        state = "stopped"
    return RunView(
        name=shown(inner if inner != "." else folder.resolve().name),
        series=series,
        traffic=_traffic(rows),
        last_round=rows[-1]["round"] if rows else 0,
        state=state if state in ("running", "finished", "stopped") else "",
        rounds=number(status.get("rounds")),
        left=None if killed else number(status.get("left")),
        written=max(times),
        measure=shown(measure),
        clients=_clients(clients, rows),
    )


def _series(rows: list[Row]) -> dict[str, list[Point]]:
    """Return each metric's points; none where it never is a number."""
    found: dict[str, list[Point]] = {}
    for row in rows:
        for name, value in row.items():
            points = found.setdefault(name, [])
            if (finite := number(value)) is not None:
                points.append((row["round"], finite))
    return found


def _traffic(rows: list[Row]) -> list[Point]:
    total, points = 0.0, []
    for row in rows:
        total += sum(number(row.get(n)) or 0.0 for n in ("bytes-down", "bytes-up"))
        points.append((row["round"], total / 1e6))
    return points


def _is_gone(status: dict[str, Any]) -> bool:
    """Return whether a process of this machine that wrote a status is known to be gone.

    What ends a process at once leaves it no time to say so.
    """
    process, here = status.get("process"), status.get("host") == platform.node()
    proc = Path("/proc")
    return (
        here
        and isinstance(process, int)
        and ((proc / "self").exists() and not (proc / str(process)).exists())
    )


def _clients(listed: list[dict[str, Any]], rows: list[Row]) -> list[Client]:
    rejected = _counted(rows, "rejected-clients")
    unanswered = _counted(rows, "unanswered-clients")
    return [
        Client(
            name=shown(about.get("client", "?")),
            node=shown(about.get("node") or ""),
            last_seen=number(about.get("last-seen")),
            last_round=number(about.get("last-round")),
            quality=number(about.get("quality")),
            examples=number(about.get("num-examples")),
            test_examples=number(about.get("num-test-examples")),
            rejected=rejected[str(about.get("client"))],
            unanswered=unanswered[str(about.get("client"))],
            reason=one_line(about.get("reason") or ""),
        )
        for about in listed
    ]


def _counted(rows: list[Row], key: str) -> Counter[str]:
    """Return in how many rounds a client's name is listed."""
    lists = (row.get(key) for row in rows)
    return Counter(
        name
        for names in lists
        if isinstance(names, list)
        for name in names
        if isinstance(name, str)
    )


def shown(name: object) -> str:
    """Return a name without anything that is not seen."""
    return one_line(name, LONGEST_NAME)


def number(value: object) -> float | None:
    """Return a finite number; None for all else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # An integer may be too long for a float.
    return value if abs(value) < 1e300 and math.isfinite(value) else None
