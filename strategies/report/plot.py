"""The plot of a comparison."""

import io
from collections.abc import Sequence
from importlib.util import find_spec
from logging import INFO
from pathlib import Path
from typing import Any

import numpy as np
from flwr.common import log

from flwr_frl.strategies.report.results import (
    METRICS,
    PAGE,
    PLOT,
    Row,
    quality,
    read_rows,
)
from flwr_frl.task.files import write_atomically

# Draws better the lower it is, and over orders of magnitude.
ERRORS = ("distance", "error", "loss")
SHADE = 0.2
# More labels than these stand below the curves, in columns.
INSIDE, COLUMNS = 6, 6
# Of lines whose colours have been used.
STYLES = ("-", "--", ":", "-.")


def drawable() -> bool:
    """Return whether there is anything to draw with."""
    return find_spec("matplotlib") is not None


def plot(
    output: Path,
    algorithms: list[str],
    folders: Sequence[Path] = (),
    evaluated_on: str = "test",
) -> None:
    """Draw ``accuracy.png``: quality and training loss of each algorithm by round.

    Where matplotlib is missing, as on a lean server, there is none.

    Parameters
    ----------
    output : Path
        Where it goes.
    algorithms : list of str
        Whose.
    folders : sequence of Path
        Folders of several seeds: a line is the mean over them, its band a standard
        deviation to either side. By default the one run is in ``output``.
    evaluated_on : {"test", "validation"}
        What the accuracies are of.
    """
    if not drawable():
        text = "no %s without matplotlib (pip install 'flwr-frl[plot]'); %s has curves"
        log(INFO, text, PLOT, PAGE)
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    places = folders or (output,)
    runs = {
        name: [read_rows(place / name / METRICS) for place in places]
        for name in algorithms
    }
    measure = quality(
        {name for own in runs.values() for rows in own for row in rows for name in row}
    )
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for axes, metric in ((left, measure), (right, "train-loss")):
        for i, (name, own) in enumerate(runs.items()):
            _draw(axes, name, own, metric, line_style(i))
        axes.set_xlabel("round")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    left.set_ylabel(measure)
    right.set_ylabel("training loss")
    if measure == "accuracy":
        what = "validation accuracy" if evaluated_on == "validation" else "accuracy"
        left.set_ylabel(f"{what}, mean over clients")
        left.yaxis.set_major_formatter("{x:.0%}")
    elif measure in ERRORS:
        left.set_yscale("log")
    if len(places) > 1:
        figure.suptitle(f"mean ± standard deviation over {len(places)} seeds", size=9)
    # An algorithm may have one of the two alone.
    drawn: dict[str, Any] = {}
    for axes in (left, right):
        handles, labels = axes.get_legend_handles_labels()
        drawn |= dict(zip(labels, handles, strict=True))
    labels = [name for name in algorithms if name in drawn]
    handles = [drawn[name] for name in labels]
    if len(labels) > INSIDE:
        legend_below(figure, handles, labels)
    elif labels:
        left.legend(handles, labels)
    save_figure(figure, output / PLOT)


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure as a PNG file, wholly or not at all."""
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=150)
    write_atomically(path, image.getvalue())


def line_style(i: int) -> dict[str, Any]:
    """Return how line i is drawn: no two of the first forty are alike."""
    return {"color": f"C{i % 10}", "linestyle": STYLES[i // 10 % len(STYLES)]}


def legend_below(figure: Any, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Make a figure higher by a legend of many labels."""
    rows = -(-len(labels) // COLUMNS)
    figure.set_figheight(figure.get_figheight() + 0.2 + 0.18 * rows)
    place = "outside lower center"
    figure.legend(handles, labels, loc=place, ncols=COLUMNS, fontsize=8, frameon=False)


def _draw(
    axes: Any, name: str, runs: list[list[Row]], metric: str, style: dict[str, Any]
) -> None:
    """Draw the mean of some runs' metric by round, with a band of their deviation."""
    rounds, means, deviations = curve(runs, metric)
    if not rounds:
        return
    (line,) = axes.plot(rounds, means, label=name, marker=".", ms=3, **style)
    if len(runs) > 1:
        low, high = np.subtract(means, deviations), np.add(means, deviations)
        axes.fill_between(rounds, low, high, color=line.get_color(), alpha=SHADE, lw=0)


def curve(
    runs: list[list[Row]], metric: str
) -> tuple[list[int], list[float], list[float]]:
    """Return rounds, and the means and deviations of a metric over runs.

    Rounds are those in which all runs have measured it; the standard deviation is that
    of a sample (n − 1), and 0 for one run.
    """
    values = [
        {row["round"]: row[metric] for row in rows if row.get(metric) is not None}
        for rows in runs
    ]
    rounds = sorted(set.intersection(*map(set, values)))
    table = np.array([[own[r] for r in rounds] for own in values])
    spread = table.std(0, ddof=1) if len(runs) > 1 else np.zeros(len(rounds))
    return rounds, table.mean(0).tolist(), spread.tolist()
