"""Clients that are functions: client i returns the received arrays plus i + 1."""

from collections.abc import Callable

import numpy as np
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)

from flwr_frl.strategies import FedAvg
from flwr_frl.strategies.base import Strategy
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.replies import to_record

Client = Callable[[Message, Context], Message]
START = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float32)}


def reply_with(message: Message, arrays: dict | ArrayRecord, **metrics) -> Message:
    record = arrays if isinstance(arrays, ArrayRecord) else to_record(arrays)
    values = {name.replace("_", "-"): value for name, value in metrics.items()}
    content = {"arrays": record, "metrics": MetricRecord(values)}
    return Message(RecordDict(content), reply_to=message)


def partition_of(context: Context) -> int:
    return int(context.node_config["partition-id"])


def honest(message: Message, context: Context) -> Message:
    """Return an honest client's reply to a message of any type."""
    i = partition_of(context)
    if message.metadata.message_type == MessageType.QUERY:
        properties = {"client": f"{i:06d}", "structure": "usual", "num-examples": i + 1}
        content = {"properties": ConfigRecord(properties)}
        return Message(RecordDict(content), reply_to=message)
    if message.metadata.message_type == MessageType.EVALUATE:
        metrics = {"num-examples": i + 1, "loss": float(i), "accuracy": i / 10}
        content = {"metrics": MetricRecord(metrics)}
        return Message(RecordDict(content), reply_to=message)
    if message.metadata.message_type != MessageType.TRAIN:
        content = {"arrays": to_record(START)}
        return Message(RecordDict(content), reply_to=message)
    sent = message.content.array_records["arrays"]
    arrays = {name: array.numpy() + np.float32(i + 1) for name, array in sent.items()}
    return reply_with(message, arrays, num_examples=i + 1, train_loss=float(i))


def changing(kind: str, change: Callable[[RecordDict, int], object]) -> Client:
    """Return an honest client whose replies to a kind of messages are changed.

    ``change`` gets the records of a reply and the client's partition.
    """

    def client(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        if message.metadata.message_type == kind:
            change(reply.content, partition_of(context))
        return reply

    return client


def averaging(**settings) -> FedAvg:
    """Return FedAvg, with all clients in each round."""
    return FedAvg(fraction_train=1.0, **settings)


def grid_of(
    n: int, app: Client = honest, partitions: dict[int, int] | None = None
) -> InlineGrid:
    """Return a grid of n nodes; ``partitions`` maps node ids to partitions."""
    grid = InlineGrid(app, n)
    if partitions is not None:
        contexts = {i + 1: context for i, context in enumerate(grid.contexts.values())}
        grid.contexts.data = {node: contexts[i + 1] for node, i in partitions.items()}
    return grid


def train_once(
    strategy: Strategy, grid: InlineGrid, start: dict | None = None, order=list
) -> tuple[ArrayRecord | None, MetricRecord]:
    arrays = to_record(START if start is None else start)
    messages = strategy.configure_train(1, arrays, ConfigRecord(), grid)
    replies = grid.send_and_receive(messages)
    return strategy.aggregate_train(1, order(replies))


def evaluate_once(
    strategy: Strategy, grid: InlineGrid, server_round: int = 1
) -> MetricRecord | None:
    arrays, config = to_record(START), ConfigRecord()
    messages = strategy.configure_evaluate(server_round, arrays, config, grid)
    return strategy.aggregate_evaluate(server_round, grid.send_and_receive(messages))


def replies_of(*values) -> list[dict[str, np.ndarray]]:
    """Return replies with one array each, in the form that aggregation rules take."""
    return [{"w": np.array(v, np.float32)} for v in values]
