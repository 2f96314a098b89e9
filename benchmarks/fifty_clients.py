"""Fifty clients with 500 images each, in case FLUTE's Table 1 used half of the data.

FLUTE's accuracies with 50 clients are close to those with 100, although 50 clients can
have twice as many images each. ``python -m benchmarks.fifty_clients --data-dir DIR``
repeats runs of ``benchmarks/papers_tables.py`` with 50 clients on half of CIFAR-10.
Finished runs in ``--output`` are not repeated.
"""

import argparse
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, markdown, write
from benchmarks.leaderboard_cells import subset
from benchmarks.papers_page import accuracies, spread
from benchmarks.papers_tables import Tables
from benchmarks.published import PAPERS
from benchmarks.runs import Job, carry_out_all, exit_status, finished
from flwr_frl.results.results import read_json

PAPER = "FLUTE, Table 1"
CELLS = ("50x5", "50x2")
ROWS = ("fedavg-ft", "fedrep", "fedper", "flute", "flute-star")
# Number of images of each of the ten classes, half of CIFAR-10.
TRAIN, TEST = 2_500, 500

BODY = """FLUTE's Table 1 has 50 clients with 5 or 2 shards of CIFAR-10, and accuracies
close to those of 100 clients. Here 50 clients share all 50,000 training images, 1,000
each, or the first half of every class, 500 each; test images are halved, too. The rest
is the protocol of [the papers' tables](papers_tables.md), where the runs with 1,000
images are from: 10 % of the clients in each of 100 rounds, one local epoch. Accuracy is
in %, the mean over all clients and the last 10 rounds (`fedavg-ft`: the last round).
Figures without ± are of one seed, 0.

{tables}"""


def jobs_of(tables: Tables, cell: str, rows: list[str]) -> list[Job]:
    """Return a cell's runs with half of the images."""
    return [tables.job(cell, row, 0) for row in rows]


def measured(tables: Tables, cells: list[str], rows: list[str]) -> dict[str, Any]:
    """Return the finished runs, in the format of ``papers_tables.json``."""
    results: dict[str, Any] = {}
    for cell in cells:
        for row, job in zip(rows, jobs_of(tables, cell, rows), strict=True):
            if (run := finished(job)) is not None:
                results.setdefault(cell, {})[row] = {"0": run}
    return {"results": results}


def table(half: dict[str, Any], whole: dict[str, Any], cell: str) -> str:
    """Return a cell's table: 500 images, the paper's accuracy, and 1,000 images."""
    lines = []
    for method, (row, published) in PAPERS[PAPER].items():
        halved = accuracies(half, cell, row)
        if halved:
            full = accuracies(whole, cell, row)
            paper = f"{published[cell]:.2f}"
            lines.append((method, f"`{row}`", spread(halved), paper, spread(full)))
    heads = ("method", "row", "500 images", "paper", "1,000 images")
    return f"## {cell}\n\n{markdown(heads, lines)}"


def main() -> int:
    """Make the runs that are missing, and write the page of all that are finished."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True, help="CIFAR-10 as an image folder")
    parser.add_argument("--cells", nargs="+", default=list(CELLS), choices=CELLS)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--output", default="results/fifty_clients")
    arguments = parser.parse_args()
    output = Path(arguments.output).absolute()
    folder = subset(Path(arguments.data_dir).absolute(), output, TRAIN, TEST)
    tuned = RESULTS / "leaderboard-tuned.json"
    about = {"data_dir": folder, "output": output, "tuned": tuned}
    tables = Tables(Namespace(**about, rounds=100, anew=True))
    cells, rows = arguments.cells, arguments.rows

    def missing() -> list[Job]:
        jobs = [job for cell in cells for job in jobs_of(tables, cell, rows)]
        return [job for job in jobs if finished(job) is None]

    def make() -> None:
        try:
            carry_out_all("fifty clients", missing(), missing)
        finally:
            half = measured(tables, cells, rows)
            whole = read_json(RESULTS / "papers_tables.json")
            text = "\n".join(table(half, whole, c) for c in half["results"])
            write(
                "fifty_clients",
                "Fifty clients with 500 images each",
                BODY.format(tables=text),
                half,
            )

    return exit_status(make)


if __name__ == "__main__":
    raise SystemExit(main())
