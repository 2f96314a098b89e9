"""A minimal app for rounds by real arrival order: SRPFL rounds and FedBuff versions.

In SRPFL rounds, clients reply with the number of the round; under FedBuff, they add 1
to the received array. Events, not durations, decide which client is slow: see `hold`.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from flwr_frl.strategies import SRPFL, FedBuff, Strategy
from flwr_frl.strategies.grids.inbox import Inbox
from flwr_frl.strategies.server.loop import run_rounds

NODES, ROUNDS, VERSIONS = 4, 6, 10
# Rounds that close while the slow client handles its first message
MISSED = 3
# Longest time that a client is held, in seconds
LONGEST = 300.0

client = ClientApp()
server = ServerApp()


def folder_of(context) -> Path:
    return Path(str(context.run_config["log"]))


def note(context, kind, **values):
    with (folder_of(context) / f"{kind}.jsonl").open("a") as file:
        file.write(json.dumps(values) + "\n")


def lines_of(context, kind) -> int:
    path = folder_of(context) / f"{kind}.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONGEST
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)


def hold(context, name, server_round):
    """Hold the slow client while it misses rounds, and the victim until it is killed.

    The others then continue only when the slow client has replied, so that the last
    rounds include its reply.
    """
    if name == "slow":
        wait_until(lambda: lines_of(context, "server") >= MISSED)
    elif name == "victim" and context.run_config["kill"] and server_round >= MISSED:
        wait_until(lambda: False)
    elif server_round > MISSED + 1:
        wait_until(lambda: lines_of(context, "slow-ends") > 0)


@client.query()
def query(message, context):
    properties = {"client": str(context.node_config["client-name"]), "structure": "x"}
    record = ConfigRecord({**properties, "num-examples": 1, "num-test-examples": 1})
    return Message(RecordDict({"properties": record}), reply_to=message)


@client.query("arrays")
def arrays(message, context):
    record = ArrayRecord({"x": Array(np.zeros(3, np.float32))})
    return Message(RecordDict({"arrays": record}), reply_to=message)


@client.train()
def train(message, context):
    name = str(context.node_config["client-name"])
    server_round = int(message.content["config"]["server-round"])
    sent = message.metadata.created_at
    note(context, f"{name}-begins", round=server_round, sent=sent)
    hold(context, name, server_round)
    x = np.full(3, server_round, np.float32)
    if context.run_config["asynchronous"]:
        x = message.content["arrays"]["x"].numpy() + np.float32(1)
    record = ArrayRecord({"x": Array(x)})
    metrics = MetricRecord({"num-examples": 1, "train-loss": 0.0})
    content = RecordDict({"arrays": record, "metrics": metrics})
    reply = Message(content, reply_to=message)
    note(context, f"{name}-ends", round=server_round, time=time.time())
    return reply


@client.evaluate()
def evaluate(message, context):
    metrics = MetricRecord({"num-examples": 1, "accuracy": 1.0})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


@server.main()
def main(grid, context):
    (versions if context.run_config["asynchronous"] else rounds)(grid, context)


def rounds(grid, context):
    """Run SRPFL with n = 1, 1, 2, 2, and then with all available clients."""
    base = Strategy(min_available_nodes=NODES, fraction_train=1.0)
    strategy = SRPFL(base, initial_nodes=1, rounds_per_stage=2)
    grid = Inbox(grid)
    initial = base.initialize(grid)

    def after_round(server_round, arrays, metrics):
        note(
            context,
            "server",
            round=server_round,
            value=arrays["x"].numpy().tolist(),
            clients=metrics["clients"],
            closed=time.time(),
            evaluated=sorted(base._run.evaluation.metrics),
        )

    run_rounds(
        strategy,
        grid,
        initial,
        range(1, ROUNDS + 1),
        evaluated=lambda server_round: server_round in (1, ROUNDS),
        timeout=LONGEST,
        after_round=after_round,
    )
    available = set(grid.get_node_ids())
    owed = [base._run.clients.name_of(node) for node in grid.connected - available]
    note(context, "end", owed=owed)


def versions(grid, context):
    """Run FedBuff with a buffer of one update."""
    base = Strategy(min_available_nodes=NODES)
    strategy = FedBuff(base, concurrency=NODES, buffer_size=1, staleness_exponent=1.0)
    strategy._run.participation.last_version = VERSIONS
    grid = Inbox(grid, strategy._run.clients.name_of)

    def after_round(version, arrays, metrics):
        updates = dict(strategy._run.participation.updates)
        x = arrays["x"].numpy().tolist()
        note(context, "server", **{**metrics, "x": x, "updates": updates})

    run_rounds(
        strategy,
        grid,
        ArrayRecord({"x": Array(np.zeros(3, np.float32))}),
        range(1, VERSIONS + 1),
        evaluated=lambda version: version == VERSIONS,
        timeout=LONGEST,
        after_round=after_round,
    )
