"""Conversion between messages and a client's lists of arrays, with all checks."""

import re
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import NDArray, NDArrays, Scalar
from torch import Tensor

from flwr_frl.clients.base import Client, Config, Reply
from flwr_frl.clients.device.parameter_groups import (
    array_names,
    check_received,
    check_untrained,
    initial_arrays,
)
from flwr_frl.common.flower_messages import fill
from flwr_frl.common.memory_array import MemoryArray, memory_record, values_of
from flwr_frl.common.messages import (
    ACKNOWLEDGED_ROUND,
    ARRAYS,
    BYTES,
    CHECKPOINT_ROUND,
    COINS,
    EXCHANGED_ROUND,
    METRICS,
    NUM_EXAMPLES,
    PROPERTIES,
    PROXIMAL_WEIGHT,
    REFUSAL,
    REGISTERED_NAME,
    RUN,
    SERVER_ROUND,
    UNUSED_STATE,
)
from flwr_frl.common.npy import dtype_name, is_finite
from flwr_frl.common.settings import SettingsError, require

# File names contain the round with eight digits.
LAST_ROUND = 99_999_999
# File and directory names contain the name of the run.
TOKEN = re.compile(r"[0-9A-Za-z_]{1,64}")


def _is_number(value: Any, largest: float) -> bool:
    """Return whether a value is a number from 0 to ``largest``, and not NaN."""
    return type(value) in (int, float) and 0 <= value <= largest


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and 0 < len(value) <= 200


def _is_round(value: Any) -> bool:
    return type(value) is int and _is_number(value, LAST_ROUND)


def _is_share(value: Any) -> bool:
    return _is_number(value, 1)


def _is_a(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


def _list_of(is_entry: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_entry, value))


Rule = tuple[Callable[[Any], bool], str]
ROUND: Rule = _is_round, f"an integer from 0 to {LAST_ROUND:,}"
SHARE: Rule = _is_share, "a number in [0, 1]"
TEXTS: Rule = _list_of(_is_a(str)), "a list of texts"
ROUNDS: Rule = _list_of(_is_round), "a list of integers, at least 0"
# Values that flwr-frl's server sends. Other servers may send more.
RULES: dict[str, Rule] = {
    SERVER_ROUND: ROUND,
    ACKNOWLEDGED_ROUND: ROUND,
    CHECKPOINT_ROUND: ROUND,
    REGISTERED_NAME: (_is_name, "1 to 200 printable characters"),
    RUN: (
        lambda value: isinstance(value, str) and bool(TOKEN.fullmatch(value)),
        "1 to 64 letters, digits and _",
    ),
    REFUSAL: (_is_a(str), "a text"),
    PROXIMAL_WEIGHT: (
        lambda value: _is_number(value, sys.float_info.max),
        "a finite number, at least 0",
    ),
    EXCHANGED_ROUND: ROUND,
    COINS: ROUND,
    "consensus-step": SHARE,
    "neighbour-weight": SHARE,
    "node": ROUND,
    "neighbours": TEXTS,
    "neighbour-nodes": ROUNDS,
    "relayed-rounds": ROUNDS,
    "relayed-senders": TEXTS,
    "relayed-weights": (_list_of(_is_share), "a list of numbers in [0, 1]"),
    "relayed-data": (_list_of(_is_a(bytes)), "a list of bytes"),
}
ANYTHING: Rule = (lambda value: True), "anything"
SAME_LENGTH = (
    ("neighbours", "neighbour-nodes"),
    ("relayed-rounds", "relayed-senders", "relayed-weights", "relayed-data"),
)


class ServerConfig(dict[str, Any]):
    """A message's config; a missing key raises a one-line error."""

    def __missing__(self, name: str) -> Any:
        """Raise `SettingsError`."""
        raise SettingsError(f"the server's config has no {name!r}")


def check_config(record: ConfigRecord) -> Config:
    """Return a message's config; raise `SettingsError` if a value is invalid."""
    config = dict(record)
    for name, value in config.items():
        permits, allowed = RULES.get(name, ANYTHING)
        if not permits(value):
            require(False, f"the server's {name}", value, allowed)
    for names in SAME_LENGTH:
        if config.keys().isdisjoint(names):
            continue
        lengths = [len(cast(list[Any], config[n])) for n in names if n in config]
        if lengths and (len(set(lengths)) > 1 or len(lengths) < len(names)):
            raise SettingsError(
                f"the server's {', '.join(names)} are not of the same length"
            )
    exchanged = cast(int, config.get(EXCHANGED_ROUND, 0))
    now = cast(int, config.get(SERVER_ROUND, exchanged))
    if exchanged > now:
        allowed = f"at most its {SERVER_ROUND}, {now}"
        require(False, f"the server's {EXCHANGED_ROUND}", exchanged, allowed)
    return ServerConfig(config)


def read_array(
    name: str, array: Array, like: Tensor, client: Client
) -> npt.NDArray[Any]:
    """Return an array of a message.

    Raises `SettingsError` if it cannot be read, is not finite, or differs from ``like``
    in its kind of dtype, or in its shape unless the client takes it.
    """
    try:
        values = values_of(array)
    # The bytes are untrusted, so any exception is possible.
    except Exception as error:
        reason = " ".join(str(error).split())[:100]
        raise SettingsError(
            f"array {name!r} of the message cannot be read: {reason}"
        ) from None
    wanted = _name_of(like.dtype)
    if dtype_name(values.dtype) == wanted and values.dtype.isnative:
        pass
    elif values.dtype.kind != np.dtype(wanted).kind or not values.dtype.isnative:
        raise SettingsError(
            f"array {name!r} of the message is of {values.dtype}, not {wanted}"
        )
    shape = tuple(like.shape)
    if values.shape != shape and not client._takes(values.shape, shape):
        raise SettingsError(
            f"array {name!r} of the message is of shape {values.shape}; this client's "
            f"model has {shape}"
        )
    # All clients of one process receive the same object, which is checked once.
    finite = isinstance(array, MemoryArray) and array.all_finite
    if not finite and not is_finite(values):
        raise SettingsError(f"array {name!r} of the message is not finite")
    return values


@lru_cache(maxsize=64)
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def unpack(message: Message, client: Client) -> NDArrays:
    """Return a message's arrays in the order of the client's shared arrays.

    Raises `SettingsError` if the names differ from those of the shared groups, so a
    server cannot access other arrays, or if `read_array` rejects an array.
    """
    received = {
        name: array
        for record in message.content.values()
        if isinstance(record, ArrayRecord)
        for name, array in record.items()
    }
    expected = initial_arrays(client, client.shared)
    if received.keys() != expected.keys():
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
    return [read_array(n, received[n], like, client) for n, like in expected.items()]


def _quoted(name: str) -> str:
    """Return a name, escaped and truncated if it is long or not printable."""
    return name if name.isprintable() and len(name) < 100 else repr(name[:100])


def pack(message: Message, client: Client, reply: Reply, config: Config) -> RecordDict:
    """Return the reply of `Client.fit` and the client's attachments as records.

    Each array is in the record in which it was received, and float16 if it was received
    as such (``transport``); other arrays are in ``arrays``. The metrics contain the
    round if the config has it.
    """
    values, num_examples, metrics = reply
    copied = {id(value) for value in client._copied}
    # Arrays of third-party code may share memory with the model, which changes.
    owned = [v if id(v) in copied else np.array(v, order="C") for v in values]
    arrays = dict(zip(array_names(client, client.sent), owned, strict=True))
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
            fill(records, {key: memory_record(packed)})
    if arrays:
        rest = records.setdefault(ARRAYS, ArrayRecord())
        cast(ArrayRecord, rest).update(memory_record(arrays))
    if SERVER_ROUND in config:
        # The server rejects replies to another round.
        metrics = {**metrics, SERVER_ROUND: config[SERVER_ROUND]}
    return pack_metrics(client, num_examples, metrics, records)


def checked(client: Client, reply: object) -> Reply:
    """Return the reply of `Client.fit` after checks, as it may be third-party code."""

    def need(condition: bool, returned: str, allowed: str) -> None:
        if not condition:
            name = f"{type(client).__name__}.fit"
            raise SettingsError(f"{name} returns {returned}; expected {allowed}")

    allowed = "arrays, a number of examples and a dict of metrics, as of self.send"
    is_reply = isinstance(reply, tuple) and len(reply) == 3
    need(is_reply, f"a {type(reply).__name__}", allowed)
    values, num_examples, metrics = cast(Reply, reply)
    names = array_names(client, client.sent)
    if len(values) != len(names):
        text = f"{len(names)}, those of {', '.join(names)}"
        need(False, f"{len(values)} arrays", text)
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, np.ndarray):
            need(False, f"a {type(value).__name__} for {name!r}", "a NumPy array")
    for name, metric in metrics.items():
        if not isinstance(metric, bool | int | float | np.number):
            need(False, f"the metric {name!r} as {metric!r}", "a number")
    check_received(client)
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

    If a saved state was not used, ``properties`` contains the reason.
    """
    numbers: dict[str, Any] = {n: float(cast(float, v)) for n, v in metrics.items()}
    records = RecordDict() if records is None else records
    numbers = {NUM_EXAMPLES: num_examples, **numbers}
    # Third-party code may return other types, which Flower refuses.
    usual = type(num_examples) is int and all(type(name) is str for name in numbers)
    record = fill(MetricRecord(), numbers) if usual else MetricRecord(numbers)
    fill(records, {METRICS: record})
    if client.attachments:
        records[BYTES] = ConfigRecord(dict(client.attachments))
    if client.state.unused:
        records[PROPERTIES] = ConfigRecord({UNUSED_STATE: client.state.unused})
    return records
