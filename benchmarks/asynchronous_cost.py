"""Compare the CPU time of a message in asynchronous and synchronous rounds, inline.

Clients only add 1 to an array, so the time is that of creating, sending, checking and
combining messages. Both kinds of rounds end after the same number of replies. The
script prints the ratio of the minimum times of ``--repeats`` measurements, and splits
the time into a part per message and a part per round, which does not depend on the
number of replies.
"""

import argparse
import logging
import time

import numpy as np
from flwr.app import ConfigRecord, Message, MessageType, MetricRecord, RecordDict

from flwr_frl.strategies import FedAvg, FedBuff, Strategy
from flwr_frl.strategies.grids.simulated_arrivals import SimulatedArrivals
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.grids.speeds import SpeedModel
from flwr_frl.strategies.server.replies import to_record
from flwr_frl.strategies.server.rounds import run_rounds

CLIENTS, AT_WORK = 100, 20


def client(message: Message, context: object) -> Message:
    """Answer a query about the client, or add 1 to the array."""
    if message.metadata.message_type != MessageType.TRAIN:
        node = message.metadata.dst_node_id
        about = {"client": f"{node:06}", "structure": "", "num-examples": 1}
        record = ConfigRecord({**about, "num-test-examples": 1})
        return Message(RecordDict({"properties": record}), reply_to=message)
    x = message.content.array_records["arrays"]["x"].numpy()
    arrays = to_record({"x": x + np.float32(1)})
    metrics = MetricRecord({"num-examples": 1, "train-loss": 0.0})
    return Message(RecordDict({"arrays": arrays, "m": metrics}), reply_to=message)


def seconds(strategy: Strategy, replies: int, size: int, messages: int) -> float:
    """Return the CPU seconds per message if `replies` replies end a round."""
    speeds = SpeedModel("dynamic", CLIENTS, seed=0)
    clock = SimulatedArrivals(InlineGrid(client, CLIENTS), speeds, 0.0, lambda n: n - 1)
    grid = strategy.participation.adapt_grid(clock, strategy.clients.name_of)
    arrays = to_record({"x": np.zeros(size, np.float32)})
    count = messages // replies

    def run(rounds: range) -> None:
        run_rounds(
            strategy,
            grid,
            arrays,
            rounds,
            evaluated=lambda server_round: False,
            after_round=lambda *_: strategy.snapshot() is None,
        )

    run(range(1, 4))
    began = time.process_time()
    run(range(4, 4 + count))
    return (time.process_time() - began) / (count * replies)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=1000, help="entries of the array")
    parser.add_argument("--messages", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    totals: dict[int, dict[str, float]] = {}
    for replies in (20, 5, 1):
        times: dict[str, list[float]] = {"synchronous": [], "asynchronous": []}
        for _ in range(arguments.repeats):
            wrapper = FedBuff(FedAvg(), concurrency=AT_WORK, buffer_size=replies)
            for kind, strategy in {
                "synchronous": FedAvg(fraction_train=replies / CLIENTS),
                "asynchronous": wrapper.strategy,
            }.items():
                about = strategy, replies, arguments.size, arguments.messages
                times[kind].append(seconds(*about))
        least = {kind: min(found) for kind, found in times.items()}
        totals[replies] = least
        show(f"{replies} replies a round", least)
    message = {kind: (20 * s - totals[1][kind]) / 19 for kind, s in totals[20].items()}
    show("a message alone", message)
    show("a round alone", {kind: totals[1][kind] - s for kind, s in message.items()})


def show(about: str, times: dict[str, float]) -> None:
    """Print the times of both kinds of rounds, and their ratio."""
    each = ", ".join(f"{1e6 * s:.0f} µs {kind}" for kind, s in times.items())
    ratio = times["asynchronous"] / times["synchronous"]
    print(f"{about}: {each}, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
