"""What README and guides say that is a page's: where, and its numbers there.

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
from benchmarks.published import PAPERS

Data = dict[str, Any]
PAGES = Path("benchmarks") / "results"
# The text that has the tables of results.
RESULTS_PAGE = "docs/results.md"


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


def seeds_of(row: str) -> Callable[[Data], list[float]]:
    """Return how many seeds a row of the 100x5 cell has."""
    return lambda data: [len(data["results"]["100x5"][row])]


def published(table: str, *methods: str) -> Callable[[Data], list[float]]:
    """Return a paper's figures of some methods, each as PAPER: METHOD."""
    named = [method.split(": ") for method in methods]
    return lambda _: [
        PAPERS[f"{paper}, Table 1"][method][1][table] for paper, method in named
    ]


def _in_papers(
    label: str, own: Callable[[Data], list[float]], table: str, *methods: str
) -> Iterator[Figure]:
    """Yield the figures of a row: what it has here, and in the papers."""
    yield Figure(RESULTS_PAGE, cell(label), "papers_tables", own)
    if methods:
        there = rf"^\| {re.escape(label)}[^|\n]*\|[^|\n]*\| ([\d.,; /]*\d)"
        page = published(table, *methods)
        yield Figure(RESULTS_PAGE, there, "papers_tables", page)


def _seeds(label: str, row: str) -> Figure:
    pattern = rf"^\| {re.escape(label)}[^|\n]*\((\d+) seeds\)"
    return Figure(RESULTS_PAGE, pattern, "papers_tables", seeds_of(row))


def ranks(data: Data) -> list[float]:
    """Return how many algorithms the leaderboard has, and two of their places."""
    means = {
        name: fmean(fmean(run["accuracy"] for run in runs) for runs in cells.values())
        for name, cells in data["results"].items()
        if all("accuracy" in run for runs in cells.values() for run in runs)
    }
    order = sorted(means, key=lambda name: -means[name])
    places = [order.index(name) + 1 for name in ("pfedfda", "flute-star")]
    return [len(data["results"]), *places]


def of_triggers(data: Data) -> list[float]:
    """Return in how many runs to the target a trigger costs bits, and how many are."""
    ratios = [
        ratio
        for name, own in data["measured"].items()
        if name.startswith("SQuARM, c = ")
        for ratio in own["ratio"]
        if not math.isnan(ratio)
    ]
    return [sum(ratio >= 1 for ratio in ratios), len(ratios)]


def leads_of_fine_tuning(data: Data) -> list[float]:
    """Return FedAvg-FT's leads over FedRep in points, with 5 shards and few images.

    They are the published one, and those with heads that are both fresh or both old.
    """
    runs, others = (data["cells"]["shards-5"][name] for name in ("fedavg", "fedrep"))
    kept, fresh, old = "accuracy", "accuracy-fresh", "accuracy-old-received"
    return [
        fmean(runs[seed][own] - others[seed][its] for seed in runs.keys() & others)
        for own, its in ((fresh, kept), (fresh, fresh), (old, kept))
    ]


def held_back(data: Data) -> list[float]:
    """Return the share of messages in % that the lowest trigger holds back."""
    return [100 - 100 * fmean(data["measured"]["SQuARM, c = 1e4"]["sizes"])]


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


def target(data: Data) -> list[float]:
    """Return the error in % that all methods of a gossip page reach."""
    return [100 * data["target"]]


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
            yield Figure(RESULTS_PAGE, place, page, _measured(row, what, is_error))


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
    long, short, fedavg, *_ = (
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


def softmax_beside_peers(data: Data) -> list[float]:
    """Return the CPU time of a round of softmax regression in the bare loop's."""
    (by_name,) = data["works"].values()
    cpu = {
        name: median(s for seconds in each["cpu"] for s in seconds)
        for name, each in by_name.items()
    }
    return [cpu[name] / cpu[peer.BARE] for name in SMALL_PEERS]


SMALL_PEERS = (
    peer.INLINE,
    peer.ONE_BY_ONE,
    peer.FEDJAX,
    peer.BLAZEFL,
    peer.PFL,
    peer.FLUKE,
    peer.PFLLIB,
)
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
        Figure(RESULTS_PAGE, cell(label, i), f"srpfl_time-{page}", time_and_gap(fast))
        for i, fast in enumerate(pairs, column)
    ]


FIXED_150 = "[fixed, 20 %, 150, augmented]"
DRAWN = "drawn in each round, 20 %"
FIVE = ("fedrep", "fedavg-ft", "fedper", "flute", "flute-star")
FLUTES = ("FLUTE: FLUTE", "FLUTE: FLUTE*")
FIVE_FLUTE = ("FLUTE: FedRep*", "FLUTE: FedAvg-FT", "FLUTE: FedPer", *FLUTES)
FIVE_MIXED = ("FedRep: FedRep", "FedRep: FedAvg+FT", "FedRep: FedPer", *FLUTES)
THOUSAND = ("fedrep", "fedavg-ft", "fedper", "lg-fedavg", "fed-mtl", "fedrep-5")
THOUSAND_THERE = ("FedRep", "FedAvg+FT", "FedPer", "LG-FedAvg", "Fed-MTL", "FedRep")
# Labels of rows with one method in 100x5, the row here, and whose it is there.
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
        leads_of_fine_tuning,
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
