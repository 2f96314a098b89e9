"""Cells of FLUTE's Table 1 for CIFAR-10, with NC2 by round and the time.

Protocol as in ``fedrep_table.py``. FedRep* is ``fedrep`` with 10 head epochs, FLUTE* is
``flute-star``. With ``augment-head=false`` the head epochs see the images as they are,
so that features are computed once.
"""

from typing import Any

import numpy as np
from common import RESULTS, markdown, write
from fedrep_table import commits, describe, parse_row, parser, run

# Liu et al., ICML 2024, Table 1, CIFAR-10; by clients and classes per client.
PAPER = {
    "fedrep:head-epochs=1": {
        "50x2": 86.13,
        "50x5": 71.74,
        "100x2": 86.69,
        "100x5": 73.81,
    },
    "fedrep": {"50x2": 87.32, "50x5": 75.77, "100x2": 87.18, "100x5": 75.30},
    "flute": {"50x2": 87.01, "50x5": 76.48, "100x2": 86.13, "100x5": 76.92},
    "flute-star": {"50x2": 87.71, "50x5": 76.54, "100x2": 88.57, "100x5": 78.26},
}


def paper_value(row: str, cell: str) -> object:
    """Return the paper's accuracy for a row, or nothing."""
    name = row if row in PAPER else parse_row(row)[0]
    return PAPER.get(name, {}).get(cell, "")


def main() -> None:
    """Run what has not run yet and write ``results/flute_table-<cell>``."""
    arguments = parser(
        __doc__,
        [
            "fedrep:head-epochs=1",
            "fedrep:augment-head=false",
            "flute",
            "flute-star:augment-head=false",
        ],
    ).parse_args()
    cell = f"{arguments.clients}x{arguments.classes_per_client}"
    table, data, curves = [], {}, {}
    for row in arguments.rows:
        runs = [run(arguments, row, seed) for seed in arguments.seeds]
        last = [rows[-1] for _, rows in runs]
        seconds = float(np.mean([summary["seconds"] for summary, _ in runs]))
        collapse = [np.mean([r[f"{k}-nc2"] for r in last]) for k in ("global", "local")]
        table.append(
            (
                f"`{row}`",
                describe(runs),
                paper_value(row, cell),
                *(f"{value:.3f}" for value in collapse),
                f"{seconds:.0f}",
                commits(runs),
            )
        )
        data[row] = {
            "runs": [summary for summary, _ in runs],
            "global-nc2": collapse[0],
            "local-nc2": collapse[1],
            "seconds": seconds,
        }
        curves[row] = runs[0][1]
    name = f"flute_table-{cell}{arguments.suffix}"
    columns = (
        "run",
        "accuracy",
        "paper",
        "Global NC2",
        "Local NC2",
        "seconds",
        "commit",
    )
    body = (
        f"{arguments.clients} clients, {arguments.classes_per_client} shards each, 10 "
        f"% a round, {arguments.rounds} rounds, seeds {arguments.seeds}. Accuracy in "
        "%, mean over clients and the last 10 rounds, each seed in brackets; NC2 after "
        "the last round. Seconds were measured on a machine that did other things at "
        "the same time.\n\n"
        + markdown(columns, table)
        + f"\n![accuracy and NC2]({name}.png)\n"
    )
    write(name, "FLUTE, Table 1, CIFAR-10", body, data)
    plot(curves, f"{name}.png")


def plot(curves: dict[str, list[dict[str, Any]]], name: str) -> None:
    """Draw accuracy and both NC2 by round."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.8), layout="constrained")
    for axes, metric in zip(
        figure.subplots(1, 3), ("accuracy", "global-nc2", "local-nc2"), strict=True
    ):
        for row, rows in curves.items():
            points = [(r["round"], r[metric]) for r in rows if metric in r]
            axes.plot(*zip(*points, strict=True), label=row, marker=".")
        axes.set(xlabel="round", ylabel=metric)
        axes.grid(alpha=0.3)
        if metric == "accuracy":
            axes.yaxis.set_major_formatter("{x:.0%}")
            handles = axes.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(RESULTS / name, dpi=150)


if __name__ == "__main__":
    main()
