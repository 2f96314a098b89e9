"""Tables, plots and text of ``benchmarks/papers_tables.py``."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.common import RESULTS, markdown
from benchmarks.published import CELLS, PAPERS

Data = Mapping[str, Any]
GLOBAL = ("FedAvg", "FedProx", "SCAFFOLD")
SWINGS = "with so few classes a client the accuracy of a global model fluctuates"
# Explanations of results that differ from the paper's by more than 2 points.
REASONS: dict[tuple[str, str], str] = {
    ("FedRep, Table 1", "Local only"): "its code trains each client alone for as many "
    "epochs as there are rounds (`local-all`, 100x5); here a client trains when it is "
    "sampled, about ten epochs in all",
    ("FedRep, Table 1", "Per-FedAvg"): "its authors adapt for five epochs before the "
    "test instead of one step: on every fifth client of 100x2 the last model has 77.2 "
    "after the step and 84.1 after five epochs (measured once, without a page)",
    ("FLUTE, Table 1", "FedAvg-FT"): "unknown; the training agrees (`fedavg`), and the "
    "paper does not describe the fine-tuning",
}
# The cell in which five local epochs, as in FedRep's code, come closer to its table.
FIVE_EPOCHS = "1000x2"
FIFTY = ("50x5", "50x2")
# Row with which the others are compared, on the same partitions.
BASE = "fedrep"
# Rows and cells with error bars, over this number of seeds.
WITH_SPREAD = ("fedrep", "fedrep-1", "flute", "flute-star", "fedavg", "fedavg-ft")
WITH_SPREAD += ("fedper", "local")
SPREAD_CELLS, SEEDS = ("100x5", "100x2", "50x5"), 3


def runs_of(data: Data, cell: str, row: str) -> dict[str, Any]:
    """Return a row's runs in a cell, by seed; without any, those of its ``-ft`` row."""
    cells = data["results"].get(cell, {})
    runs: dict[str, Any] = cells.get(row) or cells.get(f"{row}-ft") or {}
    return runs


def accuracies(data: Data, cell: str, row: str) -> dict[str, float]:
    """Return the accuracy in % by seed.

    A global method without runs has that of its ``-ft`` row before fine-tuning.
    """
    cells = data["results"].get(cell, {})
    if row not in cells and f"{row}-ft" in cells:
        row, key = f"{row}-ft", "accuracy-global"
    else:
        key = "accuracy"
    return {
        seed: 100 * run[key]
        for seed, run in sorted(cells.get(row, {}).items())
        if key in run
    }


def spread(values: Mapping[str, float]) -> str:
    """Return mean ± standard deviation over the seeds, and the number of seeds."""
    by_seed = list(values.values())
    if not by_seed:
        return "missing"
    if len(by_seed) == 1:
        return f"{by_seed[0]:.2f}"
    return (
        f"{np.mean(by_seed):.2f} ± {np.std(by_seed, ddof=1):.2f} ({len(by_seed)} seeds)"
    )


def papers_table(data: Data, paper: str) -> str:
    """Return a table of a paper's accuracies and those measured here."""
    methods = PAPERS[paper]
    cells = [c for c in CELLS if any(c in each for _, each in methods.values())]
    rows = []
    for method, (row, published) in methods.items():
        line, far = [], []
        for cell in cells:
            values = accuracies(data, cell, row)
            line.append(f"{spread(values)} / {published[cell]:.2f}")
            if values and _far(list(values.values()), published[cell]):
                far.append(cell)
        rows.append((method, f"`{row}`", *line, _why(data, paper, method, far)))
    heads = ("method", "row here", *(f"{cell}: here / paper" for cell in cells))
    return markdown((*heads, "reason, if more than 2 points apart"), rows)


def _why(data: Data, paper: str, method: str, far: list[str]) -> str:
    """Return the reasons for the cells in which a method differs from the paper."""
    cells: dict[str, list[str]] = {}
    for cell in far:
        cells.setdefault(_reason(data, paper, method, cell), []).append(cell)
    if len(cells) < 2:
        return "".join(cells)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in cells.items())


def _reason(data: Data, paper: str, method: str, cell: str) -> str:
    row, published = PAPERS[paper][method]
    of_fedrep = paper.startswith("FedRep")
    code = as_in_code(data, cell, row) if of_fedrep else {}
    for choice, mean in code.items():
        if not _far([mean], published[cell]):
            return f"its code has {choice} ({mean:.2f} here)"
    if (paper, method) in REASONS and cell not in FIFTY and not code:
        return REASONS[paper, method]
    if method in GLOBAL and cell.endswith("x2"):
        return SWINGS
    if code:
        means = "; ".join(f"with {choice}: {mean:.2f}" for choice, mean in code.items())
        return f"unknown; as in its code, {means}"
    if of_fedrep and cell == FIVE_EPOCHS:
        return "possibly its five local epochs instead of one"
    if cell in FIFTY:
        return (
            "its figures with 50 clients are close to those with 100, as if each had "
            "500 images; here each has 1,000 ([500 images](fifty_clients.md))"
        )
    return "unknown"


def as_in_code(data: Data, cell: str, row: str) -> dict[str, float]:
    """Return the mean accuracy in % by choice of FedRep's code; empty without runs."""
    choices = {
        "five local epochs instead of one": with_five(data, cell, row),
        "five epochs before the test instead of one step": accuracies(
            data, cell, f"{row}-adapted"
        ),
    }
    return {
        choice: float(np.mean(list(values.values())))
        for choice, values in choices.items()
        if values
    }


def with_five(data: Data, cell: str, row: str) -> dict[str, float]:
    """Return the accuracy in % with five local epochs, by seed; empty without runs."""
    cells = data["results"].get(cell, {})
    for name, key in ((f"{row}-5", "accuracy"), (f"{row}-ft-5", "accuracy-global")):
        if name in cells:
            return {seed: 100 * run[key] for seed, run in sorted(cells[name].items())}
    return {}


def _with_five_shards(data: Data) -> str:
    """Return what five local epochs change in 100x5 for global models."""
    parts = []
    for method in GLOBAL:
        row, published = PAPERS["FedRep, Table 1"][method]
        if five := list(with_five(data, "100x5", row).values()):
            one = list(accuracies(data, "100x5", row).values())
            parts.append(
                f"{method} {np.mean(five):.2f} and {np.mean(one):.2f} "
                f"(paper: {published['100x5']:.2f})"
            )
    if not parts:
        return ""
    return (
        " In 100x5, where the paper's figures are closer to one epoch, the global "
        f"models have with five epochs and with one: {'; '.join(parts)}."
    )


def _far(values: list[float], published: float) -> bool:
    return abs(float(np.mean(values)) - published) > 2


def rank(values: Mapping[str, float], base: Mapping[str, float]) -> tuple[bool, float]:
    """Return a sort key: the mean lead over `BASE`, over the seeds that both have.

    Rows may have different seeds, whose partitions may be easier or harder. Rows
    without a common seed come last, sorted by their accuracy.
    """
    both = [values[seed] - base[seed] for seed in values if seed in base]
    return not both, -float(np.mean(both or list(values.values())))


def whole_table(data: Data, cell: str) -> str:
    """Return the table of a cell's rows, the best first, compared with `BASE`."""
    base = accuracies(data, cell, BASE)
    rows: list[tuple[tuple[bool, float], tuple[str, ...]]] = []
    by_row = data["results"][cell]
    for name in {*by_row, *(row.removesuffix("-ft") for row in by_row)}:
        values, runs = accuracies(data, cell, name), runs_of(data, cell, name)
        if not values:
            reasons = {run.get("failed", "no accuracy") for run in runs.values()}
            rows.append(((True, np.inf), (f"`{name}`", "; ".join(reasons), *[""] * 6)))
            continue
        cells = (
            f"`{name}`",
            spread(values),
            _difference(values, base) if name != BASE else "",
            *_means(runs, name in by_row),
        )
        rows.append((rank(values, base), cells))
    heads = ("row", "accuracy", f"difference from `{BASE}`", "worst decile")
    heads += ("Global NC2", "Local NC2", "seconds of one core", "commit")
    return markdown(heads, [cells for _, cells in sorted(rows)])


def _difference(values: Mapping[str, float], base: Mapping[str, float]) -> str:
    both = {seed: values[seed] - base[seed] for seed in values if seed in base}
    return spread(both) if both else ""


def _means(runs: Mapping[str, Any], whole: bool) -> tuple[str, ...]:
    """Return the other figures of a row's runs; empty unless the row itself has run."""

    def mean(key: Callable[[Any], Any], digits: int) -> str:
        done = [run for run in runs.values() if "failed" not in run]
        values = [value for run in done if (value := key(run)) is not None]
        return f"{np.mean(values):.{digits}f}" if values and whole else ""

    worst = mean(lambda run: 100 * run["accuracy-worst-decile"], 2)
    collapse = [
        mean(lambda run, n=n: (run["curve"].get(n) or [[], [None]])[1][-1], 3)
        for n in ("global-nc2", "local-nc2")
    ]
    commits = sorted(
        {
            f"{r['commit']} ({r['gpu']})" if "gpu" in r else r["commit"]
            for r in runs.values()
        }
    )
    seconds = mean(lambda run: None if "gpu" in run else run["cpu-seconds"], 0)
    return (worst, *collapse, seconds, ", ".join(commits) if whole else "")


def missing(data: Data, cell: str) -> str:
    """Return a sentence on the seeds that rows with error bars still lack."""
    by_count: dict[int, list[str]] = {}
    for row in WITH_SPREAD if cell in SPREAD_CELLS else ():
        if (count := len(accuracies(data, cell, row))) < SEEDS:
            by_count.setdefault(count, []).append(f"`{row}`")
    parts = [f"of {', '.join(by_count[n])} {SEEDS - n}" for n in sorted(by_count)]
    return f"Missing of {SEEDS} seeds: {'; '.join(parts)}.\n\n" if parts else ""


def settings_table(data: Data) -> str:
    """Return a table of the settings in which rows differ."""
    common = set.intersection(
        *(set(row_settings.items()) for row_settings in data["rows"].values())
    )
    rows = []
    for row, settings in data["rows"].items():
        row_settings = [f"{n}={v}" for n, v in settings.items() if (n, v) not in common]
        row_settings = [
            text for text in row_settings if not text.startswith("evaluate-every")
        ]
        if row_settings:
            rows.append((f"`{row}`", f"`{' '.join(row_settings)}`"))
    return markdown(("row", "specific settings"), rows)


def body(data: Data) -> str:
    """Return the page below its heading."""
    classes = "; ".join(
        f"{cell} {', '.join(f'{value:.2f}' for value in by_seed)}"
        for cell, by_seed in data["classes"].items()
    )
    text = (
        "The tables are named by clients x shards per client. The protocol is that "
        "of the papers: CIFAR-10 (as JPEG), `cifar10-cnn`, 10 % of the clients in "
        f"each of {data['rounds']} rounds, batch size 10, SGD with learning rate "
        "0.01, momentum 0.5 and weight decay 1e-4, random crop and flip, float32. "
        "Accuracy is in %: the mean over all clients, sampled or not, each with its "
        "own test images, and over the last 10 rounds. For `-ft` it is that of the "
        "last round, after 10 epochs of the head. A global method without a separate "
        "run, and hence without a commit below, is the global model of its `-ft` "
        "variant before these epochs. ± is the sample standard deviation over seeds; "
        "figures without it are single-seed runs. Seeds start at 0. Each seed has "
        "its own partition, initial model and order of clients, the same for all "
        "rows.\n\nThere are two differences from the papers. First, there is one "
        "local epoch of the representation in every table; FedRep's code has 5 with "
        "5 shards and with 1,000 clients, as do rows whose name ends with `-5`. "
        "(`apfl-5` was computed with one thread, and from round 70 on with two, which "
        "changes only the rounding.) In "
        "`local-all`, all clients train in every round, and `per-fedavg-adapted` "
        "adapts for five epochs instead of one step before the test, both as in "
        f"FedRep's code.{_with_five_shards(data)} "
        "Second, the ten head epochs use the images without crop and flip, so that "
        "features are computed once. `fedrep` has 10 head epochs, and `fedrep-1` "
        "one, with crop and flip. `flute-star` has the head epochs before the joint "
        "epoch, as in its authors' code; `flute-star-after` has them after it, as in "
        "its paper. The specific hyper-parameters of `fedrep`, `flute` and "
        "`flute-star` are those of their authors. For the other methods, only those "
        "that [the small leaderboard](leaderboard-20x40.md) tuned by validation on "
        "other partitions were tuned.\n\nTwo shards of a client may have the same "
        f"class. The average number of classes per client, by seed, is: {classes}. A "
        "tenth of a class changes the accuracy by about half a point. A plain loop "
        "of `flute-star` outside of this package ended at 76.76 on the partition and "
        "the initial model of seed 0 of 100x5, and another one, on a different "
        "partition, at 78.33 (each measured once, without a page). Here it has "
        f"{spread(accuracies(data, '100x5', 'flute-star'))}. The variation over "
        "seeds, and hence partitions, is far smaller than the distance to the "
        "paper's 78.26, which is unexplained.\n"
    )
    for paper in PAPERS:
        text += f"\n## {paper}\n\n{papers_table(data, paper)}"
    for cell in CELLS:
        if cell in data["results"]:
            text += (
                f"\n## {cell}, sorted\n\nThe difference is computed over the same "
                "seeds, and hence on the same partitions, and has its own standard "
                "deviation. Rows are sorted by this difference, because a single "
                "seed may be an easy one. Seconds were measured on the machines of "
                "the runs, which differ in speed; a run on a GPU has none.\n\n"
                f"{missing(data, cell)}{whole_table(data, cell)}"
                f"\n![accuracy](papers_tables-{cell}.png)\n"
            )
    return f"{text}\n## Settings\n\n{settings_table(data)}"


def plot(data: Data) -> None:
    """Draw each cell: results beside the papers', and accuracy and NC2 by round."""
    for cell in data["results"]:
        _plot_cell(data, cell)


def _plot_cell(data: Data, cell: str) -> None:
    from matplotlib.figure import Figure

    runs = data["results"][cell]
    names = {*runs, *(n.removesuffix("-ft") for n in runs)}
    means = {
        name: float(np.mean(list(values.values())))
        for name in names
        if (values := accuracies(data, cell, name))
    }
    base = accuracies(data, cell, BASE)
    order = sorted(
        means, key=lambda name: rank(accuracies(data, cell, name), base), reverse=True
    )
    figure = Figure(figsize=(15, 0.26 * len(order) + 1.6), layout="constrained")
    left, *curves = figure.subplots(1, 4, width_ratios=(2, 1, 1, 1))
    for paper, marker in zip(PAPERS, ("|", "x"), strict=True):
        published = dict(PAPERS[paper].values())
        shown = [n for n in order if cell in published.get(n, {})]
        left.scatter(
            [published[n][cell] for n in shown],
            [order.index(n) for n in shown],
            marker=marker,
            s=60,
            color="C1",
            label=paper,
        )
    for y, name in enumerate(order):
        series = list(accuracies(data, cell, name).values())
        error = np.std(series, ddof=1) if len(series) > 1 else 0
        left.errorbar(
            means[name], y, xerr=error, fmt="o", ms=4, color="C0",
            label="here" if not y else None,
        )  # fmt: skip
    left.set(title=f"CIFAR-10, {cell}", xlabel="accuracy, %")
    left.set_yticks(range(len(order)), order)
    left.legend(fontsize=8)
    for axes, metric in zip(
        curves, ("accuracy", "global-nc2", "local-nc2"), strict=True
    ):
        for row in ("fedrep", "fedrep-1", "flute", "flute-star", "flute-star-after"):
            points = [
                run["curve"][metric] for run in runs.get(row, {}).values()
                if run.get("curve", {}).get(metric)
            ][:1]  # fmt: skip
            for series in points:
                axes.plot(*series, marker=".", label=row)
        axes.set(xlabel="round", title=f"{metric}, first seed")
    curves[0].legend(fontsize=8, loc="lower right")
    for axes in (left, *curves):
        axes.grid(alpha=0.3)
    figure.savefig(RESULTS / f"papers_tables-{cell}.png", dpi=120)
