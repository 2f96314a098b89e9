"""FedRep's and FLUTE's Table 1, CIFAR-10 columns, with every method that they list.

Protocol: shards as in the authors' code, 10 % of the clients in each of 100 rounds,
batch size 10, SGD with learning rate 0.01, momentum 0.5 and weight decay 1e-4, random
crop and flip, one local epoch; mean over all clients and over the last 10 rounds
(``-ft``: the last round). Ten head epochs use images without augmentation, so that
features are computed once. Runs are made cell by cell and seed by seed. Runs that are
finished, in the output folder or on the existing page, are not repeated.
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
from flwr_frl.common.settings import Setting
from flwr_frl.results.parallel import run_parallel
from flwr_frl.results.results import read_json, read_rows
from flwr_frl.task.data.folders import ImageFolder
from flwr_frl.task.data.partitions import PartitionSettings, partition

# The rows that also have a `-5` row, besides FedRep's.
ALSO_FIVE = (
    *("fedavg-ft", "fedper", "lg-fedavg", "apfl"),
    *("fedprox-ft", "scaffold-ft", "fed-mtl", "per-fedavg"),
)
# Settings of each row of the page. The row of a global method is the mean over the last
# rounds. If it has not run, its accuracy is that of its `-ft` row before fine-tuning,
# in the last round. Rows with `LOOK` are evaluated during training, for curves of NC2.
LOOK: dict[str, Setting] = {"evaluate-every": 10}
ROWS: dict[str, dict[str, Setting]] = {
    "fedrep": LOOK,
    "fedavg-ft": {},
    "flute": LOOK,
    "flute-star": LOOK,
    "fedper": {},
    # One head epoch on augmented images, as in the papers, takes little time.
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
    **{f"{row}-5": {"representation-epochs": 5} for row in ALSO_FIVE},
    "per-fedavg-adapted": {"adaptation-epochs": 5},
    "local-all": {"fraction-train": 1.0},
}
# The only cells of the rows that are as in FedRep's code: with five local epochs, with
# five epochs of adaptation before the test, or with all clients in every round.
AS_IN_CODE = {
    **{f"{row}-5": ("1000x2", "100x5") for row in ("fedrep", *ALSO_FIVE)},
    "per-fedavg-adapted": ("1000x2", "100x2", "100x5"),
    "local-all": ("100x5",),
}
# Algorithms of these papers, whose settings are published. The others use the settings
# that were tuned for the small leaderboard.
OWN = ("fedrep", "flute", "flute-star")
# Steps in an epoch of all clients together. L2GD's rounds also have one epoch on
# average.
EPOCH = 50_000 // 10


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True, help="CIFAR-10 as an image folder")
    parser.add_argument(
        "--cells", nargs="+", default=CELLS, choices=CELLS, metavar="CLIENTSxSHARDS"
    )
    parser.add_argument(
        "--rows", nargs="+", default=list(ROWS), choices=ROWS, metavar="ROW"
    )
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=1, help="number of parallel runs")
    parser.add_argument("--tuned", default=str(RESULTS / "leaderboard-tuned.json"))
    parser.add_argument(
        "--page",
        action="store_true",
        help="only write the page of finished runs",
    )
    parser.add_argument(
        "--anew", action="store_true", help="also repeat the runs on the page"
    )
    parser.add_argument("--output", default="results/papers_tables")
    return parser.parse_args()


def algorithm_of(row: str) -> str:
    """Return the algorithm of a row."""
    for ending in ("-1", "-5", "-adapted", "-all", "-after"):
        row = row.removesuffix(ending)
    return row


def wanted(row: str, cell: str) -> bool:
    """Return whether a cell has a row.

    That is the case if a paper reports the method for the cell, for either order of
    head epochs. Rows as in FedRep's code have their own cells, and cells with error
    bars also have all rows of `WITH_SPREAD`.
    """
    if row in AS_IN_CODE:
        return cell in AS_IN_CODE[row]
    if row in WITH_SPREAD and cell in SPREAD_CELLS:
        return True
    plain = row.removesuffix("-after")
    return any(
        cell in published and ours in (row, plain)
        for methods in PAPERS.values()
        for ours, published in methods.values()
    )


class Tables:
    """The runs of both tables, finished or missing."""

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
        """Return the settings of a row that are the same in all cells, with seed 0."""
        settings = self.job("100x5", row, 0).settings
        of_cells = ("data-dir", "num-clients", "classes-per-client")
        return {n: v for n, v in settings.items() if n not in of_cells}

    def result(self, job: Job) -> dict[str, Any] | None:
        """Return a run's result from the output folder or the page; None if missing."""
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
        """Return all results by cell, row and seed."""
        results: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
        for cell in CELLS:
            for job in self.jobs([cell], ROWS):
                row, seed = job.place.name.rsplit("-", 1)
                if (result := self.result(job)) is not None:
                    results.setdefault(cell, {}).setdefault(row, {})[seed] = result
        return results

    def classes(self) -> dict[str, list[float]]:
        """Return the mean number of classes per client, by cell and seed."""
        folder = ImageFolder(str(self.data_dir), 0)
        labels = folder.labels("train")
        by_cell = {}
        for cell in CELLS:
            clients, shards = map(int, cell.split("x"))
            by_cell[cell] = [
                float(np.mean([len(np.unique(labels[part])) for part in train]))
                for seed in range(self.arguments.seeds)
                for train, *_ in [
                    partition(
                        labels,
                        folder.labels("test"),
                        clients,
                        PartitionSettings(seed=seed, classes_per_client=shards),
                    )
                ]
            ]
        return by_cell

    def write(self) -> None:
        """Write the page of all finished runs."""
        results = self.results()
        by_seed = [runs for rows in results.values() for runs in rows.values()]
        data = {
            "rows": {
                row: self.row_settings(row)
                for row in ROWS
                if any(row in rows for rows in results.values())
            },
            "rounds": self.arguments.rounds,
            "seeds": self.arguments.seeds,
            "classes": self.classes(),
            "results": results,
            "seconds": sum(r["cpu-seconds"] for runs in by_seed for r in runs.values()),
        }
        heading = "FedRep's and FLUTE's Table 1, CIFAR-10 columns"
        write("papers_tables", heading, body(data), data)
        plot(data)


def curve(job: Job) -> dict[str, list[list[float]]]:
    """Return the evaluated rounds and the values of each metric of a run."""
    rows = read_rows(job.place / job.algorithm / "metrics.jsonl")
    curves = {}
    for metric in ("accuracy", "global-nc2", "local-nc2"):
        points = [(row["round"], row[metric]) for row in rows if metric in row]
        curves[metric] = [list(values) for values in zip(*points, strict=True)]
    return curves


def make_and_write() -> None:
    """Make the missing runs and write ``results/papers_tables``."""
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
