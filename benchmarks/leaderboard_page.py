"""Tables, plot and text of ``benchmarks/leaderboard.py``."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from benchmarks.common import DIFFERENCES, RESULTS, markdown

# Results by algorithm and cell, one for each seed; None if a run is missing.
Results = Mapping[str, Mapping[str, list[dict[str, Any] | None]]]

GLOBAL = ("fedavg", "fedprox", "scaffold", "moon", "feddyn")


def accuracies(runs: Iterable[dict[str, Any] | None], key: str = "accuracy") -> Any:
    """Return a metric in % of the runs that have it."""
    return np.array([100 * run[key] for run in runs if run and key in run])


def spread(values: Any) -> str:
    """Return mean ± standard deviation; the mean of one value, ``missing`` of none."""
    if not len(values):
        return "missing"
    mean = f"{np.mean(values):.2f}"
    return f"{mean} ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else mean


def by_seed(cells: Mapping[str, list[dict[str, Any] | None]], key: str) -> Any:
    """Return the mean over the cells for each seed that all cells have."""
    complete = [
        accuracies(runs, key)
        for runs in zip(*cells.values(), strict=True)
        if len(accuracies(runs, key)) == len(cells)
    ]
    return np.array([np.mean(values) for values in complete])


def ranked(results: Results) -> list[str]:
    """Return the algorithms, the best first; those with missing cells last.

    The latter are in the order of the cell that most algorithms have.
    """
    cells = next(iter(results.values()))
    fullest = max(
        cells, key=lambda c: sum(bool(len(accuracies(r[c]))) for r in results.values())
    )

    def best_first(values: Any) -> tuple[bool, float]:
        return (not len(values), -float(np.mean(values)) if len(values) else 0.0)

    return sorted(
        results,
        key=lambda name: (
            best_first(by_seed(results[name], "accuracy")),
            best_first(accuracies(results[name][fullest])),
        ),
    )


def accuracy_table(results: Results) -> str:
    """Return a table of accuracies by cell and over all cells, sorted."""
    cells = list(next(iter(results.values())))
    rows = []
    for place, name in enumerate(ranked(results), 1):
        by_cell = results[name]
        rows.append(
            (
                place if len(by_seed(by_cell, "accuracy")) else "",
                f"`{name}`",
                spread(by_seed(by_cell, "accuracy")),
                spread(by_seed(by_cell, "accuracy-worst-decile")),
                *(_cell(by_cell[cell]) for cell in cells),
            )
        )
    return markdown(("", "algorithm", "mean", "worst decile", *cells), rows)


def _cell(runs: list[dict[str, Any] | None]) -> str:
    text = spread(accuracies(runs))
    failed = sum(1 for run in runs if run and "failed" in run)
    count = len(accuracies(runs))
    notes = [f"{failed} failed"] * bool(failed)
    notes += [f"{count} of {len(runs)} seeds"] * (0 < count < len(runs))
    return text + (f" ({', '.join(notes)})" if notes else "")


def cost_table(results: Results) -> str:
    """Return a table of bytes and seconds per run, averaged over all runs."""
    rows = []
    for name in ranked(results):
        runs = [r for own in results[name].values() for r in own if r and "bytes" in r]
        if runs:
            means = [
                np.mean([run[key] for run in runs])
                for key in ("bytes", "cpu-seconds", "seconds")
            ]
            rows.append((f"`{name}`", f"{means[0] / 1e6:.1f}", *map(_round, means[1:])))
        else:
            rows.append((f"`{name}`", "missing", "missing", "missing"))
    heads = ("algorithm", "MB sent", "seconds of one core", "wall-clock seconds")
    return markdown(heads, rows)


def _round(value: float) -> str:
    return f"{value:.1f}"


def tuned_table(tuned: Mapping[str, Any]) -> str:
    """Return a table of the tuned settings with each point's validation accuracy."""
    rows = []
    for name, entry in tuned.items():
        if entry["picked"] or entry.get("points"):
            points = ", ".join(_point(point) for point in entry.get("points", ()))
            if "as" in entry:
                points = f"as `{entry['as']}`"
            rows.append((f"`{name}`", f"`{_text(entry['picked'])}`", points))
    return markdown(("algorithm", "picked", "tried: validation accuracy in %"), rows)


def _text(settings: Mapping[str, Any]) -> str:
    return " ".join(f"{n}={v}" for n, v in settings.items())


def _point(point: Mapping[str, Any]) -> str:
    values = "/".join(str(value) for value in point["settings"].values())
    result = f"{100 * point['accuracy']:.2f}" if "accuracy" in point else "failed"
    return f"{values}: {result}"


def missing(results: Results, seeds: Mapping[str, list[int]]) -> str:
    """Return the algorithms of all missing runs, by cell and seed."""
    parts, count = [], 0
    for cell, of_cell in seeds.items():
        for i, seed in enumerate(of_cell):
            names = [
                name for name, by_cell in results.items() if by_cell[cell][i] is None
            ]
            if names:
                every = len(names) == len(results)
                listed = "all" if every else ", ".join(f"`{name}`" for name in names)
                parts.append(f"{cell} with seed {seed}: {listed}")
                count += len(names)
    if not parts:
        return "No runs are missing.\n"
    return f"Missing runs: {count}. {'; '.join(parts)}.\n"


def places(results: Results) -> str:
    """Return sentences on the ranks of FedAvg-FT, and on FedAvg and FedProto."""
    text = ""
    order = ranked(results)
    if "fedavg-ft" in order and len(by_seed(results["fedavg-ft"], "accuracy")):
        whole = [name for name in order if len(by_seed(results[name], "accuracy"))]
        own = [f"{_place(results, cell)} on {cell}" for cell in results["fedavg-ft"]]
        text += (
            f"`fedavg-ft` has rank {whole.index('fedavg-ft') + 1} of {len(whole)}; "
            f"its ranks are {', '.join(own)}. "
        )
    of_fedavg = results.get("fedavg", {}).get("shards-2", [])
    if len(base := accuracies(of_fedavg)):
        worse = [
            f"`{name}`"
            for name, own in results.items()
            if name not in GLOBAL
            and len(values := accuracies(own["shards-2"]))
            and np.mean(values) <= np.mean(base)
        ]
        text += (
            "With two shards a client, every personalised method that was run is "
            "better than `fedavg`.\n"
            if not worse
            else "With two shards a client, these are no better than `fedavg`: "
            f"{', '.join(worse)}.\n"
        )
    heads = by_seed(results.get("fedproto", {}), "accuracy-head")
    if len(heads):
        text = (
            f"{text.rstrip()} `fedproto` predicts by the nearest prototype among the "
            "classes of a client, as in its authors' code; with the clients' heads "
            f"its accuracy would be {spread(heads)}.\n"
        )
    return text


def _place(results: Results, cell: str) -> int:
    means = {
        name: float(np.mean(values))
        for name, by_cell in results.items()
        if len(values := accuracies(by_cell[cell]))
    }
    return sorted(means, key=lambda name: -means[name]).index("fedavg-ft") + 1


def body(name: str, data: Mapping[str, Any]) -> str:
    """Return the page below its heading."""
    results, common = data["results"], data["settings"]
    images, clients = data["images"], common["num-clients"]
    of_images = (
        f"{images} training images a client ({images * clients:,} of CIFAR-10, the "
        "first of each class by name, as JPEG) and half as many for its tests"
        if images
        else "all images of CIFAR-10, as JPEG"
    )
    share = int(common["fraction-train"] * clients + 1e-9)
    protocol = (
        f"{clients} clients, {common['num-server-rounds']} rounds, {share} clients "
        f"per round, {of_images}. All algorithms use `cifar10-cnn`, the papers' "
        "model, with batch size 10, SGD with learning rate 0.01, momentum 0.5 and "
        "weight decay 1e-4, random crop and flip, and 1 local epoch. Algorithms with "
        "head epochs have 10 of them, without augmentation and with features that "
        "are computed once"
        + ("; forward passes in bfloat16" if common["bfloat16"] else "")
        + ". Accuracy is in %: the mean over all clients, sampled or not, each with "
        f"its own test images, and over the last {common['evaluate-last']} rounds. "
        "It is that of the last round alone for `-ft` and `fedbabu`, which fine-tune "
        "for it, and where `per-fedavg` was tuned. "
        + "".join(
            f"`{name}` uses {_text(own)}. "
            for name, own in data["own"].items()
            if own.items() - common.items()
        )
        + "± is the sample standard deviation over seeds. The worst decile is the "
        "mean over the tenth of the clients with the lowest accuracy. `mean` is the "
        "mean over the partitions, and determines the order; rank differences are "
        "not significant if the means differ by less than ±. Seeds: "
        + "; ".join(
            f"{cell}: {', '.join(map(str, own))}" for cell, own in data["seeds"].items()
        )
        + ". They are the first seeds for which each client has at least 10 training "
        f"images and a test image.\n\n{_unlike_papers(images, common)} The local "
        "epochs and the learning rate are the same for all algorithms and were not "
        f"tuned. {DIFFERENCES} A client takes part in few rounds "
        f"({common['num-server-rounds'] * share / clients:g} on average), so methods "
        "that train only on its own data take few steps. `fedbn` is excluded because "
        "the papers' model has no batch norm; without it, `fedbn` equals `fedavg`. "
        "`srpfl` wraps `fedrep`, and without slow clients it can only save time.\n\n"
    )
    commits = {
        run["commit"]
        for own in results.values()
        for runs in own.values()
        for run in runs
        if run
    }
    return (
        protocol + "Runs are by this command without `--page`, or, if all settings "
        "are the same, by that of [the papers' tables](papers_tables.md), at commit "
        f"{', '.join(sorted(commits)) or 'none'}.\n\n## Accuracy\n\n"
        + accuracy_table(results)
        + f"\n{places(results)}\n{missing(results, data['seeds'])}\n"
        + f"![accuracy]({name}.png)\n\n"
        + "## Bytes and seconds\n\nPer run, in both directions, including "
        "evaluation. Other processes ran on the machine at the same time, so only "
        "the seconds of one core can be compared, and only between runs of the same "
        "commit and machine.\n\n"
        + cost_table(results)
        + "\n## What was tuned\n\nHyper-parameters were tuned on shards-5 only, with "
        "its first seed, by the accuracy on a fifth of each client's training "
        "images, which was held out from training. The other algorithms have no "
        "specific hyper-parameters, or use those of their papers. A value at an end "
        "of its grid may not be optimal.\n\n" + tuned_table(data["tuned"])
    )


def _unlike_papers(images: int, common: Mapping[str, Any]) -> str:
    """Return the differences from the papers' protocol, with a link to its results."""
    numbers = ("num-clients", "num-server-rounds", "fraction-train", "evaluate-last")
    own_page = "the results for their tables are on [a separate page]"
    if [common[n] for n in numbers] == [100, 100, 0.1, 10] and not images:
        return (
            "This is the papers' protocol, with the following exceptions: the papers "
            "also augment images in the head epochs, use 5 epochs of the "
            "representation in FedRep's table with 5 shards, and use individual "
            f"settings; {own_page}(papers_tables.md)."
        )
    return (
        "This is not the papers' protocol. They use 100 clients with 500 images "
        "each, 10 % of them in each of 100 rounds, the mean of the last 10 rounds, "
        "float32, augmentation in the head epochs too, and in FedRep's table 5 "
        "epochs of the representation with 5 shards. The figures can therefore be "
        "compared with each other, but not with those of a paper; "
        f"{own_page}(papers_tables.md)."
    )


def plot(name: str, results: Results) -> None:
    """Draw accuracies by cell as dots with error bars, in the order of the table."""
    from matplotlib.figure import Figure

    there = {
        n: by_cell for n, by_cell in results.items() if any(map(any, by_cell.values()))
    }
    order = ranked(there)[::-1] if there else []
    cells = [
        c
        for c in next(iter(results.values()))
        if any(any(r[c]) for r in there.values())
    ]
    if not cells:
        return
    figure = Figure(
        figsize=(2.6 * len(cells) + 1.4, 0.24 * len(order) + 1), layout="constrained"
    )
    panels = figure.subplots(1, len(cells), sharey=True, squeeze=False)[0]
    for axes, cell in zip(panels, cells, strict=True):
        for y, algorithm in enumerate(order):
            values = accuracies(results[algorithm][cell])
            if len(values):
                deviation = np.std(values, ddof=1) if len(values) > 1 else 0
                color = "C3" if algorithm in GLOBAL else "C0"
                axes.errorbar(
                    np.mean(values), y, xerr=deviation, fmt="o", ms=4, color=color
                )
        axes.set(title=cell, xlabel="accuracy, %")
        axes.set_yticks(range(len(order)), order)
        axes.grid(alpha=0.3)
    figure.savefig(RESULTS / f"{name}.png", dpi=150)
