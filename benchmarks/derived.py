"""Further content of pages, such as comparisons of rows and of clients.

A function receives the config and the results (by row and cell, a list of runs) and
returns further content of the page; ``notes`` are columns of text by row and cell.
"""

import math
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from flwr_frl.results.statistics import holm, paired_test

Results = dict[str, dict[str, list[dict[str, Any]]]]
Notes = dict[str, dict[str, dict[str, str]]]
# Colours on which white text is easier to read
WHITE_TEXT = 0.75
REFERENCES = ("fedavg", "local")


@cache
def published() -> dict[str, dict[str, dict[str, float]]]:
    """Return the accuracies in the papers' Table 1, by paper, method and cell."""
    path = Path(__file__).with_name("published.toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))


def beside_papers(config: Any, results: Results) -> dict[str, Any]:
    """Add the published accuracies to the rows of the papers' tables."""
    notes: Notes = {}
    for row, cells in results.items():
        for cell in cells:
            found = [
                f"{method[cell]:.2f} ({paper})"
                for paper, methods in published().items()
                for method in methods.values()
                if method["row"] == row and cell in method
            ]
            notes.setdefault(row, {})[cell] = {"paper": "; ".join(found)}
    return {"notes": notes}


# Comparisons of clients


def compare(
    clients: Sequence[dict[str, float]], others: Sequence[dict[str, float]], sign: int
) -> tuple[int, int]:
    """Return how many clients are better and worse, by their mean over the seeds."""
    names = sorted(set.intersection(*map(set, [*clients, *others])))
    means = [
        [fmean(run[name] for run in runs) for name in names]
        for runs in (clients, others)
    ]
    test = paired_test(*means, sign)
    return test.wins, test.losses


def worst_decile(clients: dict[str, float], sign: int) -> float:
    """Return the mean of the worst tenth of the clients, at least one."""
    values = sorted(clients.values(), key=lambda value: sign * value)
    return float(np.mean(values[: max(1, len(values) // 10)]))


def of_clients(config: Any, results: Results) -> dict[str, Any]:
    """Compare each row with `REFERENCES`, client by client."""
    from benchmarks.render import own_metric, sign

    notes: Notes = {}
    counts: dict[str, dict[str, Sequence[int]]] = {}
    for row, cells in results.items():
        for cell, runs in cells.items():
            metric = own_metric(config, cell, config.metric)
            direction, own = sign(metric), clients_of(runs, metric)
            if not own:
                continue
            for run, clients in zip(runs, own, strict=True):
                run["worst-tenth"] = worst_decile(clients, direction)
            note = notes.setdefault(row, {}).setdefault(cell, {})
            for other in REFERENCES:
                others = clients_of(results.get(other, {}).get(cell, []), metric)
                if len(others) != len(own):
                    continue
                better, worse = compare(own, others, direction)
                note[f"clients better : worse than `{other}`"] = f"{better} : {worse}"
                if other == "fedavg":
                    counts.setdefault(row, {})[cell] = better, worse
    return {"notes": notes, "against-fedavg": counts}


def clients_of(runs: Sequence[dict[str, Any]], metric: str) -> list[dict[str, float]]:
    """Return each client's value by run; clients without one are left out."""
    return [
        {n: c[metric] for n, c in run["clients"].items() if c.get(metric) is not None}
        for run in runs
        if "clients" in run
    ]


def tests(config: Any, results: Results) -> dict[str, Any]:
    """Test each row against the best one of its cell."""
    notes: Notes = {row: {} for row in results}
    for cell in config.cells:
        values: dict[str, list[float]] = {}
        for row, cells in results.items():
            runs = clients_of(cells.get(cell, []), config.metric)
            if len(runs) == config.seeds:
                names = sorted(runs[0])
                values[row] = [fmean(run[name] for run in runs) for name in names]
        best = max(values, key=lambda row: fmean(values[row]))
        found = [paired_test(own, values[best]) for own in values.values()]
        others = [
            None if row == best else t.p for row, t in zip(values, found, strict=True)
        ]
        for row, test, p in zip(values, found, holm(others), strict=True):
            notes[row][cell] = {} if row == best else replace(test, p=p).entries
    return {"notes": notes}


def picture(config: Any, data: dict[str, Any]) -> None:
    """Draw for how many clients each algorithm is better than FedAvg, and its lead.

    The colour is the share of the clients for which it is, minus the share of those for
    which it is worse.
    """
    from matplotlib.figure import Figure

    from benchmarks.common import RESULTS
    from benchmarks.render import own_metric, sign

    results, counts = data["results"], data["against-fedavg"]
    cells = [cell for cell in config.cells if cell in results["fedavg"]]
    balances = {
        name: {cell: (b - w) / max(1, b + w) for cell, (b, w) in own.items()}
        for name, own in counts.items()
    }
    means = {name: fmean(own.values()) for name, own in balances.items()}
    names = sorted(means.keys() - {"fedavg"}, key=lambda name: -means[name])
    shares = np.full((len(names), len(cells)), np.nan)
    figure = Figure(figsize=(1.35 * len(cells) + 2.5, 0.29 * len(names) + 2))
    axes = figure.subplots()
    for column, cell in enumerate(cells):
        metric = own_metric(config, cell, config.metric)
        base = fmean(run[metric] for run in results["fedavg"][cell])
        for row, name in enumerate(names):
            if cell not in balances[name]:
                continue
            shares[row, column] = balances[name][cell]
            mean = fmean(run[metric] for run in results[name][cell])
            gain = 100 * (1 - mean / base if sign(metric) < 0 else mean - base)
            white = abs(shares[row, column]) > WHITE_TEXT
            axes.text(
                column,
                row,
                f"{gain:+.1f}" if gain > -1000 else "<-1000",
                ha="center",
                va="center",
                fontsize=8,
                color="white" if white else "black",
            )
    image = axes.imshow(shares, cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_xticks(range(len(cells)), cells, fontsize=9)
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
    bar = figure.colorbar(image, orientation="horizontal", pad=0.02, aspect=45)
    bar.set_label("clients, compared with FedAvg: all worse to all better")
    figure.savefig(RESULTS / f"{config.name}.png", dpi=120, bbox_inches="tight")


# Times to an accuracy


def time_to(
    curve: Sequence[Sequence[float]], level: float, per_round: float = 0
) -> float:
    """Return when a level is first reached (interpolated between tests), or NaN.

    The curve has times, accuracies and rounds; ``per_round`` is added for each round.
    """
    times, accuracies, rounds = curve
    at = [t + per_round * r for t, r in zip(times, rounds, strict=True)]
    for i, accuracy in enumerate(accuracies):
        if accuracy >= level:
            window = slice(max(i - 1, 0), i + 1)
            return float(np.interp(level, accuracies[window], at[window]))
    return math.nan


def beside_references(config: Any, results: Results) -> dict[str, Any]:
    """Add times relative to a row's reference, for several communication times.

    A row's ``against`` is its reference, of which 95 % of the final accuracy is the
    level. ``gap`` is the difference in final accuracy in points. A longer run has
    only ``ahead``, its lead when the reference ends.
    """
    for row, cells in results.items():
        reference = config.rows[row].get("against")
        for cell, runs in cells.items():
            bases = results.get(reference, {}).get(cell, [])
            for run, base in zip(runs, bases, strict=False):
                if not {"curve", "accuracy"} <= run.keys() & base.keys():
                    continue
                final, level = base["accuracy"], 0.95 * base["accuracy"]
                curves = run["curve"]["time"], base["curve"]["time"]
                (times, accuracies, rounds), end = curves[0], curves[1][0][-1]
                if rounds[-1] > curves[1][2][-1]:
                    done = [
                        accuracy
                        for time, accuracy in zip(times, accuracies, strict=True)
                        if time <= end
                    ]
                    run["ahead"] = 100 * (done[-1] - final)
                    continue
                for spent in config.cells[cell].get("communication", (0, 10, 100)):
                    one, other = (time_to(curve, level, spent) for curve in curves)
                    run[f"C.T. {spent}"] = one / other
                run["gap"] = 100 * (run["accuracy"] - final)
    return {}
