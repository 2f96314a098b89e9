"""What liars do to FedAvg, FedRep and FLUTE under each rule of aggregation.

Ten clients train on the bundled digits; one to four of them send something else than
what they have trained: every value 1e30, the model with flipped signs, the model times
100, or what was sent minus ten times their change. All are evaluated, each on its own
test data, and the mean accuracy is that of the last five rounds. ``--quick`` takes one
algorithm and a few rounds.
"""

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
from common import markdown, write
from flwr.app import Array, ArrayRecord, Context, Message, MessageType
from rich.progress import track

from clients.client_app import make_app
from strategies import build_strategy
from strategies.grids.simulation import InlineGrid
from strategies.server.aggregation import RULES
from strategies.server.rounds import run_rounds
from task.settings import resolve

CLIENTS, LAST = 10, 5
# Classes a client: from data like everybody's to hardly any in common.
CLASSES = (10, 5, 2)
ALGORITHMS = ("fedavg", "fedrep", "flute")
Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]
# From what was sent and what was trained to what a liar says.
LIES: dict[str, Callable[[Floats, Floats], Floats]] = {
    "1e30": lambda sent, own: np.full_like(own, 1e30),
    "sign flip": lambda sent, own: -own,
    "x100": lambda sent, own: 100 * own,
    "Δ x -10": lambda sent, own: sent - 10 * (own - sent),
}


def lying(app: Any, lie: str, liars: int) -> Any:
    """Return a ClientApp of which the first few clients lie when they have trained."""

    def answer(message: Message, context: Context) -> Message:
        reply = app(message, context)
        trains = message.metadata.message_type == MessageType.TRAIN
        if trains and int(context.node_config["partition-id"]) < liars:
            for key, record in reply.content.array_records.items():
                sent = message.content.array_records[key]
                reply.content[key] = ArrayRecord(
                    {
                        name: Array(changed(lie, sent[name].numpy(), array.numpy()))
                        for name, array in record.items()
                    }
                )
        return reply

    return answer


def changed(lie: str, sent: Floats, own: Floats) -> Floats:
    """Return what a liar says, in the type that is expected."""
    with np.errstate(over="ignore"):
        return np.asarray(LIES[lie](sent, own), own.dtype)


def accuracy(
    arguments: argparse.Namespace,
    algorithm: str,
    rule: str,
    lie: str,
    liars: int,
    classes: int = CLASSES[0],
) -> float:
    """Return the mean accuracy over the clients and the last rounds of a run."""
    settings = resolve(
        {
            "algorithm": algorithm,
            "aggregation": rule,
            # At most so many lie; who chooses the rule does not know better.
            "liar-share": 0.4,
            "num-clients": CLIENTS,
            "num-server-rounds": arguments.rounds,
            "fraction-train": 1.0,
            "classes-per-client": classes,
            "representation-epochs": 2,
            "head-epochs": 3,
            "learning-rate": 0.05,
            "seed": arguments.seed,
        }
    )
    app = make_app(settings)
    grid = InlineGrid(lying(app, lie, liars) if liars else app, CLIENTS)
    strategy = build_strategy(settings)
    found: list[float] = []

    def after_round(r: int, arrays: ArrayRecord, metrics: dict[str, Any]) -> None:
        if "accuracy" in metrics:
            found.append(float(metrics["accuracy"]))

    run_rounds(
        strategy,
        grid,
        strategy.initialize(grid),
        range(1, arguments.rounds + 1),
        evaluated=lambda r: r > arguments.rounds - LAST,
        after_round=after_round,
    )
    # Where nobody can be evaluated any more, nothing is right.
    return float(np.sum(found)) / min(LAST, arguments.rounds)


def main() -> None:
    """Run all and write ``results/liars``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    algorithms, counts = ALGORITHMS, (1, 2, 3, 4)
    if arguments.quick:
        arguments.rounds, algorithms, counts = 6, ("fedavg",), (1, 4)
    cells = [
        (algorithm, rule, lie, liars)
        for algorithm in algorithms
        for rule in RULES
        for lie, liars in [("", 0), *((lie, n) for lie in LIES for n in counts)]
    ]
    costs = {
        (algorithm, rule, n): accuracy(arguments, algorithm, rule, "", 0, n)
        for algorithm in algorithms
        for rule in RULES
        for n in CLASSES[1:]
    }
    results: dict[tuple[str, str, str, int], float] = {}
    for cell in track(cells):
        algorithm, rule, lie, liars = cell
        results[cell] = accuracy(arguments, algorithm, rule, lie, liars)
    body = (
        f"Accuracy in % after {arguments.rounds} rounds, mean of the last {LAST}; "
        f"{CLIENTS} clients with all ten classes each. The columns of the lies are for "
        f"{' / '.join(map(str, counts))} liars of ten; 0.0 is a run after which nobody "
        "could be evaluated any more. Beside it, with honest clients, what a rule "
        f"costs where clients have {', '.join(map(str, CLASSES[1:]))} of the classes "
        "each. "
        "`trimmed-mean` is given four liars of ten to leave out at either end, "
        "which leaves the two in the middle: the `median`. The mean is over all "
        "ten, liars included; what FLUTE's liars say of their own heads, which "
        "the server keeps for them, costs them their own tenth under every "
        "rule.\n\n"
    )
    for algorithm in algorithms:
        rows = [
            [
                f"`{rule}`",
                f"{100 * results[algorithm, rule, '', 0]:.1f}",
                *(f"{100 * costs[algorithm, rule, n]:.1f}" for n in CLASSES[1:]),
                *(
                    " / ".join(
                        f"{100 * results[algorithm, rule, lie, n]:.1f}" for n in counts
                    )
                    for lie in LIES
                ),
            ]
            for rule in RULES
        ]
        fewer = [f"honest, {n} classes" for n in CLASSES[1:]]
        head = ["rule", "honest", *fewer, *LIES]
        body += f"## `{algorithm}`\n\n{markdown(head, rows)}\n"
    if arguments.quick:
        print(body)
        return
    data = {"/".join(map(str, cell)): value for cell, value in results.items()}
    fewer_classes = {"/".join(map(str, cell)): value for cell, value in costs.items()}
    whole = {"accuracy": data, "honest": fewer_classes, "arguments": vars(arguments)}
    write("liars", "Liars", body, whole)


if __name__ == "__main__":
    main()
