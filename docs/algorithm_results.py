"""Excerpts of other pages on an algorithm: results, what the server sees, differences.

`docs.algorithm_pages` includes them in the algorithm's page.
"""

import json
import re
from statistics import fmean

from benchmarks.derived import published
from docs.links import DOCS, RESULTS, for_site
from flwr_frl.strategies.algorithms import FINE_TUNED


def results(name: str) -> str:
    """Return measured and published accuracies, and links to further pages."""
    text = _beside_papers(name) + _leaderboard(name)
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
    tuned, rows = f"{name}{FINE_TUNED}", []
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


def _leaderboard(name: str) -> str:
    """Return the algorithm's row in the leaderboard of few images, in %."""
    path = RESULTS / "leaderboard-20x40.json"
    cells = json.loads(path.read_text(encoding="utf-8"))["results"].get(name)
    if not cells or any("accuracy" not in run for c in cells.values() for run in c):
        return ""
    values = [f"{100 * fmean(r['accuracy'] for r in c):.1f}" for c in cells.values()]
    seeds = max(map(len, cells.values()))
    return (
        f"CIFAR-10 with few images, 20 clients, accuracy in %, mean over {seeds} seeds "
        "([all algorithms](/results/leaderboard-20x40.md)):\n\n"
        f"| {' | '.join(cells)} |\n|{' --- |' * len(cells)}\n"
        f"| {' | '.join(values)} |\n\n"
    )


def server_sees(name: str) -> str:
    """Return the algorithm's row of the table in ``privacy.md``, as a list."""
    file = DOCS / "privacy.md"
    for line in for_site(file.read_text(encoding="utf-8"), file).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 5 and f"`{name}`" in cells[0]:
            titles = (
                "The server receives",
                "Other clients receive",
                "Stays on the device",
            )
            lines = [f"- {t}: {c}." for t, c in zip(titles, cells[1:4], strict=True)]
            return "\n".join(lines) + "\n\n[Who sees what](/privacy.md)\n"
    return "[Who sees what](/privacy.md)\n"


def differences(title: str) -> str:
    """Return the algorithm's section of ``differences.md``; empty without one."""
    file = DOCS / "differences.md"
    text = for_site(file.read_text(encoding="utf-8"), file)
    for section in text.split("\n## ")[1:]:
        heading, _, body = section.partition("\n")
        if title in re.split(r", | and ", heading):
            return (
                "## Differences from other code\n\n"
                f"From [Differences from PFLlib](/differences.md), “{heading}”:\n{body}"
            )
    return ""
