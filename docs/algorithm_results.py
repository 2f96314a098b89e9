"""Measured and published accuracies of an algorithm, for its page."""

import json
from statistics import fmean

from benchmarks.derived import published
from docs.links import RESULTS


def results(name: str) -> str:
    """Return measured and published accuracies, and links to further pages."""
    text = _beside_papers(name)
    pages = [
        f"[{path.stem}](/results/{path.stem}.md)"
        for path in sorted(RESULTS.glob("*.md"))
        if f"`{name}`" in path.read_text(encoding="utf-8")
    ]
    if pages:
        text += f"Pages with more about it: {', '.join(pages)}.\n"
    return text or "No page of results is about this algorithm alone.\n"


def _beside_papers(name: str) -> str:
    """Return the algorithm's rows in the papers' tables of CIFAR-10, in %."""
    results = json.loads((RESULTS / "papers_tables.json").read_text("utf-8"))["results"]
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
