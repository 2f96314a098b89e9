"""One codec between messages and a client's lists of arrays, with all checks."""

import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import NDArray, NDArrays, Scalar
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor

from flwr_frl.clients.base import Client, Config, EvaluateResult, FitResult
from flwr_frl.clients.device.groups import Received
from flwr_frl.common import messages as keys
from flwr_frl.common.arrays import (
    Matrix,
    MemoryArray,
    ReplyRows,
    RowArrays,
    RowReply,
    entries_of,
    fill,
    is_finite,
    layout_of,
    memory_record,
    reply_with,
    values_of,
)
from flwr_frl.common.errors import SettingsError, reason_of, require
from flwr_frl.common.run_cache import run_object
from flwr_frl.task.models.split_model import LARGE

# Bytes of the largest numbers that torch has.
WIDEST = 8
# File names contain the round with eight digits.
LAST_ROUND = 99_999_999
Round = Annotated[int, Field(ge=0, le=LAST_ROUND)]
Share = Annotated[float, Field(ge=0, le=1)]
Weight = Annotated[float, Field(ge=0, le=sys.float_info.max)]
# Printable characters. A count in the pattern would take 14 MB.
Name = Annotated[str, Field(pattern=r"^[^\p{C}\p{Zl}\p{Zp}]+$", max_length=200)]
# File and directory names contain the name of the run.
Token = Annotated[str, Field(pattern="^[0-9A-Za-z_]{1,64}$")]
# Values that flwr-frl's server sends. Other servers may send more.
TYPES: dict[str, Any] = {
    keys.SERVER_ROUND: Round,
    keys.ACKNOWLEDGED_ROUND: Round,
    keys.CHECKPOINT_ROUND: Round,
    keys.REGISTERED_NAME: Name,
    keys.RUN: Token,
    keys.REFUSAL: str,
    keys.PROXIMAL_WEIGHT: Weight,
    keys.EXCHANGED_ROUND: Round,
    keys.COINS: Round,
    keys.COLUMNS: list[float],
    "consensus-step": Share,
    "neighbour-weight": Share,
    "node": Round,
    "neighbour-nodes": list[Round],
    "dual-variables": Round,
    "relayed-rounds": list[Round],
    "relayed-senders": list[str],
    "relayed-weights": list[Share],
    "relayed-data": list[bytes],
}
STRICT = ConfigDict(strict=True, allow_inf_nan=False)
RULES = {name: TypeAdapter[Any](kind, config=STRICT) for name, kind in TYPES.items()}
# Lists with an entry for each message that is relayed.
RELAYED = "relayed-rounds", "relayed-senders", "relayed-weights", "relayed-data"


class ServerConfig(dict[str, Any]):
    """A message's config; a missing key raises a one-line error."""

    def __missing__(self, name: str) -> Any:
        """Raise `SettingsError`."""
        raise SettingsError(f"the server's config has no {name!r}")


def check_config(record: Any) -> Config:
    """Return a message's config; raise `SettingsError` if a value is invalid."""
    config = ServerConfig(entries_of(record))
    for name in config.keys() & RULES.keys():
        try:
            RULES[name].validate_python(config[name])
        except ValidationError as error:
            # For example, "Input should be a valid integer"
            allowed = f"it to {error.errors()[0]['msg'].partition(' should ')[2]}"
            require(False, f"the server's {name}", config[name], allowed)
    if len({len(config.get(name, ())) for name in RELAYED}) > 1:
        line = f"the server's {', '.join(RELAYED)} are not of the same length"
        raise SettingsError(line)
    exchanged = config.get(keys.EXCHANGED_ROUND, 0)
    now = config.get(keys.SERVER_ROUND, exchanged)
    if exchanged > now:
        allowed = f"at most its {keys.SERVER_ROUND}, {now}"
        require(False, f"the server's {keys.EXCHANGED_ROUND}", exchanged, allowed)
    return config


def unpack(content: Mapping[str, Any], client: Client) -> NDArrays:
    """Return the arrays of a message's records in the order of the shared arrays.

    Raises `SettingsError` if the names differ from those of the shared groups, so a
    server cannot access other arrays, or if `_read` rejects an array.
    """
    records = [r for r in content.values() if isinstance(r, ArrayRecord)]
    received = dict(pair for r in records for pair in entries_of(r).items())
    kind, last, arrays = type(client), run_object(Received), [*received.values()]
    about = kind, client.task, client.shared, [*received], [*map(id, arrays)]
    # All clients of a process receive the same objects, which are checked once.
    if arrays and about == last.about:
        return list(last.values)
    last.about, last.arrays, last.values, last.made = (), [], [], {}
    expected = client._initial_arrays(client.shared)
    if received.keys() != expected.keys():
        # Names of a server may be of any length.
        names = [repr(name[:100]) for name in received.keys() ^ expected.keys()]
        raise SettingsError(
            f"the message's arrays do not fit this client's model: it expects "
            f"{len(expected)} arrays; these are missing or unexpected: "
            f"{', '.join(sorted(names)[:9])}"
        )
    values = [_read(n, received[n], like, client) for n, like in expected.items()]
    in_process = all(isinstance(array, MemoryArray) for array in arrays)
    if in_process and kind._takes is Client._takes:
        last.about, last.arrays, last.values = about, arrays, values
    return list(values)


def _read(name: str, array: Array, like: Tensor, client: Client) -> NDArray:
    """Return an array of a message.

    Raises `SettingsError` if it cannot be read, is not finite, or differs from ``like``
    in its kind of dtype, is less precise, or has another shape that the client does not
    take.
    """
    try:
        values = values_of(array)
    # The bytes are untrusted, so any exception is possible.
    except Exception as error:
        line = f"array {name!r} of the message cannot be read: {reason_of(error)[:100]}"
        raise SettingsError(line) from None
    dtype, shape, usual = values.dtype, values.shape, _dtype_of(like.dtype)
    fits = dtype.kind == usual.kind and dtype.isnative
    fits = fits and usual.itemsize <= dtype.itemsize <= WIDEST
    fits = fits and (shape == like.shape or client._takes(name, shape, like.shape))
    if not fits:
        raise SettingsError(
            f"array {name!r} of the message is of {dtype} and shape {shape}; this "
            f"client's model has {like.dtype} and {tuple(like.shape)}"
        )
    if not is_finite(values):
        line = f"array {name!r} of the message is not finite, or has too large values"
        raise SettingsError(line)
    return values


@lru_cache(maxsize=64)
def _dtype_of(dtype: torch.dtype) -> np.dtype[Any]:
    """Return NumPy's dtype of arrays with the values of a tensor."""
    return torch.empty(0, dtype=dtype).numpy().dtype


def pack(message: Message, client: Client, reply: FitResult) -> Message:
    """Return the reply of `Client.fit` and the client's attachments as a message.

    Each array is in the record in which it was received; other arrays are in
    ``arrays``. The attachment of a compressed upload replaces the arrays whose changes
    it has. The metrics contain the round if the config has it, and the number of
    examples. Raises `SettingsError` if a third-party client returns anything else, or
    has changed what it must not change.
    """
    names = client._array_names(client.sent)
    try:
        values, num_examples, metrics = reply
        # Arrays of third-party code may share memory with the model, which changes.
        arrays = {
            n: v if v.flags.owndata or not v.flags.writeable else np.array(v)
            for n, v in zip(names, values, strict=True)
        }
        metrics = {str(name): float(value) for name, value in metrics.items()}
        count = int(num_examples)
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise SettingsError(
            f"{type(client).__name__}.fit returns {str(reply)[:200]!r}; expected "
            f"{len(names)} NumPy arrays, those of {', '.join(names)}, a number of "
            f"examples, and a dict of metrics, all numbers: {error}"
        ) from None
    client._check_changes()
    if keys.SERVER_ROUND in client.config:
        # The server rejects replies to another round.
        metrics[keys.SERVER_ROUND] = float(client.config[keys.SERVER_ROUND])
    stacked = {name: array[None] for name, array in arrays.items()}
    matrix = matrix_of(stacked, message.content, client)
    if matrix is not None:
        numbers: dict[str, Any] = {**metrics, keys.NUM_EXAMPLES: count}
        columns = {name: [number] for name, number in numbers.items()}
        rows = ReplyRows(matrix, columns, [*client._attachments.values()])
        return RowReply(message.metadata.dst_node_id, RowArrays(rows, 0), message)
    for name in client._upload.names(client) if client._upload else ():
        del arrays[name]
    records = RecordDict()
    for key, record in message.content.items():
        if not isinstance(record, ArrayRecord):
            continue
        packed = {name: arrays.pop(name) for name in record if name in arrays}
        if packed or not record or key == keys.ARRAYS:
            fill(records, {key: memory_record(packed)})
    if arrays:
        rest = records.setdefault(keys.ARRAYS, ArrayRecord())
        cast(ArrayRecord, rest).update(memory_record(arrays))
    return reply_with(pack_metrics(client, count, metrics, records), message)


def matrix_of(
    stacked: Mapping[str, NDArray], content: Mapping[str, Any], client: Client
) -> Matrix | None:
    """Return the arrays of replies as the rows of a matrix, if this is possible.

    A large model, arrays that are not float32 and replies that contain more than
    arrays, metrics and a message are sent as records.

    Parameters
    ----------
    stacked : mapping of str to ndarray, shape (clients, ...)
        The arrays to send, by name.
    content : mapping
        The message's records. A reply has the order of the received arrays.
    client : Client
        One of the clients.
    """
    arrays = stacked.values()
    layout = layout_of((*stacked,), tuple([array.shape[1:] for array in arrays]))
    received = entries_of(content.get(keys.ARRAYS, {}))
    records = [key for key, r in content.items() if isinstance(r, ArrayRecord)]
    in_order = [name for name in received if name in stacked]
    if (
        {array.dtype.char for array in arrays} != {"f"}
        or layout.size > LARGE
        or records not in ([], [keys.ARRAYS])
        or in_order != [name for name in stacked if name in received]
        or client._upload
        or client._state.unused
        or not client._attachments.keys() <= {keys.MESSAGE}
    ):
        return None
    rows = np.concatenate([a.reshape(len(a), -1) for a in arrays], axis=1)
    rows.flags.writeable = False
    return Matrix(rows, layout)


def pack_evaluation(
    message: Message, client: Client, result: EvaluateResult
) -> Message:
    """Return the reply to an evaluation, with the ε that private training has spent."""
    loss, n, metrics = result
    metrics = {"loss": loss, **metrics}
    if client._private:
        metrics[keys.EXAMPLE_EPSILON] = client._private.epsilon()
    return reply_with(pack_metrics(client, n, metrics), message)


def pack_metrics(
    client: Client,
    num_examples: int,
    metrics: dict[str, Scalar],
    records: RecordDict | None = None,
) -> RecordDict:
    """Return records with ``metrics`` and, if there are attachments, ``bytes``.

    If a saved state was not used, ``properties`` contains the reason.
    """
    numbers = {str(name): float(value) for name, value in metrics.items()}
    records = RecordDict() if records is None else records
    record = fill(MetricRecord(), {**numbers, keys.NUM_EXAMPLES: int(num_examples)})
    fill(records, {keys.METRICS: record})
    if client._attachments:
        fill(records, {keys.BYTES: fill(ConfigRecord(), client._attachments)})
    if client._state.unused:
        records[keys.PROPERTIES] = ConfigRecord(
            {keys.UNUSED_STATE: client._state.unused}
        )
    return records
