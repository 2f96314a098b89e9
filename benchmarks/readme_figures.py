"""Numbers in the README and in the guide to methods.

The numbers in the results are in `benchmarks.figures`.
"""

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
