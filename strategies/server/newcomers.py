"""Clients that come after the training: how good the model is for them."""

import csv
import io
from collections.abc import Mapping, Sequence
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MessageType
from flwr.common import log
from flwr.serverapp import Grid

from flwr_frl.strategies.base import BaseStrategy
from flwr_frl.strategies.report.output import NEWCOMERS, NEWCOMERS_PLOT
from flwr_frl.strategies.report.plot import (
    INSIDE,
    drawable,
    legend_below,
    line_style,
    save_figure,
)
from flwr_frl.strategies.report.results import read_json
from flwr_frl.strategies.server.replies import check_evaluation
from flwr_frl.task.files import write_atomically
from flwr_frl.task.messages import FITTED, NEWCOMER, NUM_EXAMPLES, SHARE
from flwr_frl.task.settings import SettingsError

(FILE, TIDY), PLOT = NEWCOMERS, NEWCOMERS_PLOT
# Of a newcomer's examples: it fits what is its own on each of these shares.
SHARES = (1 / 8, 1 / 4, 1 / 2, 1.0)
COLUMNS = ("algorithm", "seed", "client", "num-examples", "metric", "value")
# What is best shown of a task, in this order.
QUALITY = ("accuracy", "error", "loss")

# Each newcomer's metrics, by how many examples it had, the fewest first.
ByExamples = dict[str, list[dict[str, float]]]


def check_newcomers(
    strategy: BaseStrategy, algorithm: str, count: int, num_clients: int
) -> None:
    """Raise `SettingsError` unless so many clients can come after the training."""
    if not count:
        return
    if not strategy.traits.takes_newcomers:
        raise SettingsError(
            f"new-clients is {count}; expected 0 with {algorithm}, which leaves no "
            "model for clients that come later"
        )
    if count >= num_clients:
        raise SettingsError(
            f"new-clients is {count}; expected at most {num_clients - 1}, so that "
            f"one of {num_clients} clients trains"
        )


def let_join(
    strategy: BaseStrategy,
    grid: Grid,
    arrays: ArrayRecord,
    server_round: int,
    timeout: float,
) -> ByExamples:
    """Let every newcomer fit what is its own on shares of its examples, and test it.

    Parameters
    ----------
    strategy : BaseStrategy
        Has trained.
    grid : Grid
        The grid.
    arrays : ArrayRecord
        The trained shared arrays.
    server_round : int
        The last round.
    timeout : float
        Seconds to wait for the replies of one share.

    Returns
    -------
    dict
        Metrics, with ``num-examples`` that were fitted, by the names of the newcomers
        that answered for all their examples.
    """
    nodes = strategy.clients.newcomers()
    found: ByExamples = {}
    answered: set[str] = set()
    if not nodes:
        log(WARNING, "no client says that it is new; only simulated ones do")
    for share in SHARES if nodes else ():
        config = ConfigRecord({SHARE: share})
        kind = f"{MessageType.EVALUATE}.{NEWCOMER}"
        asked = strategy.open_round(nodes, arrays, config, server_round, kind)
        replies = grid.send_and_receive(asked, timeout=timeout)
        valid = strategy.pending.close(replies, check_evaluation)
        for name, reply in zip(strategy.pending.names(valid), valid, strict=True):
            metrics = dict(check_evaluation(reply))
            if FITTED not in metrics:
                continue
            # Those that it was tested on are known.
            metrics[NUM_EXAMPLES] = int(metrics.pop(FITTED))
            own = found.setdefault(name, [])
            # Of few examples two shares may be the same.
            count = metrics[NUM_EXAMPLES]
            own[:] = [*(m for m in own if m[NUM_EXAMPLES] != count), metrics]
        answered = set(strategy.pending.names(valid))
    # Who did not answer for all its examples has no value to be compared with others'.
    for name in found.keys() - answered:
        log(WARNING, "new client %s fell silent, and is left out", name)
        del found[name]
    return found


def summarize(found: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, float]:
    """Return ``accuracy-newcomers``: the mean with all examples that each one has.

    Without accuracies it is ``error-newcomers`` or ``loss-newcomers``.
    """
    for name in QUALITY:
        values = [own[-1][name] for own in found.values() if name in own[-1]]
        if values:
            return {f"{name}-newcomers": float(np.mean(values))}
    return {}


def write_tidy(
    path: Path,
    about: Sequence[Any],
    found: Mapping[str, Sequence[Mapping[str, float]]],
) -> None:
    """Write one line a newcomer, number of examples and metric.

    ``about`` are the algorithm and the seed.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for client, of_client in found.items():
        for metrics in of_client:
            count = metrics[NUM_EXAMPLES]
            for name, value in metrics.items():
                if name != NUM_EXAMPLES:
                    writer.writerow([*about, client, count, name, value])
    write_atomically(path, text.getvalue().encode())


def plot(output: Path, algorithms: Sequence[str], folders: Sequence[Path] = ()) -> None:
    """Draw ``newcomers.png``, if there are any: quality by the number of examples.

    A point is the mean over the newcomers (of all seeds, whose ``folders`` are given)
    with one share of their examples.
    """
    files = {
        name: [place / name / FILE for place in folders or (output,)]
        for name in algorithms
    }
    runs = {
        name: [own for path in paths if path.is_file() for own in _entries(path)]
        for name, paths in files.items()
    }
    drawn = {name: own for name, own in runs.items() if own}
    if not drawn or not drawable():
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    def has(quality: str) -> bool:
        return all(quality in m for own in drawn.values() for of in own for m in of)

    quality = next((name for name in QUALITY if has(name)), None)
    if quality is None:
        return
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for i, (name, entries) in enumerate(drawn.items()):
        x, y = curve(entries, quality)
        axes.plot(x, y, label=name, marker="o", ms=4, **line_style(i))
    axes.set_xscale("log")
    axes.set_xticks(x, [f"{value:.3g}" for value in x])
    axes.minorticks_off()
    axes.set_xlabel("examples of a new client, mean")
    axes.set_ylabel(f"{quality}, mean over new clients")
    if quality == "accuracy":
        axes.yaxis.set_major_formatter("{x:.0%}")
    axes.grid(alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > INSIDE:
        legend_below(figure, handles, labels)
    else:
        figure.legend(handles, labels, loc="outside right upper")
    save_figure(figure, output / PLOT)


def _entries(path: Path) -> list[list[dict[str, float]]]:
    """Return what newcomers have come to; nothing if the file is damaged."""
    try:
        entries = [entry["by-examples"] for entry in read_json(path).values()]
        if entries:
            curve(entries, NUM_EXAMPLES)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        log(WARNING, "%r is damaged, so %s lacks it: %s", str(path), PLOT, error)
        return []
    return entries


def curve(
    entries: Sequence[Sequence[Mapping[str, float]]], quality: str
) -> tuple[list[float], list[float]]:
    """Return mean numbers of examples and mean qualities, the fewest first.

    Newcomers with fewer numbers of examples, as they have too few to divide, count
    with their least where others have less still.
    """
    longest = max(map(len, entries))
    padded = [[own[0]] * (longest - len(own)) + list(own) for own in entries]

    def means(name: str) -> list[float]:
        table = np.array([[metrics[name] for metrics in own] for own in padded])
        return [float(mean) for mean in table.mean(0)]

    return means(NUM_EXAMPLES), means(quality)
