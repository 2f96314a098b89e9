"""The data of the results page: the methods, curves and clients of a results folder."""

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from itertools import chain
from logging import WARNING
from pathlib import Path
from typing import Any, NamedTuple

from flwr.common import log

from flwr_frl.common.algorithms import title
from flwr_frl.common.messages import NUM_EXAMPLES, NUM_TEST_EXAMPLES, TESTED_MODEL
from flwr_frl.common.settings import Settings, defaults, facts
from flwr_frl.results.figures import curve, looks
from flwr_frl.results.methods import Comparison, MethodResult, over_runs, tested
from flwr_frl.results.results import (
    CLIENTS,
    METRICS,
    NEWCOMERS,
    STATUS,
    Row,
    RunResult,
    is_number,
    read_object,
    read_rows,
    run_result,
    task_title,
    tested_once,
)
from flwr_frl.results.tables import DETAILS, cells, formatted

# The files of a run that the page reads
READ = (METRICS, STATUS, CLIENTS, NEWCOMERS)
# Metrics without curves
COSTS = {"round", "seconds", "bytes-down", "bytes-up", "bytes-evaluate"}
# The most points of a curve.
MOST_POINTS = 200
# Headings of the entries of a client's status. Some only exist for devices.
DATA = {NUM_EXAMPLES: "examples", NUM_TEST_EXAMPLES: "test examples"}
OF_DEVICES = {
    **{"last-seen": "last seen", "last-round": "last round", "updates": "updates"},
    **{"rejected": "rejected", "unanswered": "unanswered"},
    **{"node": "node", "reason": "last problem"},
}


class Run(NamedTuple):
    """A run of a method with one seed.

    Parameters
    ----------
    settings : mapping
        All settings.
    changed : mapping
        The settings that affect results and are not defaults, without the seed.
    status : mapping
        The content of ``status.json``.
    written : int
        When its files were last written, in nanoseconds.
    rows : list of dict
        The rows of the journal.
    result : RunResult
        The result so far; empty before the first round.
    """

    settings: Settings
    changed: Settings
    status: Mapping[str, Any]
    written: int
    rows: list[Row]
    result: RunResult


def read_folder(folder: Path, once: str = "") -> dict[str, Any]:
    """Return the data of the page, as JSON values.

    Parameters
    ----------
    folder : Path
        The results folder. It may be empty, half-written or about to be deleted.
    once : str, default ""
        The methods because of which only the last rounds are compared (`tested_once`).

    Returns
    -------
    dict
        ``folder``, the folder's name; the ``task``, and the ``settings`` of all runs
        that are not defaults; ``table`` and ``clients``, the tables of methods and of
        clients, whose first rows have the headings, and the ``legend`` of the first
        one; and ``methods`` with their curves and clients, the best first. A damaged
        run is left out.
    """
    runs = _runs_in(folder, "last" if once else "")
    counted = {name: _counted(seeds) for name, seeds in runs.items()}
    results = [
        over_runs("", name, [run.result for run in seeds])
        for name, seeds in counted.items()
    ]
    ended = [(r.method, r.summary) for r in results if not _state(counted[r.method])]
    if not once and (methods := tested_once(ended)):
        return read_folder(folder, methods)
    rows = tuple(tested(results, "") if results else ())
    every = sorted(chain(*runs.values()), key=lambda run: run.written)
    changed = [set(run.changed.items()) for run in every] or [set()]
    shared = dict(sorted(set.intersection(*changed)))
    varied = sorted(dict(set.union(*changed)).keys() - shared.keys())
    entries = {
        title(r.method): _entries(runs[r.method], varied) | r.entries for r in rows
    }
    look = looks(runs)
    return {
        # The name only: the page may be sent to others, who need not know the path.
        "folder": folder.absolute().name,
        "task": " and ".join(sorted({task_title(run.settings) for run in every})),
        "settings": _text(shared),
        "table": cells(entries, DETAILS),
        "legend": Comparison(rows, once=once).legend,
        "clients": _clients(rows, every),
        "methods": [
            {"name": title(row.method), "metric": row.metric, "clients": row.clients}
            | dict(zip(("colour", "style"), look[row.method], strict=True))
            | {"curves": _curves(counted[row.method], row.metric)}
            for row in rows
        ],
    }


def _runs_in(folder: Path, protocol: str) -> dict[str, list[Run]]:
    """Return the runs in a folder by method, those of deeper folders last.

    A ``protocol`` takes precedence over those of the runs.
    """
    groups = dict[tuple[str, str], list[Run]]()
    for place, folders, files in os.walk(folder):
        # Clients' states are many.
        folders[:] = sorted(name for name in folders if name != "clients")
        if METRICS not in files and STATUS not in files:
            continue
        try:
            stats = [Path(place, name).stat() for name in READ if name in files]
            times = tuple((each.st_mtime_ns, each.st_size) for each in stats)
            run = _read(Path(place), protocol, times)
        except Exception as error:
            log(WARNING, "the page does not show %s: %r", place, error)
            continue
        path = Path(place).relative_to(folder).as_posix()
        name = re.sub(r"(^|/)seed-[^/]+/", r"\1", path)
        name = name if name != "." else folder.absolute().name
        # Runs with other settings are not seeds of the same method.
        groups.setdefault((name, repr(run.changed)), []).append(run)
    runs, numbers = dict[str, list[Run]](), Counter[str]()
    for name, changed in sorted(groups, key=lambda key: (key[0].count("/"), key)):
        numbers[name] += 1
        number = f" ({numbers[name]})" if numbers[name] > 1 else ""
        runs[name + number] = groups[name, changed]
    return runs


@lru_cache(maxsize=1024)
def _read(place: Path, protocol: str, files: tuple[tuple[int, int], ...]) -> Run:
    """Read a run; it is read again when its ``files`` have another time or size."""
    rows, status = read_rows(place / METRICS), read_object(place / STATUS)
    settings = {**defaults(), **status.get("settings", {})}
    # Values of another type are an error here, where the run is left out.
    settings["seed"] = int(settings["seed"])
    status["left"] = round(status.get("left") or 0)
    result = RunResult(place, settings["seed"], {}, {})
    if rows:
        tested_model = str(status.get(TESTED_MODEL, ""))
        chosen = {"result-protocol": protocol or settings["result-protocol"]}
        result = run_result(place, settings | chosen, rows, tested_model)
    hidden = facts("always") | {"algorithm", "seed"}
    changed = {
        # The page may be sent to others, who need not know the path.
        name: Path(str(value)).name if name == "data-dir" else value
        for name, value in settings.items()
        if value != defaults().get(name) and name not in hidden
    }
    lost = {
        kind: Counter(name for row in rows for name in row.get(f"{kind}-clients", ()))
        for kind in ("rejected", "unanswered")
    }
    for client in status.get("clients", ()):
        client |= {kind: names[client["client"]] for kind, names in lost.items()}
        seen = datetime.fromtimestamp(client.get("last-seen") or 0)
        client["last-seen"] = "now" if client.get("node") else f"{seen:%Y-%m-%d %H:%M}"
    return Run(settings, changed, status, max(time for time, _ in files), rows, result)


def _counted(runs: Sequence[Run]) -> Sequence[Run]:
    """Return the runs that have ended or, before one has, those that have begun."""
    ended = [run for run in runs if run.status.get("state") == "finished"]
    return ended or [run for run in runs if run.rows] or runs


def _curves(runs: Sequence[Run], main: str) -> dict[str, Any]:
    """Return the rounds, means and deviations over seeds of each metric that varies.

    Long curves are thinned; the last round is kept.
    """
    rows = [run.rows for run in runs]
    names = {n for row in rows[0] for n, value in row.items() if is_number(value)}
    found = dict[str, Any]()
    for name in sorted(names - COSTS):
        points = curve(rows, name)
        if len(set(points[1])) > 1 or (points[0] and name in (main, "train-loss")):
            step = len(points[0]) // MOST_POINTS + 1
            found[name] = [values[::-step][::-1] for values in points]
    return found


def _text(settings: Settings) -> str:
    """Return settings as they are written after ``--run-config``."""
    values = {n: json.dumps(v, ensure_ascii=False) for n, v in settings.items()}
    return " ".join(f"{name}={value}" for name, value in values.items())


def _entries(runs: Sequence[Run], varied: Sequence[str]) -> dict[str, str]:
    """Return entries of the table that are not results."""
    known = {**defaults(), **runs[0].changed}
    own = {name: known[name] for name in varied if name in known}
    number = str(len(_counted(runs))) if len(runs) > 1 else ""
    return {"settings": _text(own), "runs": number, "state": _state(runs)}


def _state(runs: Sequence[Run]) -> str:
    """Return the progress of the run that is going on; empty if all have finished."""
    states = {str(run.status.get("state", "")): run for run in runs}
    state = "running" if "running" in states else list(states)[-1]
    run = states[state]
    if state in ("", "finished"):
        return ""
    done, left = run.rows[-1]["round"] if run.rows else 0, run.status["left"]
    text = f", {timedelta(seconds=left)} left" if left else ""
    return f"{state}: round {done} of {run.status.get('rounds')}{text}"


def _clients(results: Sequence[MethodResult], runs: Sequence[Run]) -> list[list[str]]:
    """Return the table of clients; the first row has the headings."""
    rows = defaultdict[str, dict[str, str]](dict)
    for result in results:
        for client, value in result.clients.items():
            rows[client][title(result.method)] = formatted(result.metric, value)
    for run in runs:
        shown = DATA | (OF_DEVICES if run.status.get("devices") else {})
        for client in run.status.get("clients", ()):
            known = {shown[n]: v for n, v in client.items() if n in shown}
            texts = {n: str(v) for n, v in known.items() if v is not None}
            rows[client["client"]] |= texts
    names = (title(result.method) for result in results)
    every = (*names, *DATA.values(), *OF_DEVICES.values())
    headings = [n for n in every if any(row.get(n) for row in rows.values())]
    body = [[c, *(rows[c].get(n, "") for n in headings)] for c in sorted(rows)]
    return [["client", *headings], *body]
