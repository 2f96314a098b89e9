"""Between a message's records and a client's lists of arrays."""

from typing import cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import NDArray, NDArrays, Scalar

from flwr_frl.clients.base import Client, Config, Reply
from flwr_frl.clients.device.arrays import to_record
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
    """Return a message's arrays in the order of ``names(shared)``.

    What is not shared can be neither received nor asked for: `SettingsError` if the
    names are not those of the shared slots, or an array is none that `read_array` lets
    pass.
    """
    received = {
        name: array
        for record in message.content.values()
        if isinstance(record, ArrayRecord)
        for name, array in record.items()
    }
    expected = client.initial_arrays(client.shared)
    if sorted(received) != sorted(expected):
        sides = {
            "are in no slot that it shares": received.keys() - expected.keys(),
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
    fixed = client.fixed_shapes
    return [read_array(n, received[n], like, fixed) for n, like in expected.items()]


def _quoted(name: str) -> str:
    """Return a name as it is; escaped and cut where nobody would call anything so."""
    return name if name.isprintable() and len(name) < 100 else repr(name[:100])


def pack(message: Message, client: Client, reply: Reply, config: Config) -> RecordDict:
    """Return what `fit` returned, and the client's attachments, as records.

    Arrays go back in the records of the message in which they came, and as float16
    where they came so (``transport``); others into ``arrays``. The metrics say of which
    round the reply is.
    """
    values, num_examples, metrics = reply
    arrays = dict(zip(client.sent_names, values, strict=True))
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
        # Content of another round must not pass for this one's.
        metrics = {**metrics, SERVER_ROUND: config[SERVER_ROUND]}
    if client.sends_changes:
        metrics = {**metrics, IS_CHANGE: 1}
    return pack_metrics(client, num_examples, metrics, records)


def checked(client: Client, reply: object) -> Reply:
    """Return what `fit` returned, if it is a reply: some clients are somebody's own."""

    def need(condition: bool, found: str, allowed: str) -> None:
        if not condition:
            name = f"{type(client).__name__}.fit"
            raise SettingsError(f"{name} returns {found}; it must be {allowed}")

    allowed = "arrays, a number of examples and a dict of metrics, as of self.send"
    whole = isinstance(reply, tuple) and len(reply) == 3
    need(whole, f"a {type(reply).__name__}", allowed)
    values, num_examples, metrics = cast(Reply, reply)
    names = client.sent_names
    text = f"{len(names)}, those of {', '.join(names)}"
    need(len(values) == len(names), f"{len(values)} arrays", text)
    for name, value in zip(names, values, strict=True):
        found = f"a {type(value).__name__} for {name!r}"
        need(isinstance(value, np.ndarray), found, "a NumPy array")
    for name, metric in metrics.items():
        number = isinstance(metric, bool | int | float | np.number)
        need(number, f"the metric {name!r} as {metric!r}", "a number")
    # Without a `receive` the model is what another client of this process has left.
    if client.received or not client.shared:
        client.check_kept(client.model)
    return values, num_examples, metrics


def _as_received(array: NDArray, dtype: str) -> NDArray:
    if dtype == "float16" and array.dtype == np.float32:
        # What is too large becomes infinite, and the server says so.
        with np.errstate(over="ignore"):
            return array.astype(np.float16)
    return array


def pack_metrics(
    client: Client,
    num_examples: int,
    metrics: dict[str, Scalar],
    records: RecordDict | None = None,
) -> RecordDict:
    """Return records with ``metrics``, and ``bytes`` where there are attachments.

    A client that could not use what it had kept says why, in ``properties``.
    """
    numbers = {name: float(cast(float, value)) for name, value in metrics.items()}
    records = RecordDict() if records is None else records
    records[METRICS] = MetricRecord({NUM_EXAMPLES: num_examples, **numbers})
    if client.attachments:
        records[BYTES] = ConfigRecord(dict(client.attachments))
    if client.state.unused:
        records[PROPERTIES] = ConfigRecord({UNUSED_STATE: client.state.unused})
    return records
