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
    config |= {name.replace("_", "-"): value for name, value in node.items()}
    return Context(1, partition + 1, config, RecordDict(), {})


def message_of(kind: str, arrays: ArrayRecord | None = None, **config) -> Message:
    records = {
        "config": ConfigRecord({n.replace("_", "-"): v for n, v in config.items()})
    }
    if arrays is not None:
        records["arrays"] = arrays
    return Message(RecordDict(records), 1, kind)


def app_of(**overrides):
    names = {name.replace("_", "-"): value for name, value in overrides.items()}
    return make_app(resolve({**FAST, **names}))


def initial_arrays(app, context: Context) -> ArrayRecord:
    reply = app(message_of(f"{MessageType.QUERY}.arrays"), context)
    return reply.content.array_records["arrays"]


def values_of(record: ArrayRecord) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in record.items()}


def equal(a: ArrayRecord, b: ArrayRecord) -> bool:
    one, other = values_of(a), values_of(b)
    return one.keys() == other.keys() and all(
        np.array_equal(one[name], other[name]) for name in one
    )
