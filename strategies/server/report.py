"""What a run shows and writes: progress, metrics of each round, summary and plot."""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from task.files import write_atomically
from task.settings import Settings, SettingsError

Row = dict[str, Any]

METRICS, CLIENTS, SUMMARY, PLOT = (
    "metrics.jsonl",
    "clients.json",
    "summary.json",
    "accuracy.png",
)
# Metrics of which a run's result has the mean.
SUMMARIZED = (
    "accuracy",
    "accuracy-global",
    "loss",
    "distance",
    "error",
    "consensus-distance",
    "loss-point",
    "constraint",
)
# Settings in which the algorithms of one summary may differ.
OWN = ("algorithm", "resume")


class Report:
    """Writes one run of one algorithm to ``output/<algorithm>``.

    Parameters
    ----------
    settings : mapping
        All settings.
    after : int, default 0
        Keep the rows of the rounds up to this one, from the run that is continued.
    """

    def __init__(self, settings: Settings, after: int = 0) -> None:
        self.settings = settings
        self.output = Path(str(settings["output"]))
        self.algorithm = str(settings["algorithm"])
        self.directory = self.output / self.algorithm
        self.directory.mkdir(parents=True, exist_ok=True)
        self.rows = [
            row for row in read_rows(self.directory / METRICS) if row["round"] <= after
        ]
        self._write_rows()
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[state]}"),
        )
        self._bar = self.progress.add_task(
            self.algorithm,
            total=int(settings["num-server-rounds"]),
            completed=after,
            state="",
        )

    def _write_rows(self) -> None:
        text = "".join(json.dumps(row) + "\n" for row in self.rows)
        write_atomically(self.directory / METRICS, text.encode())

    def add(self, row: Row) -> None:
        """Append one round's metrics, durably, and move the progress bar.

        Parameters
        ----------
        row : dict
            ``round`` and the round's metrics.
        """
        self.rows.append(row)
        with (self.directory / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        state = f"loss {row['train-loss']:.3f}" if "train-loss" in row else ""
        for name in ("accuracy", "distance", "error", "loss-point"):
            if value := self.latest(name):
                state += f"  {name} {value:.3f}"
        self.progress.update(self._bar, completed=row["round"], state=state)

    def latest(self, name: str) -> float | None:
        """Return the newest value of a metric.

        Parameters
        ----------
        name : str
            The metric.

        Returns
        -------
        float or None
            None if it was never measured.
        """
        return next((row[name] for row in reversed(self.rows) if name in row), None)

    def finish(self, clients: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Write ``clients.json``, this part of ``summary.json``, and the plot.

        Parameters
        ----------
        clients : mapping
            Each client's final metrics.

        Returns
        -------
        dict
            The algorithm's part of the summary.
        """
        _write_json(self.directory / CLIENTS, clients)
        summary = summarize(self.rows, clients, int(self.settings["evaluate-last"]))
        config = {n: v for n, v in self.settings.items() if n not in OWN}
        path = self.output / SUMMARY
        whole: dict[str, Any] = {"algorithms": {}, "config": config}
        with contextlib.suppress(OSError, ValueError, AttributeError):
            former = json.loads(path.read_text(encoding="utf-8"))
            if former.get("config") == config and "algorithms" in former:
                whole = former
        whole["algorithms"][self.algorithm] = summary
        _write_json(path, whole)
        plot(self.output, list(whole["algorithms"]))
        return summary


def read_summary(settings: Settings) -> dict[str, Any]:
    """Return what a run that has ended has written into ``summary.json``.

    Parameters
    ----------
    settings : mapping
        All settings.

    Returns
    -------
    dict
        The algorithm's part of the summary.

    Raises
    ------
    SettingsError
        If it is not there.
    """
    path = Path(str(settings["output"])) / SUMMARY
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        summary: dict[str, Any] = whole["algorithms"][str(settings["algorithm"])]
    except (OSError, ValueError, LookupError, TypeError):
        raise SettingsError(
            f"resume: the run has ended, and {str(path)!r} has no summary of it; "
            "num-server-rounds must be more to go on"
        ) from None
    return summary


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a ``metrics.jsonl``.

    Parameters
    ----------
    path : Path
        The file.

    Returns
    -------
    list of dict
        One a round; a last line that was cut off by a crash is left out.
    """
    rows = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
    return rows


def summarize(
    rows: list[Row], clients: Mapping[str, Mapping[str, Any]], last: int
) -> dict[str, Any]:
    """Return a run's result: means over its last rounds, never the best round.

    Parameters
    ----------
    rows : list of dict
        The rounds' metrics.
    clients : mapping
        Each client's final metrics.
    last : int
        How many rounds at the end the result is the mean of.

    Returns
    -------
    dict
        ``accuracy`` (and other metrics of the evaluation), ``accuracy-std-clients``,
        ``rounds``, ``seconds``, ``bytes``, and ``bits`` of gossip's messages.
    """
    summary: dict[str, Any] = {}
    final = [row for row in rows if row["round"] > rows[-1]["round"] - last]
    for name in SUMMARIZED:
        values = [row[name] for row in final if name in row]
        if values:
            summary[name] = float(np.mean(values))
    accuracies = [c["accuracy"] for c in clients.values() if "accuracy" in c]
    if accuracies:
        summary["accuracy-std-clients"] = float(np.std(accuracies))
    bits = [row["bits"] for row in rows if "bits" in row]
    if bits:
        summary["bits"] = sum(bits)
    return summary | {
        "rounds": rows[-1]["round"],
        "seconds": rows[-1]["seconds"],
        **{n: rows[-1][n] for n in ("seconds-simulated",) if n in rows[-1]},
        "bytes": sum(row["bytes-down"] + row["bytes-up"] for row in rows),
    }


def plot(output: Path, algorithms: list[str]) -> None:
    """Draw ``accuracy.png``: quality and training loss of each algorithm by round.

    Parameters
    ----------
    output : Path
        Directory of the runs.
    algorithms : list of str
        Which runs.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = {name: read_rows(output / name / METRICS) for name in algorithms}
    quality = next(
        (
            name
            for name in ("accuracy", "distance", "error", "loss-point")
            if any(name in row for rows in runs.values() for row in rows)
        ),
        "accuracy",
    )
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for axes, metric in ((left, quality), (right, "train-loss")):
        for name, rows in runs.items():
            points = [(row["round"], row[metric]) for row in rows if metric in row]
            if points:
                axes.plot(*zip(*points, strict=True), label=name, marker=".", ms=3)
        axes.set_xlabel("round")
        axes.grid(alpha=0.3)
    left.set_ylabel("accuracy, mean over clients" if quality == "accuracy" else quality)
    right.set_ylabel("training loss")
    if quality == "accuracy":
        left.yaxis.set_major_formatter("{x:.0%}")
    elif quality != "loss-point":
        left.set_yscale("log")
    handles, labels = right.get_legend_handles_labels()
    if handles:
        left.legend(handles, labels)
    figure.savefig(output / PLOT, dpi=150)


def _write_json(path: Path, value: object) -> None:
    write_atomically(path, (json.dumps(value, indent=2) + "\n").encode())
