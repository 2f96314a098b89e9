"""Clients that send invalid replies, and the reasons that the server logs."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from claimed_arrays import BAD_ARRAYS, claimed, npy, npy_with_header
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from function_clients import Client, honest, partition_of, reply_with

from flwr_frl.strategies.server.replies import to_record


def honest_arrays(message: Message, context: Context) -> dict[str, np.ndarray]:
    record = honest(message, context).content.array_records["arrays"]
    return {name: array.numpy() for name, array in record.items()}


class Trap:
    """Creates a file when it is unpickled."""

    path = Path()

    def __reduce__(self):
        return (Path.touch, (self.path,))


TRAPS = np.array([[Trap()] * 3] * 2, dtype=object)


def changed(change: Callable[[dict], dict | ArrayRecord]) -> Client:
    """Return a client that changes the arrays of its honest replies."""

    def client(message: Message, context: Context) -> Message:
        arrays = change(honest_arrays(message, context))
        return reply_with(message, arrays, num_examples=5, train_loss=1.0)

    return client


def with_metrics(**metrics) -> Client:
    def client(message: Message, context: Context) -> Message:
        return reply_with(message, honest_arrays(message, context), **metrics)

    return client


def with_records(change: Callable[[RecordDict], object]) -> Client:
    def client(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        change(reply.content)
        return reply

    return client


def replaced(array: Callable[[], Array]) -> Client:
    """Return a client that replaces ``w`` in its honest replies."""

    def change(arrays: dict) -> ArrayRecord:
        record = to_record(arrays)
        record["w"] = array()
        return record

    return changed(change)


def error_reply(message: Message, _: Context) -> Message:
    return Message(Error(2, "it\nbroke"), reply_to=message)


def crash(*_: object) -> Message:
    raise ZeroDivisionError("no examples")


def set_entry(value: float) -> Callable[[dict], dict]:
    return lambda arrays: arrays | {"w": np.where(np.eye(2, 3) > 0, value, arrays["w"])}


def as_single(change: Callable[[dict], dict]) -> Callable[[dict], dict]:
    return lambda arrays: {n: v.astype(np.float32) for n, v in change(arrays).items()}


# Further invalid arrays: `BAD_ARRAYS` in ``claimed_arrays.py``.
MALFORMED: dict[str, Client] = {
    "missing name": changed(lambda a: {"w": a["w"]}),
    "extra name": changed(lambda a: a | {"c": a["b"]}),
    "renamed": changed(lambda a: {"w": a["w"], "B": a["b"]}),
    "a head": changed(lambda a: a | {"head.weight": a["w"]}),
    "wrong shape": changed(lambda a: a | {"w": a["w"].T}),
    "wrong dtype": changed(lambda a: a | {"w": a["w"].astype(np.float64)}),
    "nan": changed(as_single(set_entry(np.nan))),
    "empty record": changed(lambda a: {}),
    "no record": with_records(lambda c: c.pop("arrays")),
    "empty content": with_records(lambda c: c.clear()),
    "another key": with_records(lambda c: c.update({"other": c.pop("arrays")})),
    "arrays besides": with_records(lambda c: c.update({"other": c["arrays"]})),
    "values besides": with_records(
        lambda c: c.update({"extra": ConfigRecord({"x": b"1"})})
    ),
    "large attachments": with_records(
        lambda c: c.update({"bytes": ConfigRecord({"x": bytes(2**25)})})
    ),
    "huge": replaced(lambda: BAD_ARRAYS["huge"]),
    "unreadable header": replaced(lambda: claimed(npy_with_header("{'descr': ("))),
    "pickled objects": replaced(lambda: claimed(npy(TRAPS, allow_pickle=True))),
    "two metrics": with_records(lambda c: c.update({"more": MetricRecord({"x": 1})})),
    "nan loss": with_metrics(num_examples=1, train_loss=float("nan")),
    "nan examples": with_metrics(num_examples=float("nan"), train_loss=1.0),
    "negative examples": with_metrics(num_examples=-3, train_loss=1.0),
    "of another round": with_metrics(num_examples=3, train_loss=1.0, server_round=7),
    "error": error_reply,
    "crash": crash,
}

# Valid replies of third-party clients that lack metrics, and the round's mean loss
RETICENT: dict[str, tuple[Client, float]] = {
    "no metrics": (with_records(lambda c: c.pop("metrics")), 18 / 8),
    "empty metrics": (with_metrics(), 18 / 8),
    "no examples": (with_metrics(train_loss=1.0), (18 + 1) / (8 + 1)),
    "no loss": (with_metrics(num_examples=2), 18 / 8),
    "a list of losses": (with_metrics(num_examples=2, train_loss=[1.0, 2.0]), 18 / 8),
    "a loss by another name": (with_metrics(num_examples=2, loss=1.0), 20 / 10),
}


def with_one_bad(bad: Client) -> Client:
    def client(message: Message, context: Context) -> Message:
        training = message.metadata.message_type == MessageType.TRAIN
        liar = training and partition_of(context) == 1
        return (bad if liar else honest)(message, context)

    return client
