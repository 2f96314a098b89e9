"""The numbers in the README and the guides that come from pages of results.

A `Figure` is a place in a text, the page that its numbers come from, and a function
that reads them from the page's JSON. `benchmarks.held` compares them.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from benchmarks.page_values import (
    Data,
    at_same_time,
    beside_peers,
    bits_to_12,
    cosines,
    factors,
    gain_of_frozen_features,
    held_back,
    leads_of_fine_tuning,
    message_sizes,
    of_triggers,
    ranks,
    softmax_beside_peers,
    target,
    time_and_gap,
    transfer,
)
from benchmarks.published import PAPERS

PAGES = Path("benchmarks") / "results"
# The text with the tables of results
RESULTS_PAGE = "docs/results.md"


class Figure(NamedTuple):
    """Numbers in a text, and where they come from.

    Parameters
    ----------
    file : str
        Path of the text, relative to the repository's root.
    pattern : str
        Regular expression that matches once; its groups contain the numbers.
    page : str
        Name of the page in ``benchmarks/results``.
    values : callable
        Maps the page's JSON to the numbers, in the order of the text.
    """

    file: str
    pattern: str
    page: str
    values: Callable[[Data], Sequence[float]]


def cell(label: str, column: int = 1) -> str:
    """Return a pattern for a cell of the table row that begins with a label."""
    before = r"[^|\n]*\|" * column
    return rf"^\| {re.escape(label)}{before}([^|\n]*)\|"


def of_papers(
    row: str, metric: str = "accuracy", table: str = "100x5"
) -> Callable[[Data], list[float]]:
    """Return a function for a row's mean over seeds (in %) in the papers' tables."""
    return lambda data: [
        100 * fmean(run[metric] for run in data["results"][table][row].values())
    ]


def of_cell(table: str, rows: Sequence[str]) -> Callable[[Data], list[float]]:
    """Return a function for the means over seeds (in %) of some rows of a table."""
    return lambda data: [v for row in rows for v in of_papers(row, table=table)(data)]


def seeds_of(row: str) -> Callable[[Data], list[float]]:
    """Return a function for the number of seeds of a row of the table 100x5."""
    return lambda data: [len(data["results"]["100x5"][row])]


def published(table: str, *methods: str) -> Callable[[Data], list[float]]:
    """Return a function for published results; a method is PAPER: METHOD."""
    named = [method.split(": ") for method in methods]
    return lambda _: [
        PAPERS[f"{paper}, Table 1"][method][1][table] for paper, method in named
    ]


def _in_papers(
    label: str, own: Callable[[Data], list[float]], table: str, *methods: str
) -> Iterator[Figure]:
    """Yield the figures of a row: our results, and those of the papers."""
    yield Figure(RESULTS_PAGE, cell(label), "papers_tables", own)
    if methods:
        there = rf"^\| {re.escape(label)}[^|\n]*\|[^|\n]*\| ([\d.,; /]*\d)"
        page = published(table, *methods)
        yield Figure(RESULTS_PAGE, there, "papers_tables", page)


def _seeds(label: str, row: str) -> Figure:
    pattern = rf"^\| {re.escape(label)}[^|\n]*\((\d+) seeds\)"
    return Figure(RESULTS_PAGE, pattern, "papers_tables", seeds_of(row))


GOSSIP = (
    "no communication",
    "D-PSGD",
    "CHOCO (Sign)",
    "CHOCO (TopK)",
    "SQuARM, no trigger",
)
TRIGGERED = "SQuARM, c = 5000:5000:1000:6000"
# Labels of the rows of the gossip table, by key in the pages' JSON
GOSSIP_ROWS = {
    "error": "error",
    "own": "nodes' own error",
    "ratio": "bits to",
    "sizes": "bits by messages' sizes",
}


def _gossip(model: str, page: str) -> Iterator[Figure]:
    """Yield a model's figures in the gossip table: means over seeds, errors in %."""
    for what, label in GOSSIP_ROWS.items():
        is_error = what in ("error", "own")
        # Without communication there are no bits.
        for column, row in list(enumerate(GOSSIP, start=1))[not is_error :]:
            place = cell(f"[{model}: {label}", column)
            yield Figure(RESULTS_PAGE, place, page, _measured(row, what, is_error))


def _measured(row: str, what: str, is_error: bool) -> Callable[[Data], list[float]]:
    scale = 100 if is_error else 1
    return lambda data: [scale * fmean(data["measured"][row][what])]


def _srpfl(label: str, page: str, *pairs: str, column: int = 1) -> list[Figure]:
    return [
        Figure(RESULTS_PAGE, cell(label, i), f"srpfl_time-{page}", time_and_gap(fast))
        for i, fast in enumerate(pairs, column)
    ]


FIXED_150 = "[fixed, 20 %, 150, augmented]"
DRAWN = "drawn in each round, 20 %"
FIVE = ("fedrep", "fedavg-ft", "fedper", "flute", "flute-star")
FLUTES = ("FLUTE: FLUTE", "FLUTE: FLUTE*")
FIVE_FLUTE = ("FLUTE: FedRep*", "FLUTE: FedAvg-FT", "FLUTE: FedPer", *FLUTES)
FIVE_MIXED = ("FedRep: FedRep", "FedRep: FedAvg+FT", "FedRep: FedPer", *FLUTES)
THOUSAND = ("fedrep", "fedavg-ft", "fedper", "lg-fedavg", "fed-mtl")
THOUSAND_THERE = ("FedRep", "FedAvg+FT", "FedPer", "LG-FedAvg", "Fed-MTL")
# Rows with one method in 100x5: label, row of our page, method in the papers
ONE = (
    ("`fedrep`, 1 head epoch", "fedrep-1", "FLUTE: FedRep"),
    ("`fedrep`, 10 head epochs", "fedrep", "FedRep: FedRep"),
    ("`fedper`, both", "fedper", "FedRep: FedPer"),
    ("`flute` ", "flute", "FLUTE: FLUTE"),
    ("`flute-star`, head epochs first", "flute-star", "FLUTE: FLUTE*"),
)
GLOBAL_AND_TUNED = "`fedavg` / `fedavg-ft`"
ALL_PAIRS = ("srpfl", "lg-srpfl", "flanp", "flanp-ft")
FIGURES = [
    *(
        figure
        for label, row, there in ONE
        for figure in (
            *_in_papers(label, of_papers(row), "100x5", there),
            _seeds(label, row),
        )
    ),
    *_in_papers(
        "`flute-star`, head epochs last", of_papers("flute-star-after"), "100x5"
    ),
    *_in_papers(
        GLOBAL_AND_TUNED,
        lambda data: [
            *of_papers("fedavg-ft", metric="accuracy-global")(data),
            *of_papers("fedavg-ft")(data),
        ],
        *("100x5", "FedRep: FedAvg", "FedRep: FedAvg+FT"),
    ),
    _seeds(GLOBAL_AND_TUNED, "fedavg-ft"),
    *_in_papers(
        "the same with five local epochs",
        lambda data: [
            *of_papers("fedavg-ft-5", metric="accuracy-global")(data),
            *of_papers("fedavg-ft-5")(data),
        ],
        "100x5",
    ),
    *_in_papers(
        "`local`, all clients",
        of_papers("local-all"),
        *("100x5", "FedRep: Local only"),
    ),
    *(
        figure
        for label, table, rows, there in (
            ("2 shards (3 seeds", "100x2", FIVE, FIVE_MIXED),
            ("50 clients (2 seeds", "50x5", FIVE, FIVE_FLUTE),
            ("50 clients, 2 shards", "50x2", FIVE, FIVE_FLUTE),
            (
                *("1,000 clients", "1000x2", THOUSAND),
                [f"FedRep: {method}" for method in THOUSAND_THERE],
            ),
        )
        for figure in _in_papers(label, of_cell(table, rows), table, *there)
    ),
    *_in_papers(
        "the same clients, five",
        lambda data: [
            *of_cell("1000x2", ("fedrep-5", "fedavg-ft-5", "fedper-5"))(data),
            *of_papers("fedavg-ft-5", "accuracy-global", "1000x2")(data),
        ],
        "1000x2",
        *(f"FedRep: {name}" for name in ("FedRep", "FedAvg+FT", "FedPer", "FedAvg")),
    ),
    Figure(
        RESULTS_PAGE,
        cell("50 clients with 500 images each, 5"),
        "fifty_clients",
        of_cell("50x5", FIVE),
    ),
    Figure(
        RESULTS_PAGE,
        cell("50 clients with 500 images each, 2"),
        "fifty_clients",
        of_cell("50x2", FIVE),
    ),
    Figure(
        RESULTS_PAGE,
        r"of (\d+) algorithms on four\n(?:.*\n)*?.*`pfedfda` (\d+)st, `flute-star` "
        r"(\d+)nd",
        "leaderboard-20x40",
        ranks,
    ),
    *(
        Figure(RESULTS_PAGE, rf"^\| \[{model}: bits to ([\d.]+) %", page, target)
        for model, page in (
            ("logistic regression", "gossip_convex"),
            ("ResNet-20", "gossip_cifar"),
        )
    ),
    Figure(
        RESULTS_PAGE,
        r"over `fedrep` it is\s+(\S+) points with 5 shards; it is\s+(\S+) if both have "
        r"fresh heads,\s+and\s+(\S+)",
        "fedavg_ft",
        leads_of_fine_tuning("shards-5"),
    ),
    *(
        Figure(RESULTS_PAGE, pattern, "fedavg_ft", leads_of_fine_tuning(table))
        for table, pattern in (
            ("100x5", r"\[(\S+, \S+ and \S+)\]\S+ points with 5 shards, and"),
            ("100x2", r"\[(\S+, \S+ and \S+)\]\S+ with 2 \(3 seeds each"),
        )
    ),
    *(
        Figure(RESULTS_PAGE, pattern, "fedavg_ft", leads_of_fine_tuning(table, "flute"))
        for table, pattern in (
            ("100x5", r"they are \[(\S+, \S+ and \S+)\]\S+ with 5 shards and"),
            ("100x2", r"\[(\S+, \S+ and \S+)\]\S+ with 2\. Over `fedper`"),
        )
    ),
    Figure(
        RESULTS_PAGE,
        r"transfer reach\s+\[([\d.]+) %\](?:.|\n)*?\[([\d.]+) %\]\S+ when they train",
        "dissertation_networks",
        lambda data: [
            fmean(data["rows"][name]["accuracy"]) for name in ("phase-1", "local")
        ],
    ),
    Figure(
        RESULTS_PAGE,
        r"takes ([\d.]+) of its time on\s+16 cores.*, and ([\d.]+) of it",
        "gpu",
        lambda data: [
            data["FedRep, CIFAR-10's CNN"][way]
            / data["FedRep, CIFAR-10's CNN"]["on the CPU"]
            for way in ("together", "one by one")
        ],
    ),
    Figure(RESULTS_PAGE, r"\[(\d of these \d) cases\]", "gossip_convex", of_triggers),
    Figure(RESULTS_PAGE, r"holds\s+\[(\d+) % of", "gossip_convex", held_back),
    *(
        Figure(RESULTS_PAGE, cell(label), page, values)
        for label, page, values in (
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
    *(
        Figure(
            RESULTS_PAGE,
            cell("[logistic regression: the paper's 12 %]", column),
            "gossip_convex_target",
            bits_to_12(method),
        )
        for column, method in enumerate((*GOSSIP[1:4], TRIGGERED), start=2)
    ),
    *_gossip("ResNet-20", "gossip_cifar"),
    *_srpfl("[fixed, all, 40]", "fixed-1-plain", *ALL_PAIRS),
    *_srpfl("[drawn in each round, all, 40]", "dynamic-1-plain", *ALL_PAIRS),
    *_srpfl("[fixed, all, 40, augmented]", "fixed-1", *ALL_PAIRS[:2]),
    *_srpfl("[fixed, all, 150, augmented]", "fixed-1-150", "srpfl"),
    *_srpfl("[drawn in each round, all, 150, augmented]", "dynamic-1-150", "srpfl"),
    *_srpfl("[fixed, 20 %, 30, augmented]", "fixed-0.2", *ALL_PAIRS),
    *_srpfl(FIXED_150, "fixed-0.2-150", "srpfl"),
    *_srpfl(FIXED_150, "fixed-0.2-150-lg", "lg-srpfl", column=2),
    *_srpfl("[drawn in each round, 20 %, 150", "dynamic-0.2-150", "srpfl"),
    *_srpfl("[fixed, 20 %, 30, learning", "fixed-0.2-rate-0.1-plain", "srpfl"),
    *_srpfl("[fixed, a tenth of the clients", "groups-0.2-plain", "srpfl"),
    *_srpfl(DRAWN, "dynamic-0.2", "srpfl"),
    *_srpfl(DRAWN, "dynamic-0.2-plain", "lg-srpfl", column=2),
    *_srpfl(DRAWN, "dynamic-0.2-plain-flanp", "flanp", "flanp-ft", column=3),
    Figure(
        RESULTS_PAGE,
        r"a round with 10 head epochs is \[([\d.]+) times\]",
        "speed",
        gain_of_frozen_features,
    ),
    Figure(
        RESULTS_PAGE,
        r"FedRep, 10 head epochs (\|(?:.*\n)*?.* the loop takes [\d.]+)",
        "peers",
        beside_peers,
    ),
    Figure(
        RESULTS_PAGE,
        r"^(\| .*)\]\(\.\./benchmarks/results/peers-softmax\.md\) \|$",
        "peers-softmax",
        softmax_beside_peers,
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
