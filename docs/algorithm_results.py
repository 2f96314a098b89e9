"""Measured and published accuracies of an algorithm, for its page."""

import json
from functools import cache
from statistics import fmean
from typing import Any

from benchmarks.derived import published
from docs.links import RESULTS
from flwr_frl.common.algorithms import title

# Methods beside which an algorithm is shown.
OTHERS = ("fedavg", "fedavg-ft", "fedrep", "local")
# A metric, the factor of the shown value, and its decimals.
METRICS = ("accuracy", 100, 1), ("auroc", 100, 1), ("rmse", 1, 3)
# Cells of two pages, in words.
DATA = {
    "leaderboard-20x40": {
        "shards-2": "CIFAR-10, 2 classes a client",
        "shards-5": "CIFAR-10, 5 classes a client",
        "dirichlet-0.5": "CIFAR-10, Dirichlet 0.5",
    },
    "natural": {
        "wisdm": "activities of 36 people",
        "speech": "digits spoken by 6 people",
        "writers": "digits by 12 writers",
        "roles": "next characters of 30 roles",
        "landmine": "mines in 29 fields (AUROC)",
        "parkinson": "42 patients (error, lower is better)",
    },
}


@cache
def measured(page: str) -> dict[str, Any]:
    """Return the results of a page by algorithm and cell."""
    file = RESULTS / f"{page}.json"
    return dict(json.loads(file.read_text("utf-8"))["results"])


def comparison(name: str) -> str:
    """Return a table of an algorithm beside `OTHERS` on several data sets."""
    columns = [name, *(other for other in OTHERS if other != name)]
    lines = []
    for page, cells in DATA.items():
        of_page = measured(page)
        for cell, words in cells.items():
            values = [_mean(of_page.get(c, {}).get(cell, [])) for c in columns]
            if values[0]:
                lines.append(f"| {words} | {' | '.join(values)} |\n")
    if not lines:
        return ""
    heads = " | ".join(title_of(column) for column in columns)
    return (
        "Accuracy in %, mean over the seeds. The clients of CIFAR-10 have [80 training "
        "images each](/results/leaderboard-20x40.md), the others are [natural "
        "clients](/results/natural.md).\n\n"
        f"| | {heads} |\n| --- |{' --: |' * len(columns)}\n{''.join(lines)}"
    )


def title_of(name: str) -> str:
    """Return an algorithm's name as in its paper, as Markdown."""
    return title(name).replace("*", r"\*")


def _mean(runs: list[dict[str, float]]) -> str:
    """Return the mean of a cell's runs in words; empty without any."""
    for metric, scale, digits in METRICS:
        if values := [scale * run[metric] for run in runs if metric in run]:
            return f"{fmean(values):.{digits}f}"
    return ""


def results(name: str, written: str) -> str:
    """Return a text, measured and published accuracies, and links to more pages."""
    text = f"{written}\n\n{_beside_papers(name)}".strip()
    pages = [
        f"[](/results/{path.stem}.md)"
        for path in sorted(RESULTS.glob("*.md"))
        if f"`{name}`" in path.read_text(encoding="utf-8")
    ]
    if pages:
        text += f"\n\nPages with more about it: {'; '.join(pages)}.\n"
    return text or "No page of results is about this algorithm alone.\n"


def _beside_papers(name: str) -> str:
    """Return the algorithm's rows in the papers' tables of CIFAR-10, in %."""
    results = measured("papers_tables")
    # A global method is tested in the runs of its fine-tuned variant.
    tuned, rows = f"{name}-ft", []
    for cell in ("100x5", "100x2", "50x5", "50x2", "1000x2"):
        runs = [run["accuracy"] for run in results.get(name, {}).get(cell, [])]
        if not runs:
            own = results.get(tuned, {}).get(cell, [])
            runs = [run["accuracy-global"] for run in own if "accuracy-global" in run]
        there = [
            f"{method[cell]:.2f} ({paper}, Table 1)"
            for paper, methods in published().items()
            for method in methods.values()
            if method["row"] == name and cell in method
        ]
        if runs and there:
            clients, shards = cell.split("x")
            rows.append(
                f"| {clients} clients, {shards} shards each | {100 * fmean(runs):.2f} "
                f"| {len(runs)} | {'; '.join(there)} |\n"
            )
    if not rows:
        return ""
    return (
        "CIFAR-10, accuracy in %, by the papers' protocol "
        "([how](/results/papers_tables.md)):\n\n"
        "| data | here | seeds | paper |\n| --- | --- | --- | --- |\n"
        f"{''.join(rows)}\n"
    )
