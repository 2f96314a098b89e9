"""Files and plot of clients that joined after the training."""

from collections.abc import Mapping, Sequence
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
from flwr.common import log

from flwr_frl.common.messages import NUM_EXAMPLES
from flwr_frl.results.journal import write_lines
from flwr_frl.results.plot import drawable, line_style, new_figure, save_figure
from flwr_frl.results.results import MALFORMED, read_json

FILE, TIDY, PLOT = "newcomers.json", "newcomers.csv", "newcomers.png"
COLUMNS = ("algorithm", "seed", "client", "num-examples", "metric", "value")
# Metrics that show a model's quality, the preferred one first.
QUALITY = ("accuracy", "error", "loss")


def summarize(
    metrics_of: Mapping[str, Sequence[Mapping[str, float]]],
) -> dict[str, float]:
    """Return ``accuracy-newcomers``: the mean after training on all examples.

    Without accuracies it is ``error-newcomers`` or ``loss-newcomers``.
    """
    for name in QUALITY:
        last = [entries[-1] for entries in metrics_of.values()]
        values = [metrics[name] for metrics in last if name in metrics]
        if values:
            return {f"{name}-newcomers": float(np.mean(values))}
    return {}


def write_tidy(
    path: Path,
    about: Sequence[Any],
    metrics_of: Mapping[str, Sequence[Mapping[str, float]]],
) -> None:
    """Write one line for each newcomer, number of examples and metric.

    ``about`` are the algorithm and the seed.
    """
    lines = (
        (*about, client, metrics[NUM_EXAMPLES], name, value)
        for client, entries in metrics_of.items()
        for metrics in entries
        for name, value in metrics.items()
        if name != NUM_EXAMPLES
    )
    write_lines(path, COLUMNS, lines)


def plot(output: Path, algorithms: Sequence[str], folders: Sequence[Path] = ()) -> None:
    """Draw ``newcomers.png``, if there are newcomers: quality by number of examples.

    A point is the mean over the newcomers for one fraction of their examples. With
    ``folders``, one for each seed, it is the mean over all seeds.
    """
    drawn = dict[str, list[list[dict[str, float]]]]()
    for name in algorithms:
        paths = [place / name / FILE for place in folders or (output,)]
        read = [each for path in paths if path.is_file() for each in _entries(path)]
        drawn |= {name: read} if read else {}
    if not drawn:
        # An earlier run may have had newcomers.
        (output / PLOT).unlink(missing_ok=True)
    if not drawn or not drawable():
        return
    every = [m for run in drawn.values() for entries in run for m in entries]
    common = set(every[0]).intersection(*every)
    quality = next((name for name in QUALITY if name in common), None)
    if quality is None:
        return
    figure = new_figure(6.4, 1)
    (axes,) = figure.axes
    for i, (name, entries) in enumerate(drawn.items()):
        x, y = curve(entries, quality)
        axes.plot(x, y, label=name, marker="o", ms=4, **line_style(i))
    axes.set(xlabel="examples of a new client, mean", xscale="log")
    axes.set_xticks(x, [f"{value:.3g}" for value in x])
    axes.minorticks_off()
    axes.set_ylabel(f"{quality}, mean over new clients")
    if quality == "accuracy":
        axes.yaxis.set_major_formatter("{x:.0%}")
    save_figure(figure, output / PLOT)


def _entries(path: Path) -> list[list[dict[str, float]]]:
    """Return the newcomers' metrics in a file; none if it is damaged."""
    try:
        entries = [entry["by-examples"] for entry in read_json(path).values()]
        if entries:
            curve(entries, NUM_EXAMPLES)
    except MALFORMED as error:
        log(WARNING, "%r is damaged, so %s lacks it: %s", str(path), PLOT, error)
        return []
    return entries


def curve(
    entries: Sequence[Sequence[Mapping[str, float]]], quality: str
) -> tuple[list[float], list[float]]:
    """Return mean numbers of examples and mean qualities, the fewest examples first.

    A newcomer with so few examples that some fractions are the same number counts with
    its smallest number in place of the missing ones.
    """
    longest = max(map(len, entries))
    padded = [[row[0]] * (longest - len(row)) + list(row) for row in entries]

    def means(name: str) -> list[float]:
        table = np.array([[metrics[name] for metrics in row] for row in padded])
        return [float(mean) for mean in table.mean(0)]

    return means(NUM_EXAMPLES), means(quality)
