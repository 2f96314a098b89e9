"""Every algorithm for images on the same cells: accuracy, bytes and seconds.

A cell is a partition of CIFAR-10: ``shards-S`` (S shards a client) or
``dirichlet-ALPHA``. All algorithms have the same model, rounds, batches, sampled
clients, local epochs and learning rate; what is an algorithm's own is tuned on
validation sets of one cell, and ``--tuned`` keeps what was found. Runs are made seed by
seed, so that whatever ends this script leaves whole tables of fewer seeds. What is
finished is never done again; a run that was cut off is repeated.
"""

import argparse
import contextlib
import logging
import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import RESULTS, provenance, write
from leaderboard_cells import partition_of, subset, usable_seeds
from leaderboard_page import body, plot
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from simulation import simulate
from strategies.server.results import read_json, write_json
from strategies.server.terminal import ended_as_by_ctrl_c
from strategies.server.tune import VALIDATION_FRACTION, points
from task.data.folders import ImageFolder
from task.settings import Setting, SettingsError

CELLS = ("shards-2", "shards-5", "dirichlet-0.1", "dirichlet-0.5")
# Where an algorithm's own settings are tuned.
TUNING_CELL = "shards-5"
# What is tuned, around what the papers have; "" is nothing, and the name of another
# algorithm takes what that one was tuned to.
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
}
# What an algorithm needs otherwise than the others have it.
OWN: dict[str, dict[str, Setting]] = {
    # A small difference of gradients drowns in bfloat16's rounding.
    "hf-maml": {"bfloat16": False},
}
RESULT = "result.json"


class Job(NamedTuple):
    """A run to be made: where, of what, and with what settings."""

    place: Path
    algorithm: str
    settings: dict[str, Setting]


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True, help="image folder")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--cells", nargs="+", default=CELLS)
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument(
        "--algorithms", nargs="+", default=list(GRIDS), choices=GRIDS, metavar="NAME"
    )
    parser.add_argument("--fraction", type=float, default=0.15)
    parser.add_argument("--evaluate-last", type=int, default=5, metavar="ROUNDS")
    parser.add_argument(
        "--images",
        type=int,
        default=80,
        help="training images for each client, the first of each class; half as many "
        "for its tests; 0: all of the folder",
    )
    parser.add_argument(
        "--float32", action="store_true", help="no bfloat16 in the forward pass"
    )
    parser.add_argument("--tuned", default=str(RESULTS / "leaderboard-tuned.json"))
    parser.add_argument("--page", action="store_true", help="write it and run nothing")
    parser.add_argument("--output", default="results/leaderboard")
    return parser.parse_args()


class Leaderboard:
    """The runs of a table, those that are there and those that are missing."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        size = f"{arguments.clients}x{arguments.rounds}"
        self.name = f"leaderboard-{size}"
        self.place = Path(arguments.output).absolute() / size
        data_dir = Path(arguments.data_dir).absolute()
        found = ImageFolder(str(data_dir), 0)
        if arguments.images:
            train = arguments.clients * arguments.images // len(found.classes)
            data_dir = subset(data_dir, self.place, train, train // 2)
            found = ImageFolder(str(data_dir), 0)
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
            cell: usable_seeds(found, cell, arguments.clients, arguments.seeds)
            for cell in cells
        }
        self.tuned_file = Path(arguments.tuned)
        self.tuned: dict[str, Any] = {}
        if self.tuned_file.is_file():
            self.tuned = read_json(self.tuned_file)["algorithms"]

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
        """Write down which of an algorithm's points has done best."""
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
        """Add what an algorithm is run with to the file of tuned settings."""
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
        """Yield the runs that tuning still needs, and write down what they found."""
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

    def results(self) -> dict[str, dict[str, list[dict[str, Any] | None]]]:
        """Return by algorithm and cell what is there of each seed, or None."""
        return {
            algorithm: {
                cell: [
                    finished(self.job(cell, algorithm, number))
                    if algorithm in self.tuned
                    else None
                    for number in range(self.arguments.seeds)
                ]
                for cell in self.arguments.cells
            }
            for algorithm in self.arguments.algorithms
        }

    def write(self) -> None:
        """Write the page of what is there."""
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


def finished(job: Job) -> dict[str, Any] | None:
    """Return the result of a run with these settings, if it is there."""
    path = job.place / RESULT
    if not path.is_file():
        return None
    found: dict[str, Any] = read_json(path)
    return found if found.pop("settings") == job.settings else None


def carry_out(job: Job) -> dict[str, Any]:
    """Make a run; whatever an earlier one has left, that was cut off, goes."""
    shutil.rmtree(job.place, ignore_errors=True)
    job.place.mkdir(parents=True)
    cpu, result = time.process_time(), {}
    with (
        (job.place / "log.txt").open("w", encoding="utf-8") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        try:
            settings = {**job.settings, "output": str(job.place)}
            result = simulate(job.algorithm, "inline", **settings).summary
        except Exception as error:
            # The others go on, and the page says which one did not.
            traceback.print_exc()
            result = {"failed": f"{type(error).__name__}: {error}"}
    found = {
        **result,
        "cpu-seconds": time.process_time() - cpu,
        "commit": provenance()["commit"],
        "settings": job.settings,
    }
    write_json(job.place / RESULT, found)
    return found


def carry_out_all(board: Leaderboard) -> None:
    """Make all runs that are missing, those of tuning first."""
    console = Console(file=sys.stdout)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(
        *columns, console=console, redirect_stdout=False, redirect_stderr=False
    ) as progress:
        for title, jobs in (
            ("tuning", board.tuning()),
            ("runs", (job for job in board.jobs() if finished(job) is None)),
        ):
            total = len(waiting(board)) if title == "runs" else None
            bar = progress.add_task(title, total=total, left="")
            took: dict[str, list[float]] = {}
            for job in jobs:
                name = f"{job.place.parent.name}/{job.place.name}"
                progress.update(bar, description=name)
                began = time.monotonic()
                found = carry_out(job)
                took.setdefault(job.algorithm, []).append(time.monotonic() - began)
                left = remaining(board, took) if title == "runs" else ""
                progress.update(bar, advance=1, left=left)
                said = found.get("failed") or f"{found.get('accuracy', np.nan):.2%}"
                seconds = took[job.algorithm][-1]
                console.print(
                    f"{time.strftime('%H:%M:%S')} {name}: {said}, {seconds:.0f} s "
                    f"({found['cpu-seconds']:.0f} s of a core); {left}",
                    highlight=False,
                    soft_wrap=True,
                )


def waiting(board: Leaderboard) -> list[Job]:
    """Return the runs that are missing."""
    return [job for job in board.jobs() if finished(job) is None]


def remaining(board: Leaderboard, took: dict[str, list[float]]) -> str:
    """Return the time that the missing runs will take, as those before them."""
    overall = float(np.mean([np.mean(own) for own in took.values()]))
    jobs = waiting(board)
    seconds = sum(float(np.mean(took.get(job.algorithm, overall))) for job in jobs)
    return f"{len(jobs)} runs and {seconds / 60:.0f} min left"


@ended_as_by_ctrl_c()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run what has not run yet and write ``results/leaderboard-<size>``."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    try:
        board = Leaderboard(parse())
        try:
            if not board.arguments.page:
                carry_out_all(board)
        finally:
            board.write()
    except KeyboardInterrupt:
        return 130
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
