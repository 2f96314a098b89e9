"""Figures of the README; those of the results are in `benchmarks.figures`."""

from statistics import fmean

from benchmarks.figures import Data, Figure, beside_peers


def means(data: Data) -> list[float]:
    """Return the mean accuracy in % of a global model and of personal heads."""
    return [100 * fmean(data["accuracy"][n].values()) for n in ("fedavg", "fedrep")]


README_FIGURES = [
    Figure(
        "README.md",
        r"global model reaches (\d+) % accuracy, personal heads\s+(\d+) %",
        "first_result",
        means,
    ),
    Figure(
        "README.md",
        r"FedRep round takes ([\d.]+) of the time of a plain PyTorch loop, and "
        r"PFLlib's\s+([\d.]+) ",
        "peers",
        lambda data: beside_peers(data)[:2],
    ),
]
