"""The plot of compared algorithms."""

import io
from collections.abc import Sequence
from importlib.util import find_spec
from logging import INFO
from pathlib import Path
from typing import Any

import numpy as np
from flwr.common import log

from flwr_frl.common.files import write_atomically
from flwr_frl.results.results import METRICS, PAGE, PLOT, Row, quality, read_rows

# The simulated time of a run so far.
CLOCK = "seconds-simulated"
# Metrics with a logarithmic axis.
ERRORS = ("distance", "error", "loss")
# Line styles. Each is used with all ten colours before the next one is.
STYLES = ("-", "--", ":", "-.")


def plot(output: Path, algorithms: Sequence[str], folders: Sequence[Path]) -> None:
    """Plot accuracy (or error) and training loss by round in ``accuracy.png``.

    Runs with a simulated time are plotted by it as well. Without matplotlib, nothing is
    plotted.

    Parameters
    ----------
    output : Path
        The folder of the plot.
    algorithms : sequence of str
        The algorithms to plot.
    folders : sequence of Path
        The folders that contain a run of each algorithm; of several seeds, the mean and
        one standard deviation to either side are plotted.
    """
    if find_spec("matplotlib") is None:
        text = "no %s: matplotlib is missing (pip install 'flwr-frl[plot]'); see %s"
        log(INFO, text, PLOT, PAGE)
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = {
        name: [read_rows(folder / name / METRICS) for folder in folders]
        for name in algorithms
    }
    present = {n for seeds in runs.values() for rows in seeds for r in rows for n in r}
    measure = quality(present)
    panels = [(measure, "round"), ("train-loss", "round")]
    if CLOCK in present:
        panels.append((measure, CLOCK))
    figure = Figure(figsize=(4.5 * len(panels) + 1.5, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    lines: dict[str, Any] = {}
    for axes, (metric, across) in zip(
        figure.subplots(1, len(panels)), panels, strict=True
    ):
        for i, (name, seeds) in enumerate(runs.items()):
            style = {"color": f"C{i % 10}", "ls": STYLES[i // 10 % len(STYLES)]}
            if line := _draw(axes, seeds, metric, across, style):
                lines[name] = line
        axes.set_ylabel(metric)
        axes.grid(alpha=0.3)
        if metric == "accuracy":
            axes.yaxis.set_major_formatter("{x:.0%}")
        elif metric in ERRORS and all(min(x.get_ydata()) > 0 for x in axes.lines):
            axes.set_yscale("log")
        if across == CLOCK:
            axes.set(xlabel="simulated time", xscale="log")
        else:
            axes.set_xlabel(across)
            axes.xaxis.get_major_locator().set_params(integer=True)
    if lines:
        figure.legend(
            [*lines.values()], [*lines], loc="outside right upper", fontsize=8
        )
    if len(folders) > 1:
        figure.suptitle(f"mean ± standard deviation over {len(folders)} seeds", size=9)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=150)
    write_atomically(output / PLOT, image.getvalue())


def _draw(
    axes: Any, runs: list[list[Row]], metric: str, across: str, style: dict[str, str]
) -> Any:
    """Plot the mean over some runs, with a band of one standard deviation.

    It is plotted by round, or by the mean simulated time of each round. Returns the
    line, or None if there is none.
    """
    rounds, means, deviations = curve(runs, metric)
    times = dict(zip(*curve(runs, across)[:2], strict=True))
    if not rounds or not times.keys() >= set(rounds):
        return None
    at = [times[n] for n in rounds]
    (line,) = axes.plot(at, means, marker=".", ms=3, **style)
    if len(runs) > 1:
        low, high = np.subtract(means, deviations), np.add(means, deviations)
        axes.fill_between(at, low, high, color=line.get_color(), alpha=0.2, lw=0)
    return line


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
