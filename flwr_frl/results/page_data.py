"""The data of the results page: the methods, curves and clients of a results folder."""

import json
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from flwr_frl.common.algorithms import title
from flwr_frl.common.messages import NUM_EXAMPLES, NUM_TEST_EXAMPLES
from flwr_frl.common.settings import Settings
from flwr_frl.results.figures import curve, looks
from flwr_frl.results.methods import MethodResult, compared
from flwr_frl.results.results import task_title
from flwr_frl.results.runs import StoredRun, counted, runs_below
from flwr_frl.results.tables import cells, formatted

# The most points of a curve.
MOST_POINTS = 200
# Headings of the entries of a client's status. Some only exist for devices.
DATA = {NUM_EXAMPLES: "examples", NUM_TEST_EXAMPLES: "test examples"}
OF_DEVICES = {
    **{"last-seen": "last seen", "last-round": "last round", "updates": "updates"},
    **{"rejected": "rejected", "unanswered": "unanswered"},
    **{"node": "node", "reason": "last problem"},
}


def read_folder(folder: Path) -> dict[str, Any]:
    """Return the data of the page, as JSON values.

    Parameters
    ----------
    folder : Path
        The results folder. It may be empty, half-written or about to be deleted.

    Returns
    -------
    dict
        ``folder``, the folder's name; the ``task``, and the ``settings`` of all runs
        that are not defaults; ``table`` and ``clients``, the tables of methods and of
        clients, whose first rows have the headings, and the ``legend`` of the first
        one; and ``methods`` with their curves and clients, the best first.
    """
    comparison = compared(partial(runs_below, folder))
    rows = comparison.rows
    metric = rows[0].metric if rows else ""
    runs = sorted((run for row in rows for run in row.runs), key=lambda r: r.written)
    changed = [set(run.changed.items()) for run in runs]
    shared = set.intersection(*changed) if changed else set()
    differ = sorted({name for each in changed for name, _ in each - shared})
    entries = {}
    for row in rows:
        first = row.runs[0]
        own = {name: first.changed.get(name, first.settings[name]) for name in differ}
        number = str(len(counted(row.runs))) if len(row.runs) > 1 else ""
        about = {"settings": _text(own), "runs": number, "state": _state(row.runs)}
        entries[title(row.method)] = about | row.entries
    look = looks([row.method for row in rows])
    return {
        # The name only: the page may be sent to others, who need not know the path.
        "folder": folder.absolute().name,
        "task": " and ".join(sorted({task_title(run.settings) for run in runs})),
        "settings": _text(dict(sorted(shared))),
        "table": cells(entries),
        "legend": comparison.legend,
        "clients": _clients(rows, runs),
        "methods": [
            {"name": title(row.method), "metric": row.metric, "clients": row.clients}
            | dict(zip(("colour", "style"), look[row.method], strict=True))
            | {"curves": [_curve(row, metric), _curve(row, "train-loss")]}
            for row in rows
        ],
    }


def _curve(row: MethodResult, metric: str) -> list[list[float]]:
    """Return rounds, means and deviations over seeds of a metric.

    Long curves are thinned; the last round is kept.
    """
    points = curve([run.rows for run in counted(row.runs)], metric)
    step = len(points[0]) // MOST_POINTS + 1
    return [list(values[::-step][::-1]) for values in points]


def _text(settings: Settings) -> str:
    """Return settings as they are written after ``--run-config``."""
    values = {n: json.dumps(v, ensure_ascii=False) for n, v in settings.items()}
    return " ".join(f"{name}={value}" for name, value in values.items())


def _state(runs: Sequence[StoredRun]) -> str:
    """Return the progress of an unfinished run; empty if all have finished."""
    for run in runs:
        if not run.finished:
            done = run.rows[-1]["round"] if run.rows else 0
            total = run.settings["num-server-rounds"]
            return f"{run.status['state']}: round {done} of {total}"
    return ""


def _clients(
    results: Sequence[MethodResult], runs: Sequence[StoredRun]
) -> list[list[str]]:
    """Return the table of clients; the first row has the headings."""
    rows = defaultdict[str, dict[str, str]](dict)
    for result in results:
        for client, value in result.clients.items():
            rows[client][title(result.method)] = formatted(result.metric, value)
    for run in runs:
        shown = DATA | (OF_DEVICES if run.status.get("devices") else {})
        for name, entries in run.connections.items():
            known = {shown[n]: v for n, v in entries.items() if n in shown}
            rows[name] |= {n: str(v) for n, v in known.items() if v is not None}
    names = (title(result.method) for result in results)
    every = (*names, *DATA.values(), *OF_DEVICES.values())
    headings = [n for n in every if any(row.get(n) for row in rows.values())]
    body = [[c, *(rows[c].get(n, "") for n in headings)] for c in sorted(rows)]
    return [["client", *headings], *body]
