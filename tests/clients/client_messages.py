"""Messages and contexts for a ClientApp with simulated clients."""

import numpy as np
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    RecordDict,
)
from named_tasks import dashed

from flwr_frl.clients.client_app import make_app
from flwr_frl.common.settings import resolve

FAST = {
    "model": "mlp-2",
    "batch-size": 50,
    "head-layers": 1,
    "head-epochs": 1,
    "representation-epochs": 1,
    "learning-rate": 0.05,
}


def new_context() -> Context:
    return Context(1, 1, {}, RecordDict(), {})


def context_of(partition: int = 0, partitions: int = 20, **node) -> Context:
    config = {"partition-id": partition, "num-partitions": partitions}
    return Context(1, partition + 1, config | dashed(node), RecordDict(), {})


def device(name: str = "kitchen", **node) -> Context:
    """Return the context of a named device, without a partition."""
    return Context(1, 5, {"client-name": name, **dashed(node)}, RecordDict(), {})


def message_of(kind: str, arrays: ArrayRecord | None = None, **config) -> Message:
    records = {"config": ConfigRecord(dashed(config))}
    if arrays is not None:
        records["arrays"] = arrays
    return Message(RecordDict(records), 1, kind)


def app_of(**overrides):
    return make_app(resolve({**FAST, **dashed(overrides)}))


def initial_arrays(app, context: Context) -> ArrayRecord:
    reply = app(message_of(f"{MessageType.QUERY}.arrays"), context)
    return reply.content.array_records["arrays"]


def trained(app, arrays: ArrayRecord | None, context: Context, **config) -> ArrayRecord:
    """Return the arrays that a client sends after training."""
    reply = app(message_of(MessageType.TRAIN, arrays, **config), context)
    return reply.content.array_records["arrays"]


def metrics_of(reply: Message) -> dict:
    return dict(reply.content.metric_records["metrics"])


def properties_of(app, context: Context, **config) -> dict:
    """Return a client's answer to a query."""
    reply = app(message_of(MessageType.QUERY, **config), context)
    return dict(reply.content.config_records["properties"])


def values_of(record: ArrayRecord) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in record.items()}


def equal(a: ArrayRecord, b: ArrayRecord) -> bool:
    one, other = values_of(a), values_of(b)
    return one.keys() == other.keys() and all(
        np.array_equal(one[name], other[name]) for name in one
    )
