"""A tiny app for SRPFL: clients sleep, then send back the number of the round."""

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from flwr_frl.strategies import SRPFL, BaseStrategy
from flwr_frl.strategies.grids.arrivals import RealArrivals
from flwr_frl.strategies.server.rounds import run_rounds

NODES, ROUNDS = 6, 7

client = ClientApp()
server = ServerApp()


def note(context, kind, **values):
    path = Path(str(context.run_config["log"])) / f"{kind}.jsonl"
    with path.open("a") as file:
        file.write(json.dumps(values) + "\n")


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
    time.sleep(float(context.node_config["delay"]))
    record = ArrayRecord({"x": Array(np.full(3, server_round, np.float32))})
    metrics = MetricRecord({"num-examples": 1, "train-loss": 0.0})
    reply = Message(
        RecordDict({"arrays": record, "metrics": metrics}), reply_to=message
    )
    note(context, f"{name}-ends", round=server_round, time=time.time())
    return reply


@client.evaluate()
def evaluate(message, context):
    metrics = MetricRecord({"num-examples": 1, "accuracy": 1.0})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


@server.main()
def main(grid, context):
    base = BaseStrategy(min_available_nodes=NODES, fraction_train=1.0)
    strategy = SRPFL(base, initial_nodes=2, rounds_per_stage=2)
    grid = RealArrivals(grid)
    initial = base.initialize(grid)

    def after_round(server_round, arrays, metrics):
        note(
            context,
            "server",
            round=server_round,
            value=arrays["x"].numpy().tolist(),
            clients=metrics["clients"],
            closed=time.time(),
            dropped=grid.dropped,
            evaluated=sorted(base.evaluation.metrics),
        )

    run_rounds(
        strategy,
        grid,
        initial,
        range(1, ROUNDS + 1),
        evaluated=lambda server_round: server_round in (1, ROUNDS),
        timeout=120,
        after_round=after_round,
    )
    note(context, "end", left=len(list(grid._owed)))
