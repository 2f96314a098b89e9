"""What a run has written: rows of rounds, and the summary that follows from them."""

import json
import math
from collections import Counter
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flwr_frl.strategies.algorithms import short_name
from flwr_frl.task.files import write_atomically
from flwr_frl.task.messages import EXAMPLE_EPSILON
from flwr_frl.task.settings import Settings

Row = dict[str, Any]

METRICS, TIDY, CLIENTS, SUMMARY, PLOT, STATUS, PAGE = (
    "metrics.jsonl",
    "metrics.csv",
    "clients.json",
    "summary.json",
    "accuracy.png",
    "status.json",
    "report.html",
)
# How good a model is, if it is said: the first of these.
QUALITY = ("accuracy", "distance", "error", "loss-point", "loss")
# What clients' final metrics have besides; all else is a metric of the task's own.
BESIDE = (
    *("num-examples", "num-test-examples", "last-round", "evaluated-in"),
    *("global-nc2", "local-nc2"),
    *("error-best", "error-phase-1", "error-scratch", "iterations"),
    "class-counts",
    EXAMPLE_EPSILON,
)
# Metrics of which a run's result has the mean.
SUMMARIZED = (
    "accuracy",
    "accuracy-weighted",
    "accuracy-global",
    "loss",
    "loss-weighted",
    "distance",
    "error",
    "consensus-distance",
    "loss-point",
    "constraint",
)
# What a round always has.
OF_EACH_ROUND = ("seconds", "bytes-down", "bytes-up")
# Metrics of which it has the last.
LATEST = ("seconds-simulated", "epsilon", "delta", "consensus-step")


def quality(names: Container[str]) -> str:
    """Return by which metric a run is shown, of those that it has."""
    return next((name for name in QUALITY if name in names), "accuracy")


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a ``metrics.jsonl``; none where there is no file.

    What follows a line that is damaged, as one that was cut off by a crash, is left
    out.
    """
    rows: list[Row] = []
    if path.is_file():
        for line in path.read_bytes().splitlines():
            try:
                row = parse_json(line)
            except ValueError:
                break
            if not isinstance(row, dict) or not isinstance(row.get("round"), int):
                break
            rows.append(row)
    return rows


def is_whole(row: Row) -> bool:
    """Return whether a row has the numbers that every round has."""
    return all(isinstance(row.get(name), int | float) for name in OF_EACH_ROUND)


def is_written(path: Path, summaries: Mapping[str, Any]) -> bool:
    """Return whether a file has all these summaries, as the disk may not take them.

    It is ``summary.json`` or ``tune.json``.
    """
    try:
        whole = read_json(path)
        there = whole.get("algorithms") or {n: own["test"] for n, own in whole.items()}
        same = {name: there[name] for name in summaries}
        return bool(same == json.loads(strict_json(summaries)))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def read_summary(settings: Settings, rounds: int) -> dict[str, Any] | None:
    """Return the algorithm's part of the ``summary.json`` of a run of so many rounds.

    None if it is not there.
    """
    path = Path(str(settings["output"])) / SUMMARY
    try:
        whole = read_json(path)
        summary: dict[str, Any] = whole["algorithms"][
            short_name(str(settings["algorithm"]))
        ]
        return summary if summary["rounds"] == rounds else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def summarize(
    rows: list[Row],
    clients: Mapping[str, Mapping[str, Any]],
    last: int,
    means: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return a run's result: means over its ``last`` rounds, never the best round.

    It has ``accuracy`` and other metrics of the evaluation, the task's own as well,
    ``accuracy-std-clients`` from ``clients``, each one's final metrics, ``rounds``,
    ``seconds``, ``bytes``, ``bits`` of gossip's messages, and the largest
    ``example-epsilon`` of a client. From ``means``, each
    client's mean accuracy over the ``last`` rounds, come ``accuracy-worst-decile`` and
    ``accuracy-best-decile``: means of the worst and the best tenth of the clients,
    rounded up.
    """
    summary: dict[str, Any] = {}
    final = [row for row in rows if row["round"] > rows[-1]["round"] - last]
    own = {name for metrics in clients.values() for name in metrics}
    for name in (*SUMMARIZED, *sorted(own.difference(SUMMARIZED, BESIDE))):
        # A row also has lists, which one client may have called a metric of its own.
        values = [row[name] for row in final if isinstance(row.get(name), int | float)]
        if values:
            summary[name] = float(np.mean(values))
    accuracies = [c["accuracy"] for c in clients.values() if "accuracy" in c]
    if accuracies:
        summary["accuracy-std-clients"] = float(np.std(accuracies))
    if spent := [c[EXAMPLE_EPSILON] for c in clients.values() if EXAMPLE_EPSILON in c]:
        summary[EXAMPLE_EPSILON] = max(spent)
    if means:
        tenth, ranked = math.ceil(len(means) / 10), np.sort(list(means.values()))
        summary["accuracy-worst-decile"] = float(np.mean(ranked[:tenth]))
        summary["accuracy-best-decile"] = float(np.mean(ranked[-tenth:]))
    bits = [row["bits"] for row in rows if "bits" in row]
    if bits:
        summary["bits"] = sum(bits)
    return summary | {
        "rounds": rows[-1]["round"],
        "seconds": rows[-1]["seconds"],
        **{n: rows[-1][n] for n in LATEST if n in rows[-1]},
        "bytes": sum(row["bytes-down"] + row["bytes-up"] for row in rows),
    }


def gaps(clients: Mapping[str, Mapping[str, Any]], asked: str = "") -> list[str]:
    """Return metrics that not all tested clients have, each with how many have it.

    ``asked`` is the setting ``metrics``: of what it names perhaps none has a value.
    """
    tested = [metrics for metrics in clients.values() if "loss" in metrics]
    counts = Counter(name for metrics in tested for name in metrics)
    named = {path.strip().rpartition(":")[2] for path in asked.split(",")} - {""}
    own = sorted((counts.keys() | named) - {*SUMMARIZED, *BESIDE})
    return [f"{n!r} ({counts[n]})" for n in own if counts[n] < len(tested)]


def read_json(path: Path) -> Any:
    """Return what a JSON file has; raises `ValueError` like `parse_json`."""
    return parse_json(path.read_text(encoding="utf-8"))


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises
    ------
    ValueError
        If it is not JSON, or is nested too deeply to be read.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("JSON is nested too deeply") from error


def write_json(path: Path, value: object) -> None:
    """Write a value as JSON, wholly or not at all."""
    write_atomically(path, (strict_json(value, indent=2) + "\n").encode())


def strict_json(value: object, indent: int | None = None) -> str:
    """Return a value as JSON that every reader understands: no NaN, no infinity."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    """Return a value with null for every number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(entry) for name, entry in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value
