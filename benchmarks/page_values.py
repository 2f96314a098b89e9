"""Functions that compute the numbers in texts from the JSON of their pages."""

import math
from collections.abc import Callable
from statistics import fmean, median
from typing import Any

from benchmarks import peers_names as peer

Data = dict[str, Any]


def ranks(data: Data) -> list[float]:
    """Return the number of algorithms in the leaderboard, and the ranks of two."""
    means = {
        name: fmean(fmean(run["accuracy"] for run in runs) for runs in cells.values())
        for name, cells in data["results"].items()
        if all("accuracy" in run for runs in cells.values() for run in runs)
    }
    order = sorted(means, key=lambda name: -means[name])
    places = [order.index(name) + 1 for name in ("pfedfda", "flute-star")]
    return [len(data["results"]), *places]


def of_triggers(data: Data) -> list[float]:
    """Return in how many runs a trigger costs bits, of those that reach the target."""
    ratios = [
        ratio
        for name, own in data["measured"].items()
        if name.startswith("SQuARM, c = ")
        for ratio in own["ratio"]
        if not math.isnan(ratio)
    ]
    return [sum(ratio >= 1 for ratio in ratios), len(ratios)]


def leads_of_fine_tuning(
    cell: str, other: str = "fedrep"
) -> Callable[[Data], list[float]]:
    """Return a function for FedAvg-FT's leads over another method in points.

    These are the lead as published, with fresh heads for both, and with old heads for
    both.
    """
    kept, fresh, old = "accuracy", "accuracy-fresh", "accuracy-old-received"

    def leads(data: Data) -> list[float]:
        runs, others = (data["cells"][cell][name] for name in ("fedavg", other))
        return [
            fmean(runs[seed][own] - others[seed][its] for seed in runs.keys() & others)
            for own, its in ((fresh, kept), (fresh, fresh), (old, kept))
        ]

    return leads


def held_back(data: Data) -> list[float]:
    """Return the share of messages (in %) that the lowest trigger suppresses."""
    return [100 - 100 * fmean(data["measured"]["SQuARM, c = 1e4"]["sizes"])]


def time_and_gap(fast: str) -> Callable[[Data], list[float]]:
    """Return a function for shares of the base's time and the final lead in points."""

    def values(data: Data) -> list[float]:
        entry = data[fast]
        shares = [a / b for a, b in (entry[f"C.T. {c}"] for c in (0, 10, 100))]
        base = next(name for name in entry["final"] if name != fast)
        gap = 100 * (entry["final"][fast] - entry["final"][base])
        reached = [share for share in shares if not math.isnan(share)]
        return [*(reached or [math.nan]), gap]

    return values


def at_same_time(data: Data) -> list[float]:
    """Return SRPFL's accuracy gain in points at FedRep's finishing time."""
    (times, accuracies), limit = (
        data["curves"]["srpfl"],
        data["curves"]["fedrep"][0][-1],
    )
    done = [a for time, a in zip(times, accuracies, strict=True) if time <= limit]
    return [100 * (done[-1] - data["srpfl"]["final"]["fedrep"])]


def target(data: Data) -> list[float]:
    """Return the error in % that all methods of a gossip page reach."""
    return [100 * data["target"]]


def bits_to_12(method: str) -> Callable[[Data], list[float]]:
    """Return a function for a method's bits to 12 %, relative to SQuARM-SGD's.

    Both have the paper's step size.
    """

    def values(data: Data) -> list[float]:
        runs = {key: own for key, own in data["runs"].items() if "paper's" in key}
        (base,) = (own for key, own in runs.items() if key.startswith("SQuARM, c"))
        ratios = zip(runs[f"{method} / paper's"], base, strict=True)
        return [fmean(a["rows"][-1]["bits"] / b["rows"][-1]["bits"] for a, b in ratios)]

    return values


def factors(problem: str, gap: str) -> Callable[[Data], list[float]]:
    """Return a function for the reduction of bits by compression, mean over seeds."""

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
    """Return the speed-up of a round by computing frozen features only once."""
    each, once, representation = data["head-epochs"].values()
    return [(each + representation) / (once + representation)]


def beside_peers(data: Data) -> list[float]:
    """Return the time of a round with each library, relative to the bare loop."""
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
    """Return the CPU time of softmax regression, relative to the bare loop."""
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
    """Return a function for the mean cosine of each model."""
    return lambda data: [
        fmean(data["cosines"][f"{algorithm}/{model}"]) for model in ("logistic", "mlp")
    ]


def message_sizes(data: Data) -> list[float]:
    """Return message sizes: MB of FedRep, kB of LG-FedAvg and SQuARM-SGD."""
    sizes = {name: found["float32"] for name, found in data["bytes"].items()}
    squarm = sizes["squarm-sgd, sign-top-k"]
    return [
        sizes["fedrep"]["down"][0] / 1e6,
        sizes["lg-fedavg"]["down"][0] / 1e3,
        *(squarm[way][0] / 1e3 for way in ("down", "up")),
    ]
