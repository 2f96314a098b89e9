"""FedRep's and FLUTE's Table 1, CIFAR-10 columns: every method they list.

Protocol: shards as the authors make them, a share of 0.1 of the clients a round, 100
rounds, batch 10, SGD 0.01 with momentum 0.5 and weight decay 1e-4, random crop and
flip, one local epoch; mean over all clients and over the last 10 rounds (``-ft``: the
last round). Ten head epochs see the images as they are: their features are computed
once. Runs are made cell by cell and seed by seed; what is finished is never done again,
be it in the output folder or on the page that is here.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import RESULTS, write
from benchmarks.papers_page import SPREAD_CELLS, WITH_SPREAD, body, plot
from benchmarks.published import CELLS, PAPERS
from benchmarks.runs import (
    Job,
    alike,
    carry_out,
    carry_out_all,
    exit_status,
    finished,
    kept,
    of_page,
)
from flwr_frl.strategies.report.parallel import run_parallel
from flwr_frl.strategies.report.results import read_json, read_rows
from flwr_frl.task.data.folders import ImageFolder
from flwr_frl.task.data.partitions import PartitionSettings, partition
from flwr_frl.task.settings import Setting

# Of both papers, by the name that a row has here. A global method has its own row for
# the mean over the last rounds; without it, it is its `-ft` before the fine-tuning, in
# the last round. NC2 is looked at on the way where it is FLUTE's subject.
LOOK: dict[str, Setting] = {"evaluate-every": 10}
ROWS: dict[str, dict[str, Setting]] = {
    "fedrep": LOOK,
    "fedavg-ft": {},
    "flute": LOOK,
    "flute-star": LOOK,
    "fedper": {},
    # One head epoch on augmented images, as the papers have it, costs little.
    "fedrep-1": {"head-epochs": 1, "augment-head": True, **LOOK},
    "local": {},
    "ditto": {},
    "apfl": {},
    "lg-fedavg": {},
    "fedprox-ft": {},
    "scaffold-ft": {},
    "l2gd": {},
    "fed-mtl": {},
    "per-fedavg": {},
    "fedrod": {},
    "fedcp": {},
    "flute-star-after": {"head-epochs-order": "after"},
    "fedavg": {},
    "fedprox": {},
    "scaffold": {},
    "fedrep-5": {"representation-epochs": 5, **LOOK},
    "fedavg-ft-5": {"representation-epochs": 5},
}
# Cells of the rows with FedRep's five local epochs, which are far from its table.
FIVE_EPOCHS = {"fedrep-5": "1000x2", "fedavg-ft-5": "100x5"}
# What these papers' own algorithms have is known; the others have what the small
# leaderboard has tuned.
OWN = ("fedrep", "flute", "flute-star")
# Steps of all clients' epoch: L2GD's rounds, too, have one epoch, on average.
EPOCH = 50_000 // 10


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True, help="image folder")
    parser.add_argument(
        "--cells", nargs="+", default=CELLS, choices=CELLS, metavar="CLIENTSxSHARDS"
    )
    parser.add_argument(
        "--rows", nargs="+", default=list(ROWS), choices=ROWS, metavar="ROW"
    )
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=1, help="how many runs at a time")
    parser.add_argument("--tuned", default=str(RESULTS / "leaderboard-tuned.json"))
    parser.add_argument(
        "--page", action="store_true", help="write what is there, and run nothing"
    )
    parser.add_argument(
        "--anew", action="store_true", help="make the page's runs again, too"
    )
    parser.add_argument("--output", default="results/papers_tables")
    return parser.parse_args()


def algorithm_of(row: str) -> str:
    """Return the algorithm of a row."""
    return row.removesuffix("-1").removesuffix("-5").removesuffix("-after")


def wanted(row: str, cell: str) -> bool:
    """Return whether a paper has this row in this cell, in one order or another.

    FedRep's code has five local epochs, and what is compared over seeds has `local`.
    """
    if row in FIVE_EPOCHS:
        return cell == FIVE_EPOCHS[row]
    if row in WITH_SPREAD and cell in SPREAD_CELLS:
        return True
    plain = row.removesuffix("-after")
    return any(
        cell in published and ours in (row, plain)
        for methods in PAPERS.values()
        for ours, published in methods.values()
    )


class Tables:
    """The runs behind both tables, those that are there and those that are missing."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.data_dir = Path(arguments.data_dir).absolute()
        self.place = Path(arguments.output).absolute()
        self.tuned = read_json(Path(arguments.tuned))["algorithms"]
        self.page = {} if arguments.anew else of_page(RESULTS / "papers_tables.json")

    def job(self, cell: str, row: str, seed: int) -> Job:
        """Return a run."""
        clients, shards = map(int, cell.split("x"))
        algorithm = algorithm_of(row)
        settings: dict[str, Setting] = {
            "task": "image-folder",
            "data-dir": str(self.data_dir),
            "model": "cifar10-cnn",
            "num-clients": clients,
            "classes-per-client": shards,
            "fraction-train": 0.1,
            "num-server-rounds": self.arguments.rounds,
            "evaluate-every": 0,
            "augment-head": False,
            **({} if algorithm in OWN else self.tuned[algorithm]["picked"]),
            **ROWS[row],
            **({"l2gd-probability": clients / EPOCH} if algorithm == "l2gd" else {}),
            "seed": seed,
        }
        return Job(self.place / cell / f"{row}-{seed}", algorithm, settings)

    def jobs(self, cells: Any, rows: Any) -> list[Job]:
        """Return the runs of these cells and rows, seed by seed."""
        return [
            self.job(cell, row, seed)
            for cell in cells
            for seed in range(self.arguments.seeds)
            for row in rows
            if wanted(row, cell)
        ]

    def row_settings(self, row: str) -> dict[str, Setting]:
        """Return what a row's runs have in all cells, and seed 0."""
        settings = self.job("100x5", row, 0).settings
        of_cells = ("data-dir", "num-clients", "classes-per-client")
        return {n: v for n, v in settings.items() if n not in of_cells}

    def result(self, job: Job) -> dict[str, Any] | None:
        """Return what a run has found, here or for the page, if it is there."""
        if (result := finished(job)) is not None:
            return {**result, "curve": curve(job)}
        cell, (row, seed) = job.place.parent.name, job.place.name.rsplit("-", 1)
        before = self.page.get("rows", {}).get(row)
        if before is None or not alike(before, self.row_settings(row)):
            return None
        return kept(self.page["results"].get(cell, {}).get(row, {}).get(seed))

    def waiting(self) -> list[Job]:
        """Return the runs that are missing."""
        jobs = self.jobs(self.arguments.cells, self.arguments.rows)
        return [job for job in jobs if self.result(job) is None]

    def results(self) -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
        """Return what is there by cell, row and seed, of all cells and rows."""
        found: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
        for cell in CELLS:
            for job in self.jobs([cell], ROWS):
                row, seed = job.place.name.rsplit("-", 1)
                if (result := self.result(job)) is not None:
                    found.setdefault(cell, {}).setdefault(row, {})[seed] = result
        return found

    def classes(self) -> dict[str, list[float]]:
        """Return the mean number of classes a client holds, by cell and seed."""
        folder = ImageFolder(str(self.data_dir), 0)
        labels, count = folder.labels("train"), len(folder.classes)
        found = {}
        for cell in CELLS:
            clients, shards = map(int, cell.split("x"))
            found[cell] = [
                float(np.mean([len(np.unique(labels[own])) for own in train]))
                for seed in range(self.arguments.seeds)
                for train, _ in [
                    partition(
                        labels,
                        folder.labels("test"),
                        count,
                        clients,
                        PartitionSettings(seed=seed, classes_per_client=shards),
                    )
                ]
            ]
        return found

    def write(self) -> None:
        """Write the page of what is there."""
        results = self.results()
        by_seed = [own for rows in results.values() for own in rows.values()]
        data = {
            "rows": {row: self.row_settings(row) for row in ROWS},
            "rounds": self.arguments.rounds,
            "seeds": self.arguments.seeds,
            "classes": self.classes(),
            "results": results,
            "seconds": sum(r["cpu-seconds"] for own in by_seed for r in own.values()),
        }
        heading = "FedRep's and FLUTE's Table 1, CIFAR-10 columns"
        write("papers_tables", heading, body(data), data)
        plot(data)


def curve(job: Job) -> dict[str, list[list[float]]]:
    """Return what a run measured on the way: rounds and values of each metric."""
    rows = read_rows(job.place / job.algorithm / "metrics.jsonl")
    found = {}
    for metric in ("accuracy", "global-nc2", "local-nc2"):
        points = [(row["round"], row[metric]) for row in rows if metric in row]
        found[metric] = [list(values) for values in zip(*points, strict=True)]
    return found


def make_and_write() -> None:
    """Run what has not run yet and write ``results/papers_tables``."""
    arguments = parse()
    tables = Tables(arguments)
    try:
        if arguments.jobs > 1 and not arguments.page:
            items = [(job,) for job in tables.waiting()]
            run_parallel(carry_out, items, arguments.jobs)
        elif not arguments.page:
            carry_out_all("runs", tables.waiting(), tables.waiting)
    finally:
        tables.write()


if __name__ == "__main__":
    sys.exit(exit_status(make_and_write))
