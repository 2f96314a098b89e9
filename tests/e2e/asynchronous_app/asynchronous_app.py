"""A tiny app: three clients, one slow, add 1; first in rounds, then in versions."""

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from flwr_frl.strategies import BaseStrategy, FedBuff
from flwr_frl.strategies.grids.arrivals import with_retries
from flwr_frl.strategies.server.rounds import run_rounds

NODES, ROUNDS, VERSIONS = 3, 2, 8

client = ClientApp()
server = ServerApp()


@client.query()
def query(message, context):
    properties = {"client": str(context.node_config["client-name"]), "structure": "x"}
    record = ConfigRecord({**properties, "num-examples": 1, "num-test-examples": 1})
    return Message(RecordDict({"properties": record}), reply_to=message)


@client.train()
def train(message, context):
    time.sleep(float(context.node_config["delay"]))
    x = message.content["arrays"]["x"].numpy()
    record = ArrayRecord({"x": Array(x + np.float32(1))})
    metrics = MetricRecord({"num-examples": 1, "train-loss": 0.0})
    content = RecordDict({"arrays": record, "metrics": metrics})
    return Message(content, reply_to=message)


@server.main()
def main(grid, context):
    path = Path(str(context.run_config["log"])) / "server.jsonl"

    def run(strategy, rounds, kind):
        real = with_retries(grid, strategy.name_of)
        adapted = strategy.participation.adapt_grid(real, strategy.name_of)
        began = time.time()

        def after_round(server_round, arrays, metrics):
            values = {"kind": kind, "seconds": time.time() - began, **metrics}
            values["x"] = arrays["x"].numpy().tolist()
            values["updates"] = strategy.participation.updates
            with path.open("a") as file:
                file.write(json.dumps(values) + "\n")

        start = ArrayRecord({"x": Array(np.zeros(2, np.float32))})
        run_rounds(
            strategy,
            adapted,
            start,
            range(1, rounds + 1),
            evaluated=lambda server_round: False,
            timeout=120,
            after_round=after_round,
        )

    run(BaseStrategy(min_available_nodes=NODES, fraction_train=1.0), ROUNDS, "round")
    base = BaseStrategy(min_available_nodes=NODES)
    wrapper = FedBuff(base, concurrency=3, buffer_size=1, staleness_exponent=1.0)
    run(wrapper.strategy, VERSIONS, "version")
