"""Every algorithm for images on the same cells: accuracy, bytes and seconds.

A cell is a partition of CIFAR-10: ``shards-S`` (S shards per client) or
``dirichlet-ALPHA``. All algorithms have the same model, rounds, batches, sampled
clients, local epochs and learning rate. Algorithm-specific hyper-parameters are tuned
on validation sets of one cell; the file of ``--tuned`` stores them. Runs are made seed
by seed, so that an interruption leaves complete tables of fewer seeds. Runs that are
finished, in the output folder, on the existing page or, with the same settings, on that
of ``benchmarks/papers_tables.py``, are not repeated; interrupted runs are.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, write
from benchmarks.leaderboard_cells import partition_of, subset, usable_seeds
from benchmarks.leaderboard_page import body, plot
from benchmarks.runs import (
    Job,
    alike,
    carry_out_all,
    exit_status,
    finished,
    kept,
    of_page,
)
from flwr_frl.common.settings import Setting, SettingsError
from flwr_frl.results.results import read_json, write_json
from flwr_frl.results.tune import VALIDATION_FRACTION, points
from flwr_frl.task.data.folders import ImageFolder

CELLS = ("shards-2", "shards-5", "dirichlet-0.1", "dirichlet-0.5")
# Cell on which algorithm-specific settings are tuned.
TUNING_CELL = "shards-5"
SHARDS = "classes-per-client"
# Grids of the settings that are tuned, around the values of the papers. "" tunes
# nothing; the name of another algorithm adopts the tuned settings of that one.
GRIDS = {
    "fedavg": "",
    "fedavg-ft": "",
    "fedrep": "",
    "fedper": "",
    "lg-fedavg": "",
    "local": "",
    "flute": "nc-weight=0.1,0.25,0.5",
    "flute-star": "flute",
    "fedprox": "proximal-mu=0.001,0.01,0.1,1.0",
    "fedprox-ft": "fedprox",
    "scaffold": "global-learning-rate=0.5,1.0",
    "scaffold-ft": "scaffold",
    "ditto": "ditto-lambda=0.05,0.1,1.0",
    "apfl": "apfl-alpha=0.25,0.5,0.75",
    "fedbabu": 'finetune-part="head","all"',
    "fedproto": "fedproto-lambda=0.1,1.0",
    "fedala": "ala-learning-rate=0.1,1.0",
    "feddbe": "dbe-kappa=1.0,10.0,50.0",
    "fedrod": "",
    "fedcp": "fedcp-lambda=0.1,1.0,5.0",
    "l2gd": "l2gd-lambda=0.1,1.0,5.0,10.0",
    "fed-mtl": "mtl-lambda=0.1,1.0,10.0",
    "per-fedavg": "inner-learning-rate=0.01,0.05 adaptation-epochs=0,5",
    "hf-maml": "per-fedavg",
    "pfedme": "pfedme-eta=0.005,0.02,0.05",
    "srpfl": "",
    "moon": "moon-mu=0.1,1.0,5.0",
    "feddyn": "feddyn-alpha=0.01,0.1,1.0",
    "fedpac": "fedpac-head-epochs=1,5",
    "fedas": "fedas-learning-rate=0.001,0.01",
    "gpfl": "gpfl-lambda=0.001,0.01,0.1",
    "pfedfda": "",
    "fedamp": "fedamp-self-weight=0.1,0.5",
    "fedfomo": "fomo-models=2,5",
    "ifca": "num-clusters=2,4",
    "pfedhn": "hypernetwork-learning-rate=0.01,0.05",
    "knn-per": "knn-lambda=0.25,0.5,0.75",
}
# Settings in which an algorithm must differ from the others.
OWN: dict[str, dict[str, Setting]] = {
    # Rounding to bfloat16 exceeds the finite difference of gradients.
    "hf-maml": {"bfloat16": False},
}


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True, help="CIFAR-10 as an image folder")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--cells", nargs="+", default=CELLS)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument(
        "--algorithms", nargs="+", default=list(GRIDS), choices=GRIDS, metavar="NAME"
    )
    parser.add_argument("--fraction", type=float, default=0.15)
    parser.add_argument("--name", default="", help="added to the page's name")
    parser.add_argument("--evaluate-last", type=int, default=5, metavar="ROUNDS")
    parser.add_argument(
        "--images",
        type=int,
        default=80,
        help="training images per client, the first of each class, with half as many "
        "test images; 0 uses all images of the folder",
    )
    parser.add_argument(
        "--float32", action="store_true", help="do not use bfloat16 in the forward pass"
    )
    parser.add_argument("--tuned", default=str(RESULTS / "leaderboard-tuned.json"))
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument(
        "--anew", action="store_true", help="also repeat the runs on the pages"
    )
    parser.add_argument("--output", default="results/leaderboard")
    return parser.parse_args()


class Leaderboard:
    """The runs of a table, finished or missing."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        size = f"{arguments.clients}x{arguments.rounds}"
        size += arguments.name and f"-{arguments.name}"
        self.name = f"leaderboard-{size}"
        self.place = Path(arguments.output).absolute() / size
        data_dir = Path(arguments.data_dir).absolute()
        folder = ImageFolder(str(data_dir), 0)
        if arguments.images:
            train = arguments.clients * arguments.images // len(folder.classes)
            data_dir = subset(data_dir, self.place, train, train // 2)
            folder = ImageFolder(str(data_dir), 0)
        self.common: dict[str, Setting] = {
            "task": "image-folder",
            "data-dir": str(data_dir),
            "model": "cifar10-cnn",
            "num-clients": arguments.clients,
            "num-server-rounds": arguments.rounds,
            "fraction-train": arguments.fraction,
            "evaluate-every": 0,
            "evaluate-last": arguments.evaluate_last,
            "augment-head": False,
            "bfloat16": not arguments.float32,
        }
        cells = {*arguments.cells, TUNING_CELL}
        self.seeds = {
            cell: usable_seeds(folder, cell, arguments.clients, arguments.seeds)
            for cell in cells
        }
        self.tuned_file = Path(arguments.tuned)
        self.tuned: dict[str, Any] = {}
        if self.tuned_file.is_file():
            self.tuned = read_json(self.tuned_file)["algorithms"]
        self.page = of_page(RESULTS / f"{self.name}.json")
        self.papers = of_page(RESULTS / "papers_tables.json")
        if arguments.anew:
            self.page, self.papers = {}, {}

    def job(self, cell: str, algorithm: str, number: int) -> Job:
        """Return the run of a cell with its ``number``-th seed."""
        seed = self.seeds[cell][number]
        settings = {
            **self.common,
            **OWN.get(algorithm, {}),
            **partition_of(cell),
            **self.tuned[algorithm]["picked"],
            "seed": seed,
        }
        return Job(self.place / cell / f"{algorithm}-{seed}", algorithm, settings)

    def tuning_jobs(self, algorithm: str) -> list[tuple[dict[str, Setting], Job]]:
        """Return the points of an algorithm's grid, and the run of each."""
        held_out: dict[str, Setting] = {
            "validation-fraction": VALIDATION_FRACTION,
            "evaluate-on": "validation",
        }
        jobs = []
        for point in points(GRIDS[algorithm]):
            settings = {
                **self.common,
                **OWN.get(algorithm, {}),
                **partition_of(TUNING_CELL),
                **point,
                **held_out,
                "seed": self.seeds[TUNING_CELL][0],
            }
            name = "-".join([algorithm, *(str(value) for value in point.values())])
            jobs.append((point, Job(self.place / "tune" / name, algorithm, settings)))
        return jobs

    def pick(self, algorithm: str) -> None:
        """Store the point of an algorithm's grid with the best accuracy."""
        tried = []
        for point, job in self.tuning_jobs(algorithm):
            result = finished(job)
            assert result is not None
            own = {"accuracy", "failed"} & set(result)
            tried.append({"settings": point} | {name: result[name] for name in own})
        scored = [own for own in tried if "accuracy" in own]
        if not scored:
            raise SettingsError(f"no point of {algorithm}'s grid could be run: {tried}")
        best = max(scored, key=lambda own: float(own["accuracy"]))
        self.keep(algorithm, {"points": tried, "picked": best["settings"]})

    def keep(self, algorithm: str, found: dict[str, Any]) -> None:
        """Add an algorithm's settings to the file of tuned settings."""
        self.tuned[algorithm] = found
        write_json(
            self.tuned_file,
            {
                "by": self.name,
                "cell": TUNING_CELL,
                "seed": self.seeds[TUNING_CELL][0],
                "algorithms": self.tuned,
            },
        )

    def tuning(self) -> Iterator[Job]:
        """Yield the runs that tuning still needs, and store the best settings."""
        for algorithm in self.arguments.algorithms:
            source = GRIDS[algorithm] if GRIDS[algorithm] in GRIDS else algorithm
            if source not in self.tuned:
                if GRIDS[source]:
                    for _, job in self.tuning_jobs(source):
                        if finished(job) is None:
                            yield job
                    self.pick(source)
                else:
                    self.keep(source, {"points": [], "picked": {}})
            if algorithm not in self.tuned:
                picked = self.tuned[source]["picked"]
                self.keep(algorithm, {"as": source, "picked": picked})

    def jobs(self) -> Iterator[Job]:
        """Yield all runs of the table, seed by seed."""
        for number in range(self.arguments.seeds):
            for cell in self.arguments.cells:
                for algorithm in self.arguments.algorithms:
                    yield self.job(cell, algorithm, number)

    def result(self, job: Job) -> dict[str, Any] | None:
        """Return a run's result from the output folder or a page; None if missing."""
        return finished(job) or self.of_this_page(job) or self.of_papers(job)

    def of_this_page(self, job: Job) -> dict[str, Any] | None:
        """Return a run's result from the existing page; None if settings differ."""
        cell, algorithm = job.place.parent.name, job.algorithm
        seeds = self.page.get("seeds", {}).get(cell, [])
        before = {
            **self.page.get("settings", {}),
            **self.page.get("own", {}).get(algorithm, {}),
            **partition_of(cell),
            **self.page.get("tuned", {}).get(algorithm, {}).get("picked", {}),
            "seed": job.settings["seed"],
        }
        if before["seed"] not in seeds or not alike(before, job.settings):
            return None
        runs = self.page["results"].get(algorithm, {}).get(cell, [None] * len(seeds))
        return kept(runs[seeds.index(before["seed"])])

    def of_papers(self, job: Job) -> dict[str, Any] | None:
        """Return a run's result from the papers' tables, without its curve."""
        clients, shards = (job.settings.get(n) for n in ("num-clients", SHARDS))
        of_row = self.papers.get("rows", {}).get(job.algorithm)
        if of_row is None or shards is None:
            return None
        seed = job.settings["seed"]
        if not alike(
            {**of_row, "num-clients": clients, SHARDS: shards, "seed": seed},
            job.settings,
        ):
            return None
        cell = self.papers["results"].get(f"{clients}x{shards}", {})
        run = kept(cell.get(job.algorithm, {}).get(str(seed)))
        return run and {name: run[name] for name in run if name != "curve"}

    def waiting(self) -> list[Job]:
        """Return the runs that are missing."""
        return [job for job in self.jobs() if self.result(job) is None]

    def results(self) -> dict[str, dict[str, list[dict[str, Any] | None]]]:
        """Return the result of each seed, or None, by algorithm and cell."""
        return {
            algorithm: {
                cell: [
                    self.result(self.job(cell, algorithm, number))
                    if algorithm in self.tuned
                    else None
                    for number in range(self.arguments.seeds)
                ]
                for cell in self.arguments.cells
            }
            for algorithm in self.arguments.algorithms
        }

    def write(self) -> None:
        """Write the page of all finished runs."""
        results = self.results()
        data = {
            "settings": {n: v for n, v in self.common.items() if n != "data-dir"},
            "images": self.arguments.images,
            "own": OWN,
            "seeds": {cell: self.seeds[cell] for cell in self.arguments.cells},
            "tuned": self.tuned,
            "results": results,
        }
        write(self.name, "A leaderboard on CIFAR-10", body(self.name, data), data)
        plot(self.name, results)


def make_and_write() -> None:
    """Make the missing runs and write ``results/leaderboard-<size>``."""
    board = Leaderboard(parse())
    try:
        if not board.arguments.page:
            carry_out_all("tuning", board.tuning())
            carry_out_all("runs", board.waiting(), board.waiting)
    finally:
        board.write()


if __name__ == "__main__":
    sys.exit(exit_status(make_and_write))
