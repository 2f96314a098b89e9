"""Personalised algorithms on clients with few classes and with conflicting labels.

scikit-learn's digits in two partitions: two classes per client (``shards``), where
personal heads help, and four groups of clients with permuted labels (``clustered``),
where each client should find the others in its group. All algorithms use the same
model, rounds, sampled clients, local epochs and learning rate. Their other settings
keep the defaults, except that ``ifca`` has as many clusters as there are groups.

Runs are carried out seed by seed. Finished runs in the output folder are reused, so an
interrupted command can be resumed. The page contains all finished runs; the rows of
algorithms that are not named are those of the existing page.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import DIFFERENCES, RESULTS, markdown, write
from benchmarks.leaderboard_page import accuracies, spread
from benchmarks.runs import Job, carry_out_all, exit_status, finished, of_page
from flwr_frl.common.settings import Setting

NAME = "clustered"
ALGORITHMS = [
    *("fedavg", "local", "fedrep", "ditto", "fedamp", "fedfomo", "ifca", "pfedhn"),
    *("knn-per", "moon", "feddyn", "fedpac", "fedas", "gpfl", "pfedfda"),
]
GROUPS = 4
CELLS: dict[str, dict[str, Setting]] = {
    "two classes": {"partition": "shards", "classes-per-client": 2},
    "clustered": {"partition": "clustered", "label-groups": GROUPS},
}
OWN: dict[str, dict[str, Setting]] = {"ifca": {"num-clusters": GROUPS}}


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("algorithms", nargs="*", default=ALGORITHMS, metavar="NAME")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--cells", nargs="+", default=list(CELLS), choices=CELLS)
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--output", default="results/clustered")
    return parser.parse_args()


class Table:
    """The page and its runs, finished or missing.

    Parameters
    ----------
    arguments : argparse.Namespace
        The command's arguments.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.place = Path(arguments.output).absolute()
        self.page = of_page(RESULTS / f"{NAME}.json").get("runs", {})
        self.common: dict[str, Setting] = {
            "num-clients": arguments.clients,
            "num-server-rounds": arguments.rounds,
            "fraction-train": 0.5,
            "representation-epochs": 5,
            "learning-rate": 0.05,
            "evaluate-every": 0,
            "evaluate-last": 5,
        }

    def job(self, algorithm: str, cell: str, seed: int) -> Job:
        """Return the job of one run."""
        settings = {
            **self.common,
            **CELLS[cell],
            **OWN.get(algorithm, {}),
            "seed": seed,
        }
        place = self.place / cell.replace(" ", "-") / f"{algorithm}-{seed}"
        return Job(place, algorithm, settings)

    def missing(self) -> Iterator[Job]:
        """Yield the unfinished runs, seed by seed."""
        for seed in range(self.arguments.seeds):
            for cell in self.arguments.cells:
                for algorithm in self.arguments.algorithms:
                    job = self.job(algorithm, cell, seed)
                    if finished(job) is None:
                        yield job

    def results(self) -> dict[str, dict[str, list[dict[str, Any] | None]]]:
        """Return the runs by algorithm and cell, one for each seed."""
        seeds, cells = range(self.arguments.seeds), self.arguments.cells
        named = self.arguments.algorithms
        return {
            name: {
                cell: [finished(self.job(name, cell, seed)) for seed in seeds]
                if name in named
                else self.page[name][cell]
                for cell in cells
            }
            for name in ALGORITHMS
            if name in named or name in self.page
        }

    def write(self) -> None:
        """Write the page of the finished runs."""
        results, rows = self.results(), []
        for name, cells in results.items():
            row = [f"`{name}`"]
            for runs in cells.values():
                worst = accuracies(runs, "accuracy-worst-decile")
                row += [spread(accuracies(runs)), spread(worst)]
            sizes = [
                r["bytes"]
                for runs in cells.values()
                for r in runs
                if r and "bytes" in r
            ]
            row.append(f"{sum(sizes) / len(sizes) / 1e6:.1f}" if sizes else "missing")
            rows.append(row)
        columns = ["algorithm"]
        for cell in self.arguments.cells:
            columns += [cell, f"{cell}, worst decile"]
        others = "; ".join(
            f"`{name}` {n}={v}" for name, more in OWN.items() for n, v in more.items()
        )
        commits = {
            r["commit"]
            for cells in results.values()
            for runs in cells.values()
            for r in runs
            if r
        }
        common = ", ".join(f"{n}={v}" for n, v in self.common.items())
        body = (
            "Test accuracy in %: mean over the clients and the last 5 rounds, mean ± "
            "standard deviation over the seeds from 0. In the partition `clustered`, "
            f"{GROUPS} groups of clients have permuted labels. The last column is the "
            f"mean of all messages of a run in MB.\n\nCommon settings: {common}. "
            f"Others: {others}. {DIFFERENCES} Runs are at commits "
            f"{', '.join(sorted(commits))}.\n\n" + markdown([*columns, "MB"], rows)
        )
        title = "Few classes a client, and groups of clients with conflicting labels"
        write(NAME, title, body, {"runs": results})


def make_and_write() -> None:
    """Carry out the missing runs, and write the page even if that fails."""
    arguments = parse()
    table = Table(arguments)
    try:
        if not arguments.page:
            jobs = table.missing()
            carry_out_all(NAME, jobs, lambda: list(table.missing()))
    finally:
        table.write()


if __name__ == "__main__":
    raise SystemExit(exit_status(make_and_write))
