"""Conversion between a message's records and a client's lists of arrays."""

from typing import cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import NDArray, NDArrays, Scalar

from flwr_frl.clients.base import Client, Config, Reply
from flwr_frl.clients.device.arrays import to_record
from flwr_frl.clients.device.parameter_groups import (
    check_untrained,
    initial_arrays,
    sent_names,
)
from flwr_frl.clients.device.received import read_array
from flwr_frl.task.messages import (
    ARRAYS,
    BYTES,
    IS_CHANGE,
    METRICS,
    NUM_EXAMPLES,
    PROPERTIES,
    SERVER_ROUND,
    UNUSED_STATE,
)
from flwr_frl.task.settings import SettingsError


def unpack(message: Message, client: Client) -> NDArrays:
    """Return a message's arrays in the order of the client's shared arrays.

    Raises `SettingsError` if the names differ from those of the shared groups, so that
    a server can neither send nor query others, or if `read_array` rejects an array.
    """
    received = {
        name: array
        for record in message.content.values()
        if isinstance(record, ArrayRecord)
        for name, array in record.items()
    }
    expected = initial_arrays(client, client.shared)
    if sorted(received) != sorted(expected):
        sides = {
            "are in no group that it shares": received.keys() - expected.keys(),
            "are missing": expected.keys() - received.keys(),
        }
        wrong = [
            f"{', '.join(map(_quoted, sorted(names)))} {what}"
            for what, names in sides.items()
            if names
        ]
        raise SettingsError(
            f"the message's arrays do not fit this client's model: {'; '.join(wrong)}"
        )
    fixed = client.traits.fixed_shapes
    return [read_array(n, received[n], like, fixed) for n, like in expected.items()]


def _quoted(name: str) -> str:
    """Return a name, escaped and truncated if it is long or not printable."""
    return name if name.isprintable() and len(name) < 100 else repr(name[:100])


def pack(message: Message, client: Client, reply: Reply, config: Config) -> RecordDict:
    """Return the reply of `Client.fit` and the client's attachments as records.

    Each array is in the record in which it was received, and float16 if it was received
    as such (``transport``); other arrays are in ``arrays``. The metrics contain the
    round.
    """
    values, num_examples, metrics = reply
    arrays = dict(zip(sent_names(client), values, strict=True))
    records = RecordDict()
    for key, record in message.content.items():
        if not isinstance(record, ArrayRecord):
            continue
        packed = {
            n: _as_received(arrays.pop(n), like.dtype)
            for n, like in record.items()
            if n in arrays
        }
        if packed or not record or key == ARRAYS:
            records[key] = to_record(packed)
    if arrays:
        rest = records.setdefault(ARRAYS, ArrayRecord())
        cast(ArrayRecord, rest).update(to_record(arrays))
    if SERVER_ROUND in config:
        # The server rejects replies to another round.
        metrics = {**metrics, SERVER_ROUND: config[SERVER_ROUND]}
    if client.traits.sends_changes:
        metrics = {**metrics, IS_CHANGE: 1}
    return pack_metrics(client, num_examples, metrics, records)


def checked(client: Client, reply: object) -> Reply:
    """Check the reply of a client, which may be third-party code."""

    def need(condition: bool, returned: str, allowed: str) -> None:
        if not condition:
            name = f"{type(client).__name__}.fit"
            raise SettingsError(f"{name} returns {returned}; expected {allowed}")

    allowed = "arrays, a number of examples and a dict of metrics, as of self.send"
    is_reply = isinstance(reply, tuple) and len(reply) == 3
    need(is_reply, f"a {type(reply).__name__}", allowed)
    values, num_examples, metrics = cast(Reply, reply)
    names = sent_names(client)
    text = f"{len(names)}, those of {', '.join(names)}"
    need(len(values) == len(names), f"{len(values)} arrays", text)
    for name, value in zip(names, values, strict=True):
        returned = f"a {type(value).__name__} for {name!r}"
        need(isinstance(value, np.ndarray), returned, "a NumPy array")
    for name, metric in metrics.items():
        number = isinstance(metric, bool | int | float | np.number)
        need(number, f"the metric {name!r} as {metric!r}", "a number")
    # Without `receive`, the model is another client's of this process.
    if client.received or not client.shared:
        check_untrained(client, client.model)
    return values, num_examples, metrics


def _as_received(array: NDArray, dtype: str) -> NDArray:
    if dtype == "float16" and array.dtype == np.float32:
        # Overflow gives infinity, which the server rejects.
        with np.errstate(over="ignore"):
            return array.astype(np.float16)
    return array


def pack_metrics(
    client: Client,
    num_examples: int,
    metrics: dict[str, Scalar],
    records: RecordDict | None = None,
) -> RecordDict:
    """Return records with ``metrics`` and, if there are attachments, ``bytes``.

    ``properties`` explains why a saved state was not used.
    """
    numbers = {name: float(cast(float, value)) for name, value in metrics.items()}
    records = RecordDict() if records is None else records
    records[METRICS] = MetricRecord({NUM_EXAMPLES: num_examples, **numbers})
    if client.attachments:
        records[BYTES] = ConfigRecord(dict(client.attachments))
    if client.state.unused:
        records[PROPERTIES] = ConfigRecord({UNUSED_STATE: client.state.unused})
    return records
