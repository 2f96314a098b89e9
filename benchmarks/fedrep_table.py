"""Cells of FedRep's Table 1 for an image data set.

Protocol: the authors' shards, a share of 0.1 of the clients a round, batch 10, SGD 0.01
with momentum 0.5, random crop and flip; mean over all clients, mean over the last 10
rounds (fedavg-ft: the last round). One row a run: ``ALGORITHM`` or
``ALGORITHM:setting=value,setting=value``.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, markdown, provenance, write

from simulation import simulate
from strategies.server.results import read_rows
from task.settings import Setting

# Collins et al., ICML 2021, Table 1, CIFAR-10; by clients and classes per client.
PAPER = {
    "local": {"100x2": 89.79, "100x5": 70.68, "1000x2": 78.30},
    "fedavg": {"100x2": 42.65, "100x5": 51.78, "1000x2": 44.31},
    "fedavg-ft": {"100x2": 87.65, "100x5": 73.68, "1000x2": 82.04},
    "fedper": {"100x2": 87.13, "100x5": 73.84, "1000x2": 81.73},
    "fedrep": {"100x2": 87.70, "100x5": 75.68, "1000x2": 83.27},
    # Liu et al., ICML 2024, Table 1, has one head epoch.
    "fedrep:head-epochs=1": {"100x2": 86.69, "100x5": 73.81},
}


def parse_row(text: str) -> tuple[str, dict[str, Setting]]:
    """Return algorithm and settings of ``ALGORITHM:setting=value,…``."""
    from flwr.common.config import parse_config_args

    algorithm, _, settings = text.partition(":")
    return algorithm, parse_config_args([settings.replace(",", " ")])


def run(
    arguments: argparse.Namespace, row: str, seed: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return summary and rows of one run, from an earlier call if it is there."""
    algorithm, own = parse_row(row)
    cell = f"{arguments.clients}x{arguments.classes_per_client}"
    name = row.replace(":", "_").replace(",", "_").replace('"', "")
    output = Path(arguments.output) / f"{cell}-{arguments.rounds}" / f"{name}-{seed}"
    settings: dict[str, Setting] = {
        "task": "image-folder",
        "data-dir": arguments.data_dir,
        "num-clients": arguments.clients,
        "classes-per-client": arguments.classes_per_client,
        "fraction-train": 0.1,
        "num-server-rounds": arguments.rounds,
        "evaluate-every": arguments.evaluate_every,
        "seed": seed,
        "output": str(output),
        **own,
    }
    summary = output / "summary.json"
    if not summary.is_file():
        began = time.monotonic()
        simulate(algorithm, arguments.backend, **settings)
        (output / "commit").write_text(provenance()["commit"] + "\n")
        print(f"{row} seed {seed}: {time.monotonic() - began:.0f} s", flush=True)
    result = json.loads(summary.read_text())["algorithms"][algorithm]
    result["commit"] = (output / "commit").read_text().strip()
    return result, read_rows(output / algorithm / "metrics.jsonl")


def describe(runs: list[tuple[dict[str, Any], list[dict[str, Any]]]]) -> str:
    """Return the mean accuracy in %, and each seed's where there are several."""
    accuracies = [100 * summary["accuracy"] for summary, _ in runs]
    if len(runs) == 1:
        return f"{accuracies[0]:.2f}"
    return f"{np.mean(accuracies):.2f} ({', '.join(f'{a:.2f}' for a in accuracies)})"


def commits(runs: list[tuple[dict[str, Any], list[dict[str, Any]]]]) -> str:
    """Return the commits that the runs were made at."""
    return ", ".join(sorted({summary["commit"] for summary, _ in runs}))


def parser(description: str | None, rows: list[str]) -> argparse.ArgumentParser:
    """Return the arguments that tables of image data sets share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("rows", nargs="*", default=rows, metavar="ROW")
    parser.add_argument("--data-dir", required=True, help="image folder")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--classes-per-client", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--evaluate-every", type=int, default=10)
    parser.add_argument("--backend", default="ray")
    parser.add_argument("--output", default="results/tables")
    parser.add_argument("--suffix", default="", help="of the result's name")
    return parser


def main() -> None:
    """Run what has not run yet and write ``results/fedrep_table-<cell>``."""
    arguments = parser(
        __doc__, ["local", "fedavg-ft", "fedper", "fedrep:head-epochs=1", "fedrep"]
    ).parse_args()
    cell = f"{arguments.clients}x{arguments.classes_per_client}"
    table, data, curves = [], {}, {}
    for row in arguments.rows:
        runs = [run(arguments, row, seed) for seed in arguments.seeds]
        algorithm, _ = parse_row(row)
        seconds = [summary["seconds"] for summary, _ in runs]
        # Another number of head epochs is another row of a paper's table.
        known = {} if "head-epochs" in row else PAPER.get(algorithm, {})
        paper = PAPER.get(row, known).get(cell, "")
        table.append(
            (
                f"`{row}`",
                describe(runs),
                paper,
                f"{np.mean(seconds):.0f}",
                commits(runs),
            )
        )
        if algorithm == "fedavg-ft":
            # The same runs before the fine-tuning.
            overall = [100 * summary["accuracy-global"] for summary, _ in runs]
            paper = PAPER["fedavg"].get(cell, "")
            table.append(
                ("the same, not fine-tuned", f"{np.mean(overall):.2f}", paper, "", "")
            )
        data[row] = {"runs": [summary for summary, _ in runs]}
        curves[row] = runs[0][1]
    name = f"fedrep_table-{cell}{arguments.suffix}"
    body = (
        f"{arguments.clients} clients, {arguments.classes_per_client} shards each, 10 "
        f"% a round, {arguments.rounds} rounds, seeds {arguments.seeds}. Accuracy in "
        "%, mean over clients and the last 10 rounds (fedavg-ft: the last round), each "
        "seed in brackets. Seconds were measured on a machine that did other things "
        "at the same time.\n\n"
        + markdown(("run", "accuracy", "paper", "seconds", "commit"), table)
        + f"\n![accuracy]({name}.png)\n"
    )
    write(name, "FedRep, Table 1, CIFAR-10", body, data)
    plot(curves, f"{name}.png")


def plot(curves: dict[str, list[dict[str, Any]]], name: str) -> None:
    """Draw accuracy by round."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for row, rows in curves.items():
        points = [(r["round"], r["accuracy"]) for r in rows if "accuracy" in r]
        axes.plot(*zip(*points, strict=True), label=row, marker=".")
    axes.set(xlabel="round", ylabel="accuracy, mean over clients")
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(RESULTS / name, dpi=150)


if __name__ == "__main__":
    main()
