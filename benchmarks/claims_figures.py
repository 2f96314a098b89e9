"""Numbers on the page of claims: all that contradict a claim, and some others.

A pattern captures a whole cell, so that all of its numbers are compared.
"""

from collections.abc import Callable, Sequence
from statistics import fmean

from benchmarks.figures import Figure, bits_to_12, cell, factors
from benchmarks.page_values import Data

CLAIMS = "docs/claims.md"
Values = Callable[[Data], Sequence[float]]


def mean_at(*paths: str, scale: float = 1) -> Values:
    """Return a function for the means of the lists at some paths, such as a/b/0."""

    def values(data: Data) -> list[float]:
        found = []
        for path in paths:
            at = data
            for key in path.split("/"):
                at = at[int(key)] if isinstance(at, list) else at[key]
            found.append(scale * fmean(at if isinstance(at, list) else [at]))
        return found

    return values


def leads(*pairs: tuple[str, str], tables: Sequence[str]) -> Values:
    """Return a function for leads in points, over the seeds that both methods have."""
    return lambda data: [
        100 * fmean(a[s]["accuracy"] - b[s]["accuracy"] for s in a.keys() & b.keys())
        for pair in pairs
        for a, b in (
            [data["results"][table][name] for name in pair] for table in tables
        )
    ]


def gaps_of_nc2(data: Data) -> list[float]:
    """Return FedRep*'s NC2 less FLUTE*'s after the last round: global, then local."""
    return [
        fmean(run["curve"][metric][1][-1] for run in table["fedrep"].values())
        - fmean(run["curve"][metric][1][-1] for run in table["flute-star"].values())
        for metric in ("global-nc2", "local-nc2")
        for table in (data["results"][name] for name in ("50x2", "100x2"))
    ]


def gains(figure: str, other: str, *cells: str) -> Values:
    """Return a function for FLUTE's mean error less another method's."""
    return lambda data: [
        fmean(data[figure][name]["FLUTE"]) - fmean(data[figure][name][other])
        for name in cells
    ]


def against_flanp(data: Data) -> list[float]:
    """Return final accuracies in %, and how often SRPFL is ahead of FLANP-FT.

    Both use the same clients in the same rounds, so that their times are equal.
    """
    fast, other = (data["curves"][name] for name in ("srpfl", "flanp-ft"))
    pairs = [(a, b) for t, a, u, b in zip(*fast, *other, strict=False) if t == u]
    final = [100 * data[name]["final"][name] for name in ("srpfl", "flanp-ft")]
    return [*final, sum(a > b for a, b in pairs), len(pairs)]


COLUMNS = ("50x2", "50x5", "100x2", "100x5")
SIZES = (20, 50, 100, 500)
CHOCO = ("CHOCO (Sign)", "CHOCO (TopK)")
# First words of a claim, the page of its figures, and the figures
ROWS: tuple[tuple[str, str, Values], ...] = (
    (
        "FedRep achieves “small",
        "fedrep_samples",
        mean_at(*(f"figure-1/FedRep/{i}" for i in (0, 1, 9))),
    ),
    (
        "GD-GD and 10GD-GD",
        "fedrep_linear",
        lambda data: [
            fmean(curve[50] for curve in data["figure-3"][str(n)][method]["curves"])
            for method in ("GD-GD", "10GD-GD")
            for n in SIZES
        ],
    ),
    (
        "With FedAvg, “running",
        "papers_small",
        mean_at(*(f"epochs/fedavg/{i}" for i in range(3))),
    ),
    (
        "“In all cases, FedRep",
        "papers_tables",
        leads(("fedrep", "fedavg-ft"), tables=("100x5", "100x2", "1000x2")),
    ),
    (
        "FedRep has a small error",
        "flute_linear",
        gains(
            *("figure-1", "FedRep"),
            *(f"{sizes} {k}" for sizes in ("15 12", "30 20") for k in (2, 4, 6)),
        ),
    ),
    (
        "FLUTE's gain “is more",
        "flute_linear",
        gains("figure-3", "FedRep(RI)", *(f"15 12 {k}" for k in (2, 4, 6, 8))),
    ),
    *(
        (label, "papers_tables", leads(*pairs, tables=COLUMNS))
        for label, pairs in (
            (
                "“FLUTE and FLUTE\\* consistently",
                (("flute", "fedavg-ft"), ("flute-star", "fedavg-ft")),
            ),
            (
                "FLUTE has “superior",
                (("flute", "fedrep"), ("flute-star", "fedrep")),
            ),
            (
                "“The gain […] becomes",
                (("flute-star", "fedrep"), ("flute-star", "fedavg-ft")),
            ),
        )
    ),
    ("The gap between FedRep\\*", "papers_tables", gaps_of_nc2),
    (
        "1) FedRep-SRPFL",
        "srpfl_time-fixed-1-plain",
        mean_at(
            *("srpfl/final/srpfl", "srpfl/final/fedrep"),
            *("flanp-ft/final/flanp-ft", "flanp-ft/final/fedavg-ft"),
            scale=100,
        ),
    ),
    (
        "CIFAR-10: SQuARM-SGD converges",
        "gossip_cifar",
        mean_at(
            *(
                f"measured/{name}/error"
                for name in ("SQuARM, no trigger", "D-PSGD", *CHOCO)
            ),
            scale=100,
        ),
    ),
    (
        "CIFAR-10: 40 times",
        "gossip_cifar",
        mean_at(*(f"measured/{name}/ratio" for name in ("D-PSGD", *CHOCO))),
    ),
    (
        "MNIST: it does so",
        "gossip_convex_target",
        lambda data: [
            fmean(run["rows"][-1]["iteration"] for run in data["runs"][name])
            for name in (
                "SQuARM, c = 5000:5000:1000:6000 / paper's",
                "D-PSGD / paper's",
            )
        ],
    ),
    (
        "MNIST: 120 times",
        "gossip_convex_target",
        lambda data: [bits_to_12(name)(data)[0] for name in (*CHOCO, "D-PSGD")],
    ),
    ("QCQP: 7, 30 and 50", "multi_task", factors("qcqp", "0.001")),
    ("Logistic regression: 7, 20", "multi_task", factors("logistic", "0.03")),
)
CLAIMS_FIGURES = [
    *(Figure(CLAIMS, cell(label, 2), page, values) for label, page, values in ROWS),
    *(
        Figure(
            CLAIMS,
            rf"{speeds} speeds: \[([^\]]*)\]",
            f"srpfl_time-{page}-1-plain",
            against_flanp,
        )
        for speeds, page in (("fixed", "fixed"), ("drawn", "dynamic"))
    ),
    Figure(
        CLAIMS,
        r"a fifth of the clients: \[([^\]]*)\]",
        "srpfl_time-fixed-0.2",
        mean_at("srpfl/final/srpfl", "flanp-ft/final/flanp-ft", scale=100),
    ),
    Figure(
        CLAIMS,
        r"FedRep: \[([^\]]*)\]",
        "srpfl_time-fixed-0.2-rate-0.1-plain",
        mean_at("srpfl/final/fedrep", scale=100),
    ),
    Figure(
        CLAIMS,
        r"after 30 rounds, \[([^\]]*)\]",
        "srpfl_time-groups-0.2-plain",
        mean_at("curves/fedrep/1/6", scale=100),
    ),
]
