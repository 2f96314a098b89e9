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
from flwr_frl.results.results import (
    METRICS,
    PAGE,
    PLOT,
    Row,
    quality,
    read_rows,
)

# The simulated time of a run so far.
CLOCK = "seconds-simulated"
# Metrics with a logarithmic axis.
ERRORS = ("distance", "error", "loss")
# The opacity of a standard deviation.
SHADE = 0.2
# The most labels in a legend inside the axes, and the columns of one below them.
INSIDE, COLUMNS = 6, 6
# Line styles. Each is used with all colours before the next one is.
STYLES = ("-", "--", ":", "-.")


def drawable() -> bool:
    """Return True if matplotlib is installed."""
    return find_spec("matplotlib") is not None


def plot(
    output: Path,
    algorithms: list[str],
    folders: Sequence[Path] = (),
    evaluated_on: str = "test",
) -> None:
    """Plot accuracy (or error) and training loss by round in ``accuracy.png``.

    Runs with a simulated time are plotted by it as well. Without matplotlib, nothing is
    plotted.

    Parameters
    ----------
    output : Path
        The folder of the plot.
    algorithms : list of str
        The algorithms to plot.
    folders : sequence of Path
        The folders of several seeds, of which the mean and one standard deviation to
        either side are plotted. By default the runs are in ``output``.
    evaluated_on : {"test", "validation"}, default "test"
        The examples on which accuracies were measured.
    """
    if not drawable():
        text = "no %s: matplotlib is missing (pip install 'flwr-frl[plot]'); see %s"
        log(INFO, text, PLOT, PAGE)
        return
    places = folders or (output,)
    runs = {
        name: [read_rows(place / name / METRICS) for place in places]
        for name in algorithms
    }
    present = {n for seeds in runs.values() for rows in seeds for r in rows for n in r}
    measure = quality(present)
    panels = [(measure, False), ("train-loss", False)]
    if CLOCK in present:
        panels.append((measure, True))
    figure = new_figure(13 if CLOCK in present else 9, len(panels))
    left, right, *_ = figure.axes
    for axes, (metric, by_clock) in zip(figure.axes, panels, strict=True):
        for i, (name, seeds) in enumerate(runs.items()):
            _draw(axes, name, seeds, metric, line_style(i), by_clock)
        axes.set_ylabel(metric)
        if by_clock:
            axes.set(xlabel="simulated time", xscale="log")
            axes.sharey(left)
        else:
            axes.set_xlabel("round")
            axes.xaxis.get_major_locator().set_params(integer=True)
    right.set_ylabel("training loss")
    if measure == "accuracy":
        label = "validation accuracy" if evaluated_on == "validation" else "accuracy"
        left.set_ylabel(f"{label}, mean over clients")
        left.yaxis.set_major_formatter("{x:.0%}")
    elif measure in ERRORS and all(np.min(line.get_ydata()) > 0 for line in left.lines):
        left.set_yscale("log")
    if len(places) > 1:
        figure.suptitle(f"mean ± standard deviation over {len(places)} seeds", size=9)
    save_figure(figure, output / PLOT)


def new_figure(width: float, panels: int) -> Any:
    """Return a figure with panels beside each other."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes in np.ravel(figure.subplots(1, panels)):
        axes.grid(alpha=0.3)
    return figure


def save_figure(figure: Any, path: Path) -> None:
    """Save a figure with a legend as a PNG file, atomically.

    A long legend stands below the panels and increases the figure's height.
    """
    # An algorithm may appear in one of the panels only.
    lines = {
        label: line
        for axes in figure.axes
        for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if len(lines) > INSIDE:
        rows = -(-len(lines) // COLUMNS)
        figure.set_figheight(figure.get_figheight() + 0.2 + 0.18 * rows)
        look = {"ncols": COLUMNS, "fontsize": 8, "frameon": False}
        place = "outside lower center"
        figure.legend([*lines.values()], [*lines], loc=place, **look)
    elif lines:
        figure.axes[0].legend([*lines.values()], [*lines])
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=150)
    write_atomically(path, image.getvalue())


def line_style(i: int) -> dict[str, Any]:
    """Return the style of line ``i``; the first forty differ."""
    return {"color": f"C{i % 10}", "linestyle": STYLES[i // 10 % len(STYLES)]}


def _draw(
    axes: Any,
    name: str,
    runs: list[list[Row]],
    metric: str,
    style: dict[str, Any],
    by_clock: bool,
) -> None:
    """Plot the mean over some runs, with a band of one standard deviation.

    It is plotted by round, or by the mean simulated time of each round.
    """
    rounds, means, deviations = curve(runs, metric)
    across: list[float] = [*rounds]
    if by_clock:
        times = dict(zip(*curve(runs, CLOCK)[:2], strict=True))
        across = [times[n] for n in rounds if n in times]
    if not rounds or len(across) < len(rounds):
        return
    (line,) = axes.plot(across, means, label=name, marker=".", ms=3, **style)
    if len(runs) > 1:
        low, high = np.subtract(means, deviations), np.add(means, deviations)
        axes.fill_between(across, low, high, color=line.get_color(), alpha=SHADE, lw=0)


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
