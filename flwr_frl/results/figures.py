"""The figure of a comparison, and the look of each method in all pictures and pages."""

import io
from collections.abc import Iterable, Mapping
from itertools import cycle, product
from typing import TYPE_CHECKING

import numpy as np

from flwr_frl.common.algorithms import title
from flwr_frl.results.results import Row, quality

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Width of a paper's column, in inches
WIDTH = 3.3
# The simulated time of a run so far.
CLOCK = "seconds-simulated"
# Metrics with a logarithmic axis.
ERRORS = ("distance", "error", "loss")
# Ten colours that people with colour vision deficiencies can tell apart
# (Petroff 2021, arXiv:2107.02270), as in matplotlib's ``petroff10``.
COLOURS = (
    *("#3f90da", "#ffa90e", "#94a4a2", "#bd1f01", "#832db6"),
    *("#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"),
)
# The marker of each colour, which distinguishes methods in greyscale
MARKERS = "osd^vP<X*>"
# Line styles of matplotlib. Each is used with all colours before the next one is.
STYLES = ("-", "--", ":", "-.")


def image_of(figure: "Figure", kind: str) -> bytes:
    """Return a figure as an image in the format ``png``, ``pdf`` or ``svg``."""
    import matplotlib

    image = io.BytesIO()
    # Many publishers do not accept the default fonts, which are of type 3.
    with matplotlib.rc_context({"pdf.fonttype": 42}):
        figure.savefig(image, format=kind, dpi=150)
    return image.getvalue()


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
            marker, step = MARKERS[COLOURS.index(colour)], len(at) // 8 + 1
            line = {"ls": style, "marker": marker, "ms": 4, "mfc": "white", "mew": 0.8}
            # The markers of equal curves are at different places.
            line |= {"markevery": (len(axes.lines) % step, step), "label": title(name)}
            axes.plot(at, means, colour, lw=1 if width else 1.5, **line)
            if len(seeds) > 1:
                low, high = np.subtract(means, deviations), np.add(means, deviations)
                axes.fill_between(at, low, high, color=colour, alpha=0.1, lw=0)
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


def looks(methods: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return the colour and line style of each method of a comparison, by name.

    The order of the methods does not matter.
    """
    free = cycle((colour, style) for style, colour in product(STYLES, COLOURS))
    return dict(zip(sorted(methods), free, strict=False))
