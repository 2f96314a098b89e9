"""The files that compare the runs of a folder: summary, tables and plot.

All but the summary follow from the journals. ``metrics.csv`` has one line per round,
client and metric, in long ("tidy") format.
"""

import csv
import io
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from logging import INFO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.common import log

from flwr_frl.common.algorithms import title
from flwr_frl.common.files import atomic_file, write_atomically
from flwr_frl.common.messages import CLASS_COUNTS
from flwr_frl.common.settings import Settings, facts
from flwr_frl.results.looks import looks
from flwr_frl.results.results import (
    CLIENT_METRICS,
    CLIENTS,
    METRICS,
    METRICS_CSV,
    PAGE,
    PLOT,
    SUMMARY,
    Row,
    is_number,
    log_os_errors,
    quality,
    read_journal,
    read_object,
    read_rows,
    write_json,
)
from flwr_frl.results.tables import Summaries, cells, legend, markdown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Settings of a single run, which the summary's ``config`` leaves out.
PER_RUN = ("algorithm", "resume", "page", "tracker", "tracker-uri")
MARKDOWN = "table.md"
CSV_COLUMNS = (
    *("algorithm", "seed", "evaluated-on"),
    *("round", "client", "metric", "value"),
)
# The round of lines about a client's data, which belong to no round.
NO_ROUND = 0
# The folder of each run, by algorithm and seed.
Runs = Mapping[tuple[str, Any], Path]
# The simulated time of a run so far.
CLOCK = "seconds-simulated"
# Metrics with a logarithmic axis.
ERRORS = ("distance", "error", "loss")


def read_comparable(settings: Settings) -> dict[str, Any]:
    """Read the ``summary.json`` that a run with these settings joins.

    Returns a summary without algorithms if the file is missing or damaged, if its runs
    had other settings, or if it is over several seeds.
    """
    config = {name: value for name, value in settings.items() if name not in PER_RUN}
    content = read_object(Path(str(settings["output"])) / SUMMARY)
    former = content.get("config"), content.get("algorithms")
    single = "seeds" not in content and all(isinstance(p, dict) for p in former)
    if single and _comparable(content["config"]) == _comparable(config):
        return content
    return {"algorithms": {}, "config": config}


def _comparable(config: Settings) -> dict[str, Any]:
    return {name: v for name, v in config.items() if name not in facts("always")}


def folder_of(seed: object) -> str:
    """Return the name of the folder with the runs of one of several seeds."""
    return f"seed-{seed}"


def write_comparison(output: Path, summary: Mapping[str, Any]) -> set[str]:
    """Write the summary, ``metrics.csv``, tables and plots of an output folder.

    A file that cannot be written is logged, and the others are written nevertheless.

    Parameters
    ----------
    output : Path
        The output folder.
    summary : mapping
        The content of ``summary.json``.

    Returns
    -------
    set of str
        The files that could not be written.
    """
    lost = set[str]()
    summaries, config = summary["algorithms"], summary["config"]
    evaluated_on = str(config["evaluate-on"])
    folders = {config["seed"]: output}
    if "seeds" in summary:
        folders = {seed: output / folder_of(seed) for seed in summary["seeds"]}
    runs = {
        (n, seed): folder / n for seed, folder in folders.items() for n in summaries
    }
    writers: dict[str, Callable[[], object]] = {
        SUMMARY: lambda: write_json(output / SUMMARY, summary),
        METRICS_CSV: lambda: write_csv(output / METRICS_CSV, runs, evaluated_on),
        "tables": lambda: write_tables(output, summaries, evaluated_on),
        PLOT: lambda: plot(output, runs),
    }
    for name, write in writers.items():
        with log_os_errors(name, lost):
            write()
    return lost


def write_tables(output: Path, summaries: Summaries, evaluated_on: str) -> None:
    """Write ``table.md``."""
    table = markdown(cells(summaries, evaluated_on))
    text = f"{table}\n{legend(summaries, evaluated_on)}\n"
    write_atomically(output / MARKDOWN, text.encode())


def write_csv(path: Path, runs: Runs, evaluated_on: str) -> None:
    """Write ``metrics.csv`` from the journals and ``clients.json`` of some runs.

    Parameters
    ----------
    path : Path
        The file.
    runs : mapping
        The folder of each run, by algorithm and seed.
    evaluated_on : str
        The examples on which accuracies and losses were measured.
    """
    with atomic_file(path, durable=False) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(CSV_COLUMNS)
        for run, directory in runs.items():
            for server_round, client, metrics in _metrics_in(directory):
                place = (*run, evaluated_on, server_round, client)
                for name, value in metrics.items():
                    if is_number(value) and name != "round":
                        writer.writerow((*place, name, value))
        text.detach()


def _metrics_in(directory: Path) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    """Yield round, client and metrics; metrics of the run follow those of clients."""
    for row in read_journal(directory / METRICS):
        for client, metrics in row.get(CLIENT_METRICS, {}).items():
            yield row["round"], client, metrics
        yield row["round"], "", row
    for client, entry in read_object(directory / CLIENTS).items():
        sizes = ("num-examples", "num-test-examples")
        counts = entry.get(CLASS_COUNTS, {}).items()
        yield NO_ROUND, client, {name: entry.get(name) for name in sizes}
        yield NO_ROUND, client, {f"class-count:{name}": n for name, n in counts}


def plot(output: Path, runs: Runs) -> None:
    """Write `figure_of` some runs to ``accuracy.png``; without matplotlib, nothing.

    Parameters
    ----------
    output : Path
        The folder of the plot.
    runs : mapping
        The folder of each run, by algorithm and seed.
    """
    if find_spec("matplotlib") is None:
        text = "no %s: matplotlib is missing (pip install 'flwr-frl[plot]'); see %s"
        log(INFO, text, PLOT, PAGE)
        return
    rows = dict[str, list[list[Row]]]()
    for (algorithm, _), directory in runs.items():
        rows.setdefault(algorithm, []).append(read_rows(directory / METRICS))
    image = io.BytesIO()
    figure_of(rows).savefig(image, format="png", dpi=150)
    write_atomically(output / PLOT, image.getvalue())


def figure_of(rows: Mapping[str, list[list[Row]]], width: float = 0) -> "Figure":
    """Return a figure of accuracy (or error) and training loss by round.

    Runs with a simulated time are plotted by it as well. Of several seeds, the mean and
    one standard deviation to either side are plotted.

    Parameters
    ----------
    rows : mapping
        The rows of each seed, by algorithm.
    width : float, default 0
        Width in inches of a figure of accuracy (or error) alone; 0 draws all.
    """
    from matplotlib.figure import Figure

    present = {
        n for seeds in rows.values() for run in seeds for row in run for n in row
    }
    measure = quality(present)
    panels = [(measure, "round"), ("train-loss", "round")]
    if CLOCK in present:
        panels.append((measure, CLOCK))
    look = looks(rows)
    panels, size = panels[:1] if width else panels, 7 if width else 8
    figsize = (width, 0.8 * width) if width else (4.5 * len(panels) + 1.5, 3.6)
    figure = Figure(figsize=figsize, layout="constrained")
    every = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (metric, across) in zip(every, panels, strict=True):
        for name, seeds in rows.items():
            rounds, means, deviations = curve(seeds, metric)
            times = dict(zip(*curve(seeds, across)[:2], strict=True))
            if not rounds or not times.keys() >= set(rounds):
                continue
            at, (colour, style) = [times[n] for n in rounds], look[name]
            line = {"ls": style, "marker": ".", "ms": 3, "label": title(name)}
            axes.plot(at, means, colour, lw=1 if width else 1.5, **line)
            if len(seeds) > 1:
                low, high = np.subtract(means, deviations), np.add(means, deviations)
                axes.fill_between(at, low, high, color=colour, alpha=0.2, lw=0)
        axes.set_xlabel(across, size=size + 1)
        axes.set_ylabel(metric, size=size + 1)
        axes.tick_params(labelsize=size)
        axes.grid(alpha=0.3)
        if metric == "accuracy":
            axes.set_ylim(0, 1)
            axes.yaxis.set_major_formatter("{x:.0%}")
        elif metric in ERRORS and all(min(x.get_ydata()) > 0 for x in axes.lines):
            axes.set_yscale("log")
        if across == CLOCK:
            axes.set(xlabel="simulated time", xscale="log")
    if lines := {line.get_label(): line for axes in every for line in axes.lines}:
        below = {"loc": "outside lower center", "ncols": 3, "frameon": False}
        place = below if width else {"loc": "outside right upper"}
        figure.legend(lines.values(), lines, fontsize=size, **place)
    return figure


def curve(
    runs: list[list[Row]], metric: str
) -> tuple[list[int], list[float], list[float]]:
    """Return the mean and deviation of a metric over runs, by round.

    Parameters
    ----------
    runs : list of list of dict
        The rows of each run.
    metric : str
        The metric.

    Returns
    -------
    rounds, means, deviations
        The rounds in which all runs have a value, with the mean and the sample standard
        deviation (n - 1), which is 0 for a single run.
    """
    values = [
        {row["round"]: row[metric] for row in rows if row.get(metric) is not None}
        for rows in runs
    ]
    rounds = sorted(set.intersection(*map(set, values)))
    table = np.array([[run[r] for r in rounds] for run in values])
    spread = table.std(0, ddof=1) if len(runs) > 1 else np.zeros(len(rounds))
    return rounds, table.mean(0).tolist(), spread.tolist()
