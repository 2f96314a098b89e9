"""Numbers in the README and in the guide to methods.

The numbers in the results are in `benchmarks.figures`.
"""

import re
from collections.abc import Callable
from statistics import fmean

from benchmarks.figures import Figure
from benchmarks.page_values import Data, beside_peers


def means(data: Data) -> list[float]:
    """Return the mean accuracy in % of a global model and of personal heads."""
    return [100 * fmean(data["accuracy"][n].values()) for n in ("fedavg", "fedrep")]


def of_leaderboard(algorithm: str) -> Callable[[Data], list[float]]:
    """Return a function for an algorithm's mean accuracy in % in each cell."""
    return lambda data: [
        100 * fmean(run["accuracy"] for run in runs)
        for runs in data["results"][algorithm].values()
    ]


def of_natural(task: str, scale: int) -> Callable[[Data], list[float]]:
    """Return a function for the mean values of the `COMPARED` algorithms on a task."""
    return lambda data: [
        scale * fmean(data["tasks"][task][algorithm]["values"])
        for algorithm in COMPARED
        if algorithm in data["tasks"][task]
    ]


# Rows of the table of natural clients, and the factor of their numbers.
NATURAL = {
    "activities of 36 people": ("wisdm", 100),
    "digits spoken by 6 speakers": ("speech", 100),
    "digits written by 12 writers": ("writers", 100),
    "next characters of 30 roles": ("roles", 100),
    "mines in 29 fields (AUROC)": ("landmine", 100),
    "heart disease in 4 hospitals (AUROC)": ("heart", 100),
    "exam scores of 139 schools (error)": ("school", 1),
    "Parkinson scores of 42 patients (error)": ("parkinson", 1),
}
COMPARED = ("flute-star", "fedavg-ft", "fedrep", "pfedme", "ditto", "local", "fedavg")
README_FIGURES = [
    *(
        Figure(
            "docs/choose.md",
            rf"^\| `{algorithm}` \|([\d. |]+)\|$",
            "leaderboard-20x40",
            of_leaderboard(algorithm),
        )
        for algorithm in COMPARED
    ),
    *(
        Figure(
            "docs/choose.md",
            rf"^\| {re.escape(label)} \|([\d. |]+)\|$",
            "natural",
            of_natural(*what),
        )
        for label, what in NATURAL.items()
    ),
    Figure(
        "README.md",
        r"global model reaches (\d+) % accuracy,\s+personal\s+heads\s+(\d+) %",
        "first_result",
        means,
    ),
    Figure(
        "README.md",
        r"FedRep round takes ([\d.]+) of the time of a plain PyTorch loop, and "
        r"PFLlib's\s+takes\s+([\d.]+) ",
        "peers",
        lambda data: beside_peers(data)[:2],
    ),
]
