"""The pages of the two gossip benchmarks: table, search and plots."""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

import numpy as np

from benchmarks.common import RESULTS, markdown, write
from benchmarks.gossip import SEARCHED, Bench, Method, Run, final, search, whole
from flwr_frl.common.settings import Settings
from flwr_frl.results.parallel import run_parallel

Runs = dict[str, dict[str, Run]]

HEADER = (
    "run",
    "final test error, mean model",
    "nodes' own models",
    "iterations to target",
    "bits per node to target",
    "seconds at 100 kbit/s",
    "bits / {base}'s",
    "bits ratio by message size alone",
    "compute seconds",
)


def make(
    name: str,
    title: str,
    about: Callable[[Mapping[str, Settings]], str],
    bench: Bench,
    methods: Mapping[str, Method],
    rates: Sequence[float],
    base: str,
    seeds: int,
    jobs: int,
) -> None:
    """Carry out the missing runs of a page, and write the page.

    Parameters
    ----------
    name, title : str
        Name and title of the page.
    about : callable
        Maps each method's chosen settings to the sentences above the table.
    bench : Bench
        Common properties of all runs.
    methods : mapping of str to Method
        The rows.
    rates : sequence of float
        Learning rates to choose from.
    base : str
        Row whose bits are the unit for the other rows.
    seeds, jobs : int
        Number of seeds, and number of parallel runs.
    """
    own = {row: method for row, method in methods.items() if not method.as_in}
    found = run_parallel(search, [(bench, m, rates) for m in own.values()], jobs)
    picked = {row: settings for row, (settings, _) in zip(own, found, strict=True)}
    looked = {row: tried for row, (_, tried) in zip(own, found, strict=True)}
    for row, method in methods.items():
        picked[row] = picked[method.as_in or row]
    items = [
        (bench, row, method, picked[row], seed)
        for seed in range(seeds)
        for row, method in methods.items()
    ]
    runs: Runs = {row: {} for row in methods}
    for (_, row, _, _, seed), run in zip(
        items, run_parallel(whole, items, jobs), strict=True
    ):
        runs[row][str(seed)] = run
    target = reached_by_all(runs, methods)
    results = measured(runs, target, base)
    every = [run for own in runs.values() for run in own.values()]
    every += [run for tried in looked.values() for run in tried if run not in every]
    commits = {run["commit"] for run in every}
    validation = bench.shared(bench.iterations)["validation-fraction"]
    searched = {
        row: [
            {
                "learning-rate": float(run["settings"]["learning-rate"]),
                "gamma": float(run["gamma"]),
                "validation": final(run, "validation"),
            }
            for run in tried
        ]
        for row, tried in looked.items()
    }
    body = (
        f"{about(picked)} Seed{'s' * (seeds > 1)} "
        f"{', '.join(map(str, range(seeds)))}. The values after ± are standard "
        "deviations over seeds. The first error is that of the mean of the nodes' "
        "models, which no node holds. The second column is the mean of the errors of "
        "the nodes' own models, at the last evaluation; the other final errors are "
        f"means over the last five evaluations. The target, {target:.1%}, is the "
        "lowest error of the mean model that every method reaches in every seed "
        "(methods with a trigger and the one without communication are excluded). "
        "The column of ratios by message size alone assumes as many iterations as "
        f"{base} and that every message is sent. Runs are from commit "
        f"{', '.join(sorted(commits))}.\n\n"
        + markdown([h.format(base=base) for h in HEADER], table(results))
        + "\n## How learning rate and consensus step were chosen\n\n"
        "The same rule was used for each method. First, the learning rate was chosen "
        "with the consensus step of `auto`; then the consensus step was chosen with "
        "that rate. Each time the value with the smallest validation error of the "
        f"mean model was chosen. The validation set is a share of {validation:g} of "
        "each node's examples, which are not used for training. The error is "
        f"measured at the end of a run of {bench.search_iterations} iterations with "
        "seed 0. The table has validation errors; the chosen values are in bold:\n\n"
        + markdown(SEARCH_HEADER, search_table(looked, picked))
        + at_an_end(searched)
        + f"\n![test error]({name}.png)\n"
    )
    data: dict[str, Any] = {"target": target, "measured": results, "runs": slim(runs)}
    data["seconds"] = sum(run["rows"][-1]["seconds"] for run in every)
    data["searched"] = searched
    write(name, title, body, data)
    plot(runs, target, f"{name}.png")


def slim(runs: Runs) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the runs for the page's JSON, without the location of the data."""
    return {
        row: {
            seed: {
                **run,
                "settings": {
                    n: v for n, v in run["settings"].items() if n != "data-dir"
                },
            }
            for seed, run in seeds.items()
        }
        for row, seeds in runs.items()
    }


def reached_by_all(runs: Runs, methods: Mapping[str, Method]) -> float:
    """Return the lowest error that all methods reach, rounded up to 0.1 %.

    Methods with a trigger, and methods that send nothing, are excluded.
    """
    least = [
        min(row["error"] for row in run["rows"])
        for name, seeds in runs.items()
        if not methods[name].as_in and sends(seeds)
        for run in seeds.values()
    ]
    return math.ceil(round(1000 * max(least), 6)) / 1000


def sends(seeds: Mapping[str, Run]) -> bool:
    """Return whether a method sends anything."""
    return any(run["rows"][-1]["bits"] > 0 for run in seeds.values())


def first(run: Run, target: float, what: str) -> float:
    """Return a quantity when the error first reaches the target, or NaN."""
    found = (row[what] for row in run["rows"] if row["error"] <= target)
    return float(next(found, math.nan))


def spread(values: Sequence[float], form: str, scale: float = 1.0) -> str:
    """Return mean ± standard deviation, and the number of values if some are NaN."""
    there = [scale * value for value in values if not math.isnan(value)]
    if not there:
        return "never"
    text = format(fmean(there), form)
    if len(there) > 1:
        text += f" ± {format(stdev(there), form)}"
    return text + (f" ({len(there)} seeds)" if len(there) < len(values) else "")


def per_iteration(run: Run) -> float:
    """Return the average number of bits that a node sends in an iteration."""
    last = run["rows"][-1]
    return float(last["bits"] / last["iteration"])


def measured(runs: Runs, target: float, base: str) -> dict[str, dict[str, list[float]]]:
    """Return each row's errors, cost of the target and ratios, seed by seed.

    ``ratio`` is the number of bits to the target divided by that of the base, and
    ``sizes`` is the ratio of the bits per iteration.
    """
    found = {}
    for name, seeds in runs.items():
        pairs = [(run, runs[base][seed]) for seed, run in seeds.items()]
        found[name] = {
            "error": [final(run) for run, _ in pairs],
            "own": [final(run, "own") for run, _ in pairs],
            "ratio": [
                first(run, target, "bits") / first(other, target, "bits")
                for run, other in pairs
            ],
            "sizes": [
                per_iteration(run) / per_iteration(other) for run, other in pairs
            ],
            "seconds": [run["rows"][-1]["seconds"] for run, _ in pairs],
            **{
                what: [first(run, target, what) for run, _ in pairs]
                for what in ("iteration", "bits", "link")
            },
        }
    return found


def table(found: Mapping[str, Mapping[str, Sequence[float]]]) -> list[tuple[str, ...]]:
    """Return a row for each method: final errors, and the cost of the target."""
    return [
        (
            name,
            spread(own["error"], ".2f", 100) + " %",
            spread(own["own"], ".2f", 100) + " %",
            spread(own["iteration"], ",.0f"),
            spread(own["bits"], ",.3g"),
            spread(own["link"], ",.3g"),
            spread(own["ratio"], ",.3g"),
            f"{fmean(own['sizes']):,.3g}",
            f"{fmean(own['seconds']):.0f}",
        )
        for name, own in found.items()
    ]


SEARCH_HEADER = ("run", "learning rate: error", "consensus step: error")


def search_table(
    looked: Mapping[str, Sequence[Run]], picked: Mapping[str, Settings]
) -> list[tuple[str, ...]]:
    """Return a row for each method whose settings were searched."""
    lines = []
    for name, runs in looked.items():
        rate, step = (picked[name].get(what) for what in SEARCHED)
        searched = any(SEARCHED[1] in run["settings"] for run in runs)
        rates, steps = [], []
        for run in runs:
            own_rate, own_step = (run["settings"].get(what) for what in SEARCHED)
            said = f"{final(run, 'validation'):.2%}"
            if own_step is None:
                rates.append(_bold(f"{own_rate:g}: {said}", own_rate == rate))
            if own_rate == rate and searched:
                steps.append(_bold(f"{run['gamma']:.2g}: {said}", own_step == step))
        lines.append((name, ", ".join(rates), ", ".join(steps)))
    return lines


def at_an_end(searched: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Return a sentence on values that were chosen at the end of their range.

    A consensus step of 1 is not such a value, because 1 is the maximum.
    """
    found: dict[str, list[str]] = {"learning-rate": [], "gamma": []}
    for row, tried in searched.items():
        best = min(tried, key=lambda run: run["validation"])
        same = [run for run in tried if run["learning-rate"] == best["learning-rate"]]
        for what, among in (("learning-rate", tried), ("gamma", same)):
            values = {run[what] for run in among}
            if len(values) > 1 and best[what] in {min(values), max(values)} - {1.0}:
                found[what].append(row)
    said = [
        f"the {name} of {', '.join(rows)}"
        for name, rows in zip(
            ("learning rate", "consensus step"), found.values(), strict=True
        )
        if rows
    ]
    if not said:
        return ""
    return (
        "\nChosen at an end of the search range, so that values outside of it may be "
        "better: "
        f"{'; '.join(said)}.\n"
    )


def _bold(text: str, bold: bool) -> str:
    return f"**{text}**" if bold else text


def plot(runs: Runs, target: float, name: str) -> None:
    """Plot the test error against iterations, bits, and time over the link.

    A line is the mean over seeds; its band is the range.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.2), layout="constrained")
    panels = figure.subplots(1, 4)
    axes_of = (
        ("iteration", "error", "iterations", False),
        ("bits", "error", "bits sent by a node", True),
        ("link", "error", "seconds on a 100 kbit/s link", True),
        ("iteration", "consensus", "iterations", False),
    )
    for axes, (x, y, label, logarithmic) in zip(panels, axes_of, strict=True):
        for i, (row, seeds) in enumerate(runs.items()):
            if logarithmic and not sends(seeds):
                continue
            values = np.array([[r[y] for r in s["rows"]] for s in seeds.values()])
            at = np.mean([[r[x] for r in s["rows"]] for s in seeds.values()], axis=0)
            # A row keeps its colour in all panels, even if another row is left out.
            colour = f"C{i}"
            axes.plot(at, values.mean(0), label=row, lw=1.3, color=colour)
            axes.fill_between(
                at, values.min(0), values.max(0), color=colour, alpha=0.15
            )
        axes.set(xlabel=label, ylabel="test error of the mean model")
        if logarithmic:
            axes.set_xscale("log")
        if y == "error":
            axes.axhline(target, color="0.6", lw=0.8, ls=":")
        else:
            axes.set(ylabel="consensus distance", yscale="log")
        axes.grid(alpha=0.3)
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=min(5, len(runs)),
        fontsize=8,
    )
    figure.savefig(RESULTS / name, dpi=130)
