"""Figures of the papers on a small part of CIFAR-10.

``python -m benchmarks.papers_small --data-dir DIR`` trains `cifar10-cnn` on 20 clients
with 80 images each, as in the small leaderboard. FLUTE, Figures 5 to 8: accuracy,
Global NC2 and Averaged Local NC2 by round. FedRep, Figure 5: accuracy by the number of
local epochs, of the heads (FedRep) or of the model (FedAvg); Figure 6: accuracy of new
clients by the number of epochs in which they train their head. Finished runs in
``--output`` are not repeated.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import RESULTS, markdown, write
from benchmarks.leaderboard_cells import partition_of, subset
from benchmarks.runs import Job, carry_out_all, exit_status, finished
from flwr_frl.common.settings import Setting
from flwr_frl.results.results import METRICS, read_rows

CLIENTS, IMAGES, ROUNDS, CLASSES = 20, 80, 40, 10
SETTINGS: dict[str, Setting] = {
    "task": "image-folder",
    "model": "cifar10-cnn",
    "num-clients": CLIENTS,
    "num-server-rounds": ROUNDS,
    "fraction-train": 0.15,
    "evaluate-last": 5,
    "augment-head": False,
    "bfloat16": True,
}
CELLS = ("shards-2", "shards-5")
# Methods of FLUTE's figures: algorithm and settings.
METHODS: dict[str, tuple[str, dict[str, Setting]]] = {
    "FedAvg": ("fedavg", {}),
    "LG-FedAvg": ("lg-fedavg", {}),
    "FedPer": ("fedper", {}),
    "FedRep": ("fedrep", {"head-epochs": 1}),
    "FedRep*": ("fedrep", {"head-epochs": 10}),
    "FedRoD": ("fedrod", {}),
    "FedCP": ("fedcp", {"fedcp-lambda": 0.1}),
    "FLUTE": ("flute", {}),
    "FLUTE*": ("flute-star", {}),
}
CURVES = ("accuracy", "global-nc2", "local-nc2")
EPOCHS = (1, 2, 5)
# The setting for the local epochs of FedRep and of FedAvg in Figure 5.
EPOCHS_OF = {"fedrep": "head-epochs", "fedavg": "representation-epochs"}
EPOCHS_CELL = "shards-2"
# Number of new clients, the epochs in which they train their head, and their setting.
NEW, NEW_EPOCHS = 5, (1, 2, 5, 10)
NEW_EPOCHS_OF = {
    "fedrep": "newcomer-epochs",
    "fedper": "newcomer-epochs",
    "fedavg-ft": "finetune-epochs",
}
# Accuracies of an algorithm by number of epochs and seed.
ByEpochs = dict[str, list[list[float]]]


class Figures:
    """The runs of all figures."""

    def __init__(self, data_dir: Path, output: Path, seeds: int) -> None:
        train = CLIENTS * IMAGES // CLASSES
        folder = subset(data_dir.absolute(), output, train, train // 2)
        self.output, self.seeds = output, seeds
        self.common = {**SETTINGS, "data-dir": str(folder)}

    def job(self, place: str, algorithm: str, cell: str, own: Any, seed: int) -> Job:
        """Return a run."""
        settings = {**self.common, **partition_of(cell), **own, "seed": seed}
        return Job(self.output / place / f"{cell}-{seed}", algorithm, settings)

    def curves(self, method: str, cell: str) -> list[Job]:
        """Return the runs of a method, by seed."""
        algorithm, settings = METHODS[method]
        settings = {"evaluate-every": 4, **settings}
        place = f"curves-{method.replace('*', '-star')}"
        seeds = range(self.seeds)
        return [self.job(place, algorithm, cell, settings, seed) for seed in seeds]

    def epochs(self, algorithm: str, epochs: int) -> list[Job]:
        """Return the runs with a number of local epochs, by seed."""
        extra = {"evaluate-every": 0, EPOCHS_OF[algorithm]: epochs}
        place, seeds = f"epochs-{algorithm}-{epochs}", range(self.seeds)
        return [self.job(place, algorithm, EPOCHS_CELL, extra, seed) for seed in seeds]

    def newcomers(self, algorithm: str, epochs: int) -> list[Job]:
        """Return the runs whose new clients train for some epochs, by seed."""
        extra = {
            "evaluate-every": 0,
            "new-clients": NEW,
            NEW_EPOCHS_OF[algorithm]: epochs,
        }
        place, seeds = f"newcomers-{algorithm}-{epochs}", range(self.seeds)
        return [self.job(place, algorithm, EPOCHS_CELL, extra, seed) for seed in seeds]

    def missing(self) -> list[Job]:
        """Return all runs that are not finished."""
        jobs = [j for e in EPOCHS for a in EPOCHS_OF for j in self.epochs(a, e)]
        jobs += [
            j for e in NEW_EPOCHS for a in NEW_EPOCHS_OF for j in self.newcomers(a, e)
        ]
        jobs += [j for c in CELLS for m in METHODS for j in self.curves(m, c)]
        return [job for job in jobs if finished(job) is None]


def rows_of(job: Job) -> list[dict[str, Any]]:
    """Return a finished run's rounds."""
    return read_rows(job.place / job.algorithm / METRICS)


def mean_curve(jobs: list[Job], name: str) -> tuple[list[int], list[float]]:
    """Return the evaluated rounds, and a metric's mean over the seeds."""
    runs = [{r["round"]: r[name] for r in rows_of(job) if name in r} for job in jobs]
    rounds = sorted(set.intersection(*map(set, runs)))
    return rounds, [float(np.mean([run[r] for run in runs])) for r in rounds]


def spread(values: list[float], digits: int = 1) -> str:
    """Return the mean, and the standard deviation if there are several values."""
    text = f"{np.mean(values):.{digits}f}"
    return text + (f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else "")


def final(jobs: list[Job], name: str = "accuracy") -> list[float]:
    """Return the final accuracy, or another one of the summary, in %, by seed."""
    return [100 * float((finished(job) or {})[name]) for job in jobs]


def last(curve: tuple[list[int], list[float]]) -> str:
    """Return the last value; empty for heads of several layers, which have no NC2."""
    return f"{curve[1][-1]:.3f}" if curve[1] else ""


def curves_table(data: dict[str, Any]) -> str:
    """Return accuracy and both NC2 after the last round."""
    rows = [
        (
            method,
            *(
                cell
                for results in (cells[c] for c in CELLS)
                for cell in (
                    spread(results["final"]),
                    last(results["global-nc2"]),
                    last(results["local-nc2"]),
                )
            ),
        )
        for method, cells in data.items()
    ]
    heads = [
        f"{name}, {cell}"
        for cell in CELLS
        for name in ("accuracy (%)", "Global NC2", "Local NC2")
    ]
    return markdown(("method", *heads), rows)


def epochs_table(epochs: tuple[int, ...], values: ByEpochs) -> str:
    """Return accuracies by number of epochs."""
    rows = [(f"`{name}`", *map(spread, each)) for name, each in values.items()]
    return markdown(("method", *(f"E = {e}" for e in epochs)), rows)


def plot(curves: dict[str, Any], epochs: ByEpochs, newcomers: ByEpochs) -> None:
    """Draw all figures."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1 + 3 * len(CELLS)), layout="constrained")
    panels = figure.subplots(len(CELLS), len(CURVES), squeeze=False)
    for row, cell in zip(panels, CELLS, strict=True):
        for axes, name in zip(row, CURVES, strict=True):
            for i, (method, cells) in enumerate(curves.items()):
                ours = method.startswith("FLUTE")
                axes.plot(
                    *cells[cell][name], color=f"C{i}", lw=2 if ours else 1, label=method
                )
            axes.set(title=f"{name}, {cell}", xlabel="round")
            axes.grid(alpha=0.3)
    panels[0][-1].legend(fontsize=7)
    figure.savefig(RESULTS / "papers_small-nc2.png", dpi=120)

    figure = Figure(figsize=(10, 3.4), layout="constrained")
    panels = (
        (EPOCHS, epochs, "local epochs E, all clients"),
        (NEW_EPOCHS, newcomers, "epochs of the head, new clients"),
    )
    for axes, (ticks, curve, label) in zip(figure.subplots(1, 2), panels, strict=True):
        for algorithm, values in curve.items():
            means = [float(np.mean(each)) for each in values]
            low, high = ([f(each) for each in values] for f in (min, max))
            (line,) = axes.plot(ticks, means, marker="o", label=algorithm)
            axes.fill_between(ticks, low, high, alpha=0.2, color=line.get_color(), lw=0)
        axes.set(xlabel=label, ylabel="accuracy, %", xticks=ticks)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(RESULTS / "papers_small-epochs.png", dpi=120)


BODY = """{clients} clients, {rounds} rounds, 3 clients per round, {images} training
images a client (CIFAR-10 as JPEG) and half as many for its tests, `cifar10-cnn`, one
local epoch, learning rate 0.01, seeds: {seeds}. Accuracy is the mean over all clients
and the last 5 rounds, in %. This is far smaller than the papers' protocol, with which
[the papers' tables](papers_tables.md) were made; compare methods with each other only,
and with one seed only where they are far apart.

## FLUTE, Figures 5 to 8: NC2 by round

FedRep* and FLUTE* have 10 epochs of the head, FedRep has one. NC2 is that of the last
round, for heads of one layer; curves are means over the seeds.

{curves}

![Accuracy, Global NC2 and Local NC2 by round](papers_small-nc2.png)

## FedRep, Figure 5: local epochs

{cell}. FedRep's E are epochs of the head, followed by one of the representation;
FedAvg's E are epochs of the whole model.

{epochs}

![Accuracy by the number of epochs; bands span the seeds](papers_small-epochs.png)

## FedRep, Figure 6: new clients

{cell}. {new} of the {clients} clients take no part in the training, and train a head
afterwards on the representation that has been learned, for E epochs. The paper trains
on FEMNIST's letters, and its new clients have digits.

{newcomers}
"""


def main() -> int:
    """Make the runs that are missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True, help="CIFAR-10 as an image folder")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--output", default="results/papers_small")
    arguments = parser.parse_args()
    output = Path(arguments.output).absolute()
    figures = Figures(Path(arguments.data_dir), output, arguments.seeds)

    def curves_of(method: str, cell: str) -> dict[str, Any]:
        jobs = figures.curves(method, cell)
        return {n: mean_curve(jobs, n) for n in CURVES} | {"final": final(jobs)}

    def make() -> None:
        missing: Callable[[], list[Job]] = figures.missing
        carry_out_all("small figures", missing(), missing)
        curves = {m: {c: curves_of(m, c) for c in CELLS} for m in METHODS}
        epochs = {a: [final(figures.epochs(a, e)) for e in EPOCHS] for a in EPOCHS_OF}
        newcomers = {
            a: [
                final(figures.newcomers(a, e), "accuracy-newcomers") for e in NEW_EPOCHS
            ]
            for a in NEW_EPOCHS_OF
        }
        plot(curves, epochs, newcomers)
        body = BODY.format(
            clients=CLIENTS,
            rounds=ROUNDS,
            images=IMAGES,
            seeds=", ".join(map(str, range(arguments.seeds))),
            cell=EPOCHS_CELL,
            curves=curves_table(curves),
            epochs=epochs_table(EPOCHS, epochs),
            new=NEW,
            newcomers=epochs_table(NEW_EPOCHS, newcomers),
        )
        data = {"curves": curves, "epochs": epochs, "newcomers": newcomers}
        title = "NC2 by round, epochs and new clients, on a small part of CIFAR-10"
        write("papers_small", title, body, data)

    return exit_status(make)


if __name__ == "__main__":
    raise SystemExit(main())
