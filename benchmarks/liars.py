"""Accuracy of FedAvg, FedRep and FLUTE under Byzantine clients, by aggregation rule.

Ten clients train on the bundled digits. The first one, two or three of them attack
together and know everything that the honest clients send (`benchmarks.attacks`). Each
honest client tests the model that it would use, on its own test data. ``--quick`` runs
one algorithm with few rules and few rounds.
"""

import argparse
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord
from rich.progress import track

from benchmarks.attacks import (
    ATTACKS,
    BACKDOOR,
    CLIENTS,
    AttackedGrid,
    least_suspicious,
)
from benchmarks.backdoor import BackdoorDigits
from benchmarks.common import markdown, write
from flwr_frl.clients.client_app import make_app
from flwr_frl.common.settings import resolve
from flwr_frl.strategies import build_strategy
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.aggregation import RULES
from flwr_frl.strategies.server.rounds import run_rounds

ALGORITHMS = ("fedavg", "fedrep", "flute")
MOST = 3
COUNTS = (1, 2, MOST)
# Rule and bucket size of each row
ROWS = (
    *((rule, 0) for rule in RULES),
    ("median", 2),
    ("centered-clip", 2),
    ("multi-krum", 2),
)
# Classes per client, from similar data to very different data
ALL_CLASSES, FEW_CLASSES = 10, 2


class Cell(NamedTuple):
    """The algorithm, rule and attack of a run."""

    algorithm: str
    rule: str
    bucket_size: int
    attack: str = ""
    attackers: int = 0
    classes: int = ALL_CLASSES


class Outcome(NamedTuple):
    """Means over the honest clients and the last rounds, between 0 and 1.

    Parameters
    ----------
    accuracy : float
        Accuracy on clean digits.
    success : float
        Share of triggered digits of other classes that are classified as the target.
    """

    accuracy: float
    success: float


def outcome(arguments: argparse.Namespace, cell: Cell) -> Outcome:
    """Carry out a run and return its outcome."""
    settings = resolve(
        {
            "algorithm": cell.algorithm,
            "task": "benchmarks.backdoor:BackdoorDigits",
            "attackers": cell.attackers if cell.attack == BACKDOOR else 0,
            "aggregation": cell.rule,
            "bucket-size": cell.bucket_size,
            # The server does not know the actual number of attackers, only the maximum.
            "byzantine-fraction": MOST / CLIENTS,
            "num-clients": CLIENTS,
            "num-server-rounds": arguments.rounds,
            "fraction-train": 1.0,
            "classes-per-client": cell.classes,
            "representation-epochs": 2,
            "head-epochs": 3,
            "batch-size": 20,
            "learning-rate": 0.1,
            "seed": arguments.seed,
        },
        [BackdoorDigits],
    )
    grid = AttackedGrid(make_app(settings), cell.attack, cell.attackers)
    # The same clients with triggered test data
    triggered = InlineGrid(make_app({**settings, "test-triggered": True}), CLIENTS)
    triggered.contexts = grid.contexts
    strategy = build_strategy(settings)
    clean: list[float] = []
    fooled: list[float] = []

    def test(on: InlineGrid, server_round: int, arrays: ArrayRecord) -> float:
        messages = strategy.configure_evaluate(server_round, arrays, ConfigRecord(), on)
        # A model that can no longer be tested counts as 0 % accurate.
        right = [
            float(reply.content.metric_records["metrics"].get("accuracy", 0.0))
            for reply in on.send_and_receive(messages)
            if reply.has_content() and not grid.is_attacker(reply)
        ]
        return sum(right) / (CLIENTS - cell.attackers)

    def after_round(r: int, arrays: ArrayRecord, metrics: dict[str, Any]) -> None:
        if r > arguments.rounds - arguments.last:
            clean.append(test(grid, r, arrays))
            if cell.attack in ("", BACKDOOR):
                fooled.append(test(triggered, r, arrays))

    run_rounds(
        strategy,
        grid,
        strategy.initialize(grid),
        range(1, arguments.rounds + 1),
        evaluated=lambda r: False,
        after_round=after_round,
    )
    return Outcome(fmean(clean), fmean(fooled or [0.0]))


def cells(algorithms: Sequence[str], rows: Sequence[tuple[str, int]]) -> list[Cell]:
    """Return all runs of the page."""
    attacks = [(attack, f) for attack in ATTACKS for f in COUNTS]
    settings = [
        ("", 0, ALL_CLASSES),
        ("", 0, FEW_CLASSES),
        *((attack, f, ALL_CLASSES) for attack, f in attacks),
    ]
    return [
        Cell(algorithm, rule, size, *setting)
        for algorithm in algorithms
        for rule, size in rows
        for setting in settings
    ]


def label(rule: str, size: int) -> str:
    """Return the label of a row."""
    return f"`{rule}`" + (f", `bucket-size={size}`" if size else "")


def percent(values: Iterable[float]) -> str:
    """Format fractions as percentages, separated by slashes."""
    return " / ".join(f"{100 * value:.1f}" for value in values)


def table(results: dict[Cell, Outcome], algorithm: str) -> str:
    """Return an algorithm's table of accuracies and of the backdoor's success rate."""
    rows = []
    for rule, size in dict.fromkeys(cell[1:3] for cell in results):
        here = (algorithm, rule, size)
        honest = [results[Cell(*here, "", 0, n)] for n in (ALL_CLASSES, FEW_CLASSES)]
        attacked = {
            attack: [results[Cell(*here, attack, f)] for f in COUNTS]
            for attack in ATTACKS
        }
        rows.append(
            [
                label(rule, size),
                *(percent([own.accuracy]) for own in honest),
                *(percent(o.accuracy for o in own) for own in attacked.values()),
                percent(own.success for own in attacked[BACKDOOR]),
            ]
        )
    few = f"none, {FEW_CLASSES} classes"
    head = ["rule", "none", few, *ATTACKS, "backdoor success rate"]
    return f"## `{algorithm}`\n\n{markdown(head, rows)}\n"


def worst(results: dict[Cell, Outcome]) -> str:
    """Return a table of each rule's lowest accuracy over all attacks."""
    algorithms = list(dict.fromkeys(cell.algorithm for cell in results))
    rows = []
    for rule, size in dict.fromkeys(cell[1:3] for cell in results):
        row = [label(rule, size)]
        for algorithm in algorithms:
            of_counts = [
                [
                    own.accuracy
                    for cell, own in results.items()
                    if cell[:3] == (algorithm, rule, size) and cell.attackers == f
                ]
                for f in COUNTS
            ]
            row.append(percent(map(min, of_counts)))
        rows.append(row)
    head = ["rule", *(f"`{algorithm}`" for algorithm in algorithms)]
    return markdown(head, rows)


def guidance(results: dict[Cell, Outcome]) -> str:
    """Return advice on the choice of a rule, with the numbers behind it."""

    def right(rule: str, *rest: Any, algorithm: str = "fedavg", size: int = 0) -> str:
        return percent([results[Cell(algorithm, rule, size, *rest)].accuracy])

    def fooled(rule: str, *counts: int, algorithm: str = "fedavg") -> str:
        of_counts = [Cell(algorithm, rule, 0, BACKDOOR, f) for f in counts or COUNTS]
        return percent(results[cell].success for cell in of_counts)

    def least(rule: str) -> str:
        here = ("fedavg", rule, 0)
        return percent(
            [
                min(
                    own.accuracy
                    for cell, own in results.items()
                    if cell[:3] == here and cell.attackers == MOST
                )
            ]
        )

    few, middle = ("", 0, FEW_CLASSES), ("IPM 0.5", MOST)
    points = [
        "`centered-clip` is the first choice. Without an attack FedAvg has "
        f"{right('centered-clip')} % with it and {right('mean')} % with the `mean`; "
        f"with {FEW_CLASSES} classes a client {right('centered-clip', *few)} and "
        f"{right('mean', *few)} %. Under the worst attack of {MOST} of {CLIENTS} it "
        f"has {least('centered-clip')} %, with `geometric-median` "
        f"{least('geometric-median')} % and with `clip` {least('clip')} %. None of "
        "the three stops a backdoor.",
        "`multi-krum` stops backdoors if clients have similar data: "
        f"with {MOST} attackers on FedAvg, the success rate is "
        f"{fooled('multi-krum', MOST)} "
        f"% with it, {fooled('median', MOST)} % with the `median` and "
        f"{fooled('centered-clip', MOST)} % with `centered-clip`. With {FEW_CLASSES} "
        f"classes a client its accuracy is {right('multi-krum', *few)} %, as it leaves "
        "out honest clients.",
        "`median` and `trimmed-mean` resist outliers, but not small biased updates: "
        f"under IPM 0.5 by {MOST} of {CLIENTS} FedAvg has {right('median', *middle)} "
        f"and {right('trimmed-mean', *middle)} % with them, and "
        f"{right('multi-krum', *middle)} % with `multi-krum`. This is less than the "
        f"{right('mean', *middle)} % of the `mean`.",
        "`bucket-size=2` helps such a rule if clients have different data and fewer "
        f"than a quarter of them attack. With {FEW_CLASSES} classes a client the "
        f"`median` has {right('median', *few)} % without it and "
        f"{right('median', *few, size=2)} % with it. Each attacker can corrupt one "
        f"bucket: {MOST} of {CLIENTS} corrupt the majority of five buckets, and no "
        "rule helps.",
        "FedRep's personal heads resist a backdoor in the shared representation, and "
        "FLUTE's resist it less. With the `mean` and 1 / 2 / 3 attackers, the success "
        f"rate of the backdoor is {fooled('mean')} % for "
        f"FedAvg, {fooled('mean', algorithm='fedrep')} % for FedRep and "
        f"{fooled('mean', algorithm='flute')} % for FLUTE.",
    ]
    return "Choice of a rule:\n\n" + "".join(f"- {point}\n" for point in points)


def page(arguments: argparse.Namespace, results: dict[Cell, Outcome]) -> str:
    """Return the text of the page below its heading."""
    z = ", ".join(f"{least_suspicious(CLIENTS, f):.2f}" for f in COUNTS)
    algorithms = dict.fromkeys(cell.algorithm for cell in results)
    return "\n".join(
        [
            guidance(results) if len(algorithms) == len(ALGORITHMS) else "",
            "## The worst attack\n",
            f"Lowest accuracy in % over all attacks, by {COUNTS[0]} / {COUNTS[1]} / "
            f"{COUNTS[2]} of {CLIENTS} clients.\n",
            worst(results),
            "## All attacks\n",
            f"Accuracy in % over {arguments.rounds} rounds, mean of the last "
            f"{arguments.last}, for the models of the honest clients, each on its "
            f"own test digits; seed {arguments.seed}. There are {CLIENTS} clients "
            f"with all ten classes each, except in the column with {FEW_CLASSES} "
            "classes. Each cell has values for 1 / 2 / 3 attackers. "
            f"`byzantine-fraction` is {MOST / CLIENTS:g}; the other settings of the "
            "rules have their defaults. The model is a perceptron with one hidden "
            "layer.\n",
            "Attackers know the updates of all honest clients. The attacks are:\n",
            "- `1e30`: every value is 1e30.\n"
            "- `sign flip`: the trained model with all signs flipped.\n"
            "- `ALIE`, a little is enough (Baruch et al., 2019): the mean of the "
            "honest clients minus z standard deviations of each entry. Their formula "
            f"gives z = {z} for 1, 2 and 3 of 10 clients; the other column uses z = "
            "1.5.\n- `IPM`, inner product manipulation (Xie et al., 2020): the "
            "global model minus 0.5 or 3 times the mean honest update.\n- "
            "`backdoor`, model replacement (Bagdasaryan et al., 2020): attackers add "
            "a white patch of 2 x 2 pixels in the corner to every second training "
            "digit and label it 0. With f attackers, each sends 10/f times its "
            "update. The success rate is the share of test digits of other classes "
            "that are classified as 0 with the patch.\n",
            *(table(results, algorithm) for algorithm in algorithms),
        ]
    )


def main() -> None:
    """Carry out all runs and write ``results/liars``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--last", type=int, default=3, help="number of rounds tested")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    algorithms, rows = ALGORITHMS, ROWS
    if arguments.quick:
        arguments.rounds, algorithms, rows = 4, ("fedavg",), (("mean", 0), ("clip", 0))
    runs = track(cells(algorithms, rows))
    results = {cell: outcome(arguments, cell) for cell in runs}
    body = page(arguments, results)
    if arguments.quick:
        print(body)
        return
    found = {"/".join(map(str, cell)): own._asdict() for cell, own in results.items()}
    data = {"results": found, "arguments": vars(arguments)}
    write("liars", "Byzantine clients", body, data)


if __name__ == "__main__":
    main()
