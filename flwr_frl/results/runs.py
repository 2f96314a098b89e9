"""Read the runs of a results folder, for comparisons and for the page."""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from logging import WARNING
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from flwr.common import log

from flwr_frl.common.errors import require
from flwr_frl.common.messages import TESTED_MODEL
from flwr_frl.common.settings import Setting, Settings, defaults, facts
from flwr_frl.results.results import (
    CLIENTS,
    METRICS,
    NEWCOMERS,
    STATUS,
    SUMMARY,
    Row,
    folder_of,
    read_object,
    read_rows,
    run_result,
)

# Files of a run that are read
READ = (METRICS, STATUS, CLIENTS, NEWCOMERS)
# The runs of each method, one for each seed
Methods = dict[str, list["StoredRun"]]


class StoredRun(NamedTuple):
    """A run of one algorithm with one seed.

    Parameters
    ----------
    directory : Path
        The folder with its files.
    settings : mapping
        All settings.
    changed : mapping
        The settings that affect results and are not defaults, without the seed.
    status : mapping
        The content of ``status.json``.
    written : int
        When its files were last written, in nanoseconds.
    rows : list of dict
        The rows of the journal, without clients' metrics.
    summary : mapping
        The result so far, with the entries of ``summary.json``; empty before the first
        round.
    clients : mapping
        Each client's result, as in `run_result`.
    final : mapping
        The content of ``clients.json``.
    connections : mapping
        For the page: what ``status.json`` says of each client, and how often its
        replies were rejected or missing.
    """

    directory: Path
    settings: Settings
    changed: Settings
    status: Mapping[str, Any]
    written: int
    rows: list[Row]
    summary: Mapping[str, Any]
    clients: Mapping[str, float]
    final: Mapping[str, Mapping[str, Any]]
    connections: Mapping[str, Mapping[str, Any]] = MappingProxyType({})

    @property
    def finished(self) -> bool:
        """True unless the run is going on or was stopped."""
        return bool(self.status.get("state", "finished") == "finished")


def read_run(
    directory: Path, protocol: str = "", known: Settings | None = None, tested: str = ""
) -> StoredRun:
    """Read a run. It is read again only after one of its files has changed.

    Parameters
    ----------
    directory : Path
        The folder with its files.
    protocol : str, default ""
        By default the setting ``result-protocol`` of the run.
    known : mapping, optional
        Settings of the run that are known without ``status.json``.
    tested : str, default ""
        The model that was tested, if ``status.json`` does not name it.
    """
    places = (directory / name for name in READ)
    stats = [place.stat() for place in places if place.is_file()]
    files = tuple((each.st_mtime_ns, each.st_size) for each in stats)
    return _read(directory, protocol, tuple((known or {}).items()), tested, files)


@lru_cache(maxsize=1024)
def _read(
    directory: Path,
    protocol: str,
    known: tuple[tuple[str, Setting], ...],
    tested: str,
    files: tuple[tuple[int, int], ...],
) -> StoredRun:
    rows, status = read_rows(directory / METRICS), read_object(directory / STATUS)
    stored = status.get("settings")
    stored = stored if isinstance(stored, dict) else {}
    settings = {**defaults(), **stored, **dict(known)}
    # A value of another type is an error here, where the page leaves the run out.
    settings["seed"] = int(settings["seed"])
    final, joined = (read_object(directory / name) for name in (CLIENTS, NEWCOMERS))
    summary, clients = dict[str, Any](), dict[str, float]()
    if rows:
        chosen = {"result-protocol": protocol or settings["result-protocol"]}
        tested = str(status.get(TESTED_MODEL) or tested)
        of_run = directory, settings | chosen, rows, tested, final, joined
        summary, clients = run_result(*of_run)
    hidden = facts("always") | {"algorithm", "seed"}
    changed = {
        # The page may be sent to others, who need not know the path.
        name: Path(str(value)).name if name == "data-dir" else value
        for name, value in settings.items()
        if value != defaults().get(name) and name not in hidden
    }
    written = max((time for time, _ in files), default=0)
    about = settings, changed, status, written
    return StoredRun(directory, *about, rows, summary, clients, final)


def compared_runs(folder: Path, protocol: str) -> Methods:
    """Return the runs that the ``summary.json`` of a folder compares.

    Raises `SettingsError` if there are none.
    """
    content = read_object(folder / SUMMARY)
    names, config = content.get("algorithms"), content.get("config")
    # Runs without a `status.json`, which a full disk can prevent, have these settings.
    known = dict(config) if isinstance(config, dict) else {}
    places = {folder_of(seed): {"seed": seed} for seed in content.get("seeds", ())}
    methods = Methods()
    for name, summary in names.items() if isinstance(names, dict) else ():
        tested = str(summary.get(TESTED_MODEL, "")) if isinstance(summary, dict) else ""
        runs = [
            read_run(folder / place / name, protocol, known | seed, tested)
            for place, seed in (places or {"": {}}).items()
        ]
        # A later run of the algorithm may have ended before its first round.
        if all(run.rows for run in runs):
            methods[name] = runs
    allowed = "a folder of results with a summary.json and finished runs"
    require(bool(methods), "compare", str(folder), allowed)
    return methods


def runs_below(folder: Path, protocol: str) -> Methods:
    """Return all runs in a folder, also unfinished ones; deeper folders come last.

    The folder may be half-written or about to be deleted. A damaged run is left out.
    """
    groups = dict[tuple[str, str], list[StoredRun]]()
    for place, folders, files in os.walk(folder):
        # Clients' states are many.
        folders[:] = sorted(name for name in folders if name != "clients")
        if METRICS not in files and STATUS not in files:
            continue
        try:
            run = read_run(Path(place), protocol)
            run = run._replace(connections=_connections(run))
        except Exception as error:
            log(WARNING, "the page does not show %s: %r", place, error)
            continue
        path = Path(place).relative_to(folder).as_posix()
        name = re.sub(r"(^|/)seed-[^/]+/", r"\1", path)
        name = name if name != "." else folder.absolute().name
        # Runs with other settings are not seeds of the same method.
        groups.setdefault((name, repr(run.changed)), []).append(run)
    methods, numbers = Methods(), Counter[str]()
    for name, changed in sorted(groups, key=lambda key: (key[0].count("/"), key)):
        numbers[name] += 1
        number = f" ({numbers[name]})" if numbers[name] > 1 else ""
        methods[name + number] = groups[name, changed]
    return methods


def _connections(run: StoredRun) -> dict[str, dict[str, Any]]:
    """Return the entries of each client's row in the page's table."""
    lost = {
        kind: Counter(n for row in run.rows for n in row.get(f"{kind}-clients", ()))
        for kind in ("rejected", "unanswered")
    }
    entries = {}
    for client in run.status.get("clients", ()):
        name = str(client["client"])
        seen = datetime.fromtimestamp(client.get("last-seen") or 0)
        last = "now" if client.get("node") else f"{seen:%Y-%m-%d %H:%M}"
        counts = {kind: names[name] for kind, names in lost.items()}
        entries[name] = {**client, **counts, "last-seen": last}
    return entries


def counted(runs: Sequence[StoredRun]) -> Sequence[StoredRun]:
    """Return the runs that count: those that have finished, or that have begun."""
    finished = [run for run in runs if run.finished]
    return finished or [run for run in runs if run.rows] or runs
