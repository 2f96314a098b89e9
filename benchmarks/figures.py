"""What the README and the guides say that is a page's: where, and its numbers there.

A `Figure` is a place in a text, the page behind it, and the numbers there, from the
page's JSON. `benchmarks.held` compares them.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from benchmarks import peers_names as peer

Data = dict[str, Any]
PAGES = Path("benchmarks") / "results"


class Figure(NamedTuple):
    """Numbers of a text, and where they come from.

    Parameters
    ----------
    file : str
        The text, from the repository's root.
    pattern : str
        Fits in one place; the numbers are in its groups.
    page : str
        Name of the page in ``benchmarks/results``.
    values : callable
        The page's JSON to the numbers, in the text's order.
    """

    file: str
    pattern: str
    page: str
    values: Callable[[Data], Sequence[float]]


def cell(label: str, column: int = 1) -> str:
    """Return what fits a cell of the table row whose first cell begins so."""
    before = r"[^|\n]*\|" * column
    return rf"^\| {re.escape(label)}{before}([^|\n]*)\|"


def of_papers(
    row: str, metric: str = "accuracy", table: str = "100x5"
) -> Callable[[Data], list[float]]:
    """Return the mean in % over seeds, of a row of the papers' tables."""
    return lambda data: [
        100 * fmean(run[metric] for run in data["results"][table][row].values())
    ]


def of_cell(table: str, rows: Sequence[str]) -> Callable[[Data], list[float]]:
    """Return the means in % over seeds, of some rows of one of the papers' cells."""
    return lambda data: [v for row in rows for v in of_papers(row, table=table)(data)]


def time_and_gap(fast: str) -> Callable[[Data], list[float]]:
    """Return the shares of the base's time, and the points of difference in the end."""

    def values(data: Data) -> list[float]:
        entry = data[fast]
        shares = [a / b for a, b in (entry[f"C.T. {c}"] for c in (0, 10, 100))]
        base = next(name for name in entry["final"] if name != fast)
        gap = 100 * (entry["final"][fast] - entry["final"][base])
        reached = [share for share in shares if not math.isnan(share)]
        return [*(reached or [math.nan]), gap]

    return values


def at_same_time(data: Data) -> list[float]:
    """Return SRPFL's lead over FedRep in points when the latter's time is over."""
    (times, accuracies), limit = (
        data["curves"]["srpfl"],
        data["curves"]["fedrep"][0][-1],
    )
    done = [a for time, a in zip(times, accuracies, strict=True) if time <= limit]
    return [100 * (done[-1] - data["srpfl"]["final"]["fedrep"])]


GOSSIP = (
    "no communication",
    "D-PSGD",
    "CHOCO (Sign)",
    "CHOCO (TopK)",
    "SQuARM, no trigger",
)
# Rows of gossip's table, by what the pages call it.
GOSSIP_ROWS = {
    "error": "error",
    "own": "nodes' own error",
    "ratio": "bits to",
    "sizes": "bits by messages' sizes",
}


def _gossip(model: str, page: str) -> Iterator[Figure]:
    """Yield the figures of a model in gossip's table: means over seeds, errors in %."""
    for what, label in GOSSIP_ROWS.items():
        is_error = what in ("error", "own")
        # Without communication there are no bits.
        for column, row in list(enumerate(GOSSIP, start=1))[not is_error :]:
            place = cell(f"[{model}: {label}", column)
            yield Figure("README.md", place, page, _measured(row, what, is_error))


def _measured(row: str, what: str, is_error: bool) -> Callable[[Data], list[float]]:
    scale = 100 if is_error else 1
    return lambda data: [scale * fmean(data["measured"][row][what])]


def factors(problem: str, gap: str) -> Callable[[Data], list[float]]:
    """Return how many times fewer bits than without compression, mean over seeds."""

    def values(data: Data) -> list[float]:
        results = data["problems"][problem]["results"]
        seeds = range(len(results["vanilla"]))
        spent = {n: [run["crossed"][gap][1] for run in results[n]] for n in SCHEMES}
        return [
            fmean(spent["vanilla"][seed] / spent[name][seed] for seed in seeds)
            for name in SCHEMES[1:]
        ]

    return values


SCHEMES = ("vanilla", "TopK", "Sign", "SignTopK")
TRANSFER = ("error-phase-1", "error", "error-scratch")


def transfer(data: Data) -> list[float]:
    """Return the errors with 100 + 100 samples and 20 dB."""
    return [fmean(run[n] for run in data["true"]["100"]["20.0"]) for n in TRANSFER]


def gain_of_frozen_features(data: Data) -> list[float]:
    """Return how much faster a round with features computed once is."""
    each, once, representation = data["head-epochs"].values()
    return [(each + representation) / (once + representation)]


def beside_peers(data: Data) -> list[float]:
    """Return rounds of flwr-frl and of other libraries in those of the bare loop."""
    long, short, fedavg = (
        {
            name: median(s for seconds in each["seconds"] for s in seconds)
            for name, each in by_name.items()
        }
        for by_name in data["works"].values()
    )
    pairs = [
        (work, name) for work in (long, short) for name in (peer.INLINE, peer.PFLLIB)
    ]
    pairs += [(fedavg, name) for name in PEERS]
    return [work[name] / work[peer.BARE] for work, name in pairs]


PEERS = (
    peer.INLINE,
    peer.PFLLIB,
    peer.BLAZEFL,
    peer.RAY,
    peer.BLAZEFL_PROCESSES,
    peer.FLOWER,
    peer.CHANNELS_LAST,
)


def cosines(algorithm: str) -> Callable[[Data], list[float]]:
    """Return the mean cosine for each model."""
    return lambda data: [
        fmean(data["cosines"][f"{algorithm}/{model}"]) for model in ("logistic", "mlp")
    ]


def message_sizes(data: Data) -> list[float]:
    """Return what a device receives: MB of FedRep, kB of LG-FedAvg and SQuARM-SGD."""
    sizes = {name: found["float32"] for name, found in data["bytes"].items()}
    squarm = sizes["squarm-sgd, sign-top-k"]
    return [
        sizes["fedrep"]["down"][0] / 1e6,
        sizes["lg-fedavg"]["down"][0] / 1e3,
        *(squarm[way][0] / 1e3 for way in ("down", "up")),
    ]


def _srpfl(label: str, page: str, *pairs: str, column: int = 1) -> list[Figure]:
    return [
        Figure("README.md", cell(label, i), f"srpfl_time-{page}", time_and_gap(fast))
        for i, fast in enumerate(pairs, column)
    ]


FIXED_150 = "[fixed, 20 %, 150, augmented]"
DRAWN = "drawn in each round, 20 %"
FIVE = ("fedrep", "fedavg-ft", "fedper", "flute", "flute-star")
THOUSAND = ("fedrep", "fedavg-ft", "fedper", "lg-fedavg", "fed-mtl", "fedrep-5")
ALL_PAIRS = ("srpfl", "lg-srpfl", "flanp", "flanp-ft")
FIGURES = [
    *(
        Figure("README.md", cell(label), page, values)
        for label, page, values in (
            ("`fedrep`, 1 head epoch", "papers_tables", of_papers("fedrep-1")),
            ("`fedrep`, 10 head epochs", "papers_tables", of_papers("fedrep")),
            ("`fedper`, both", "papers_tables", of_papers("fedper")),
            ("`flute` (three", "papers_tables", of_papers("flute")),
            (
                "`flute-star`, head epochs first",
                "papers_tables",
                of_papers("flute-star"),
            ),
            (
                "`flute-star`, head epochs last",
                "papers_tables",
                of_papers("flute-star-after"),
            ),
            (
                "`fedavg` / `fedavg-ft`",
                "papers_tables",
                lambda data: [
                    *of_papers("fedavg-ft", metric="accuracy-global")(data),
                    *of_papers("fedavg-ft")(data),
                ],
            ),
            ("2 shards: `fedrep`", "papers_tables", of_cell("100x2", FIVE)),
            ("50 clients: `fedrep`", "papers_tables", of_cell("50x5", FIVE)),
            ("50 clients, 2 shards", "papers_tables", of_cell("50x2", FIVE)),
            ("1,000 clients", "papers_tables", of_cell("1000x2", THOUSAND)),
            ("`srpfl` less `fedrep`", "srpfl_time-fixed-1-plain", at_same_time),
            (
                "linear SRPFL",
                "srpfl_speedup",
                lambda data: [
                    data[str(2**power)]["ratios"][stages]
                    for stages in ("theory", "25,5")
                    for power in range(4, 9)
                ],
            ),
            ("QCQP", "multi_task", factors("qcqp", "0.001")),
            ("its logistic", "multi_task", factors("logistic", "0.03")),
            ("`representation-transfer`, 100", "representation_transfer", transfer),
            (
                "its claims",
                "representation_transfer",
                lambda data: [
                    sum(true for *_, true in data["claims"]),
                    len(data["claims"]),
                ],
            ),
        )
    ),
    *_gossip("logistic regression", "gossip_convex"),
    *_gossip("ResNet-20", "gossip_cifar"),
    *_srpfl("[fixed, all, 40]", "fixed-1-plain", *ALL_PAIRS),
    *_srpfl("[drawn in each round, all, 40]", "dynamic-1-plain", *ALL_PAIRS),
    *_srpfl("[fixed, all, 40, augmented]", "fixed-1", *ALL_PAIRS[:2]),
    *_srpfl("[fixed, 20 %, 30, augmented]", "fixed-0.2", *ALL_PAIRS),
    *_srpfl(FIXED_150, "fixed-0.2-150", "srpfl"),
    *_srpfl(FIXED_150, "fixed-0.2-150-lg", "lg-srpfl", column=2),
    *_srpfl("[drawn in each round, 20 %, 150", "dynamic-0.2-150", "srpfl"),
    *_srpfl(DRAWN, "dynamic-0.2", "srpfl"),
    *_srpfl(DRAWN, "dynamic-0.2-plain", "lg-srpfl", column=2),
    *_srpfl(DRAWN, "dynamic-0.2-plain-flanp", "flanp", "flanp-ft", column=3),
    Figure(
        "README.md",
        r"a round with 10 head epochs is \[([\d.]+) times\]",
        "speed",
        gain_of_frozen_features,
    ),
    Figure(
        "README.md",
        r"FedRep, 10 head epochs (\|(?:.*\n)*?.* the loop takes [\d.]+)",
        "peers",
        beside_peers,
    ),
    *(
        Figure(
            "docs/privacy.md",
            rf"^\| `{algorithm}`(?:, SignTopK of 1 %)? \|( [\d.]+ \| [\d.]+) \|",
            "privacy",
            cosines(algorithm),
        )
        for algorithm in ("dpsgd", "choco-sgd", "squarm-sgd")
    ),
    Figure(
        "deploy/README.md",
        r"sends, ([\d.]+) MB a round with FedRep, FLUTE or FedAvg, (\d+) kB with "
        r"LG-FedAvg, and with\nSQuARM-SGD .*, two neighbours\) (\d+) kB and (\d+) kB",
        "slow_links",
        message_sizes,
    ),
]
