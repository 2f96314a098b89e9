"""Flower's arrays, records and messages, made without checks and only when needed.

Flower's own Array always holds the bytes of an .npy file. A simulation in one process
would write and parse these bytes for each client, although no other process reads them.
`MemoryArray` holds values instead, and a `Request` and a `RowReply` what all messages
and replies of a round share.

Private parts of Flower are used here only. `docs/flower-versions.md` lists these
functions, each with its fallback if a release lacks the part.
"""

import inspect
import io
import math
import sys
import time
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    Metadata,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid

from flwr_frl.common.errors import SettingsError
from flwr_frl.common.messages import ARRAYS, BATCH_NORM, BYTES, CONFIG, MESSAGE, METRICS

NDArray = npt.NDArray[Any]
Record = TypeVar("Record", bound=MutableMapping[str, Any])
# How Flower names arrays whose bytes are an .npy file.
NPY = Array(np.empty(0)).stype
# Flower's code of the error of a ClientApp that has failed.
APP_FAILED = 2
# The node id of the SuperLink, which is part of Flower's protocol.
SUPERLINK = 1
FIELDS = inspect.signature(Metadata).parameters
# Prefixes of pFedFDA's class means and covariance, and of MimeLite's momentum, which
# must stay averages.
STATISTICS = ("gaussian.", "momentum.")
# Limit of absolute values, the largest of float32, so that sums stay finite.
LARGEST = 3.4028235e38


class MemoryArray(Array):
    """An Array that is serialised when its ``data`` is read.

    Its dtype, shape, bytes and digest equal those of ``Array(values)``. It cannot be
    changed.

    Parameters
    ----------
    values : ndarray
        The values, which must not be changed afterwards: they are not copied if they
        are in C order.
    """

    values: NDArray

    def __init__(self, values: NDArray) -> None:
        shape = values.shape
        values = np.asarray(values, order="C").view()
        values.flags.writeable = False
        self.__dict__.update(
            dtype=dtype_name(values.dtype), shape=shape, stype=NPY, values=values
        )

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """The bytes of an .npy file, written when they are first read.

        From then on the values are a view of the bytes.
        """
        if "_encoded" not in self.__dict__:
            written: bytes = Array.from_numpy_ndarray(self.values).data
            start = len(written) - self.values.nbytes
            values = np.frombuffer(written, self.values.dtype, offset=start)
            self.__dict__.update(_encoded=written, values=values.reshape(self.shape))
        encoded: bytes = self.__dict__["_encoded"]
        return encoded

    def numpy(self) -> NDArray:
        """Return a copy of the values."""
        return self.values.copy()

    def deflate(self) -> bytes:
        """Return the bytes that Flower transfers, equal to those of an Array."""
        array = Array(self.dtype, self.shape, self.stype, self.data)
        # Chunks are reused, because computing their digests takes time.
        array.__dict__["_chunks"] = self.slice_array()
        return array.deflate()


def values_of(array: Array) -> NDArray:
    """Return the values of an Array, read-only and without a copy.

    Nothing is unpickled, and a size that the Array declares never determines how much
    memory is allocated. Raises `ValueError`, or another exception of NumPy, if the
    bytes are not those of the declared shape and dtype.
    """
    if isinstance(array, MemoryArray):
        return array.values
    if array.stype != NPY:
        raise ValueError(f"it is serialised as {array.stype!r}, not {NPY!r}")
    data, shape, dtype = array.data, tuple(array.shape), np.dtype(array.dtype)
    usual = header(shape, dtype)
    start, fortran = len(usual), False
    if not data.startswith(usual):
        stream = io.BytesIO(data)
        if (version := np.lib.format.read_magic(stream)) != (1, 0):
            raise ValueError(f"its .npy header has version {version}, not (1, 0)")
        held, fortran, of = np.lib.format.read_array_header_1_0(stream)
        if (held, of) != (shape, dtype):
            declared = f"{dtype}{list(shape)}"
            raise ValueError(f"it holds {of}{list(held)}, not {declared} as declared")
        start = stream.tell()
    values = np.frombuffer(data, dtype, offset=start)
    values = values.reshape(shape, order="F" if fortran else "C")
    # A declared -1, or a dtype with a shape, gives other ones.
    if (values.shape, values.dtype) != (shape, dtype):
        raise ValueError(f"it holds {values.dtype}{list(values.shape)}")
    return values


def size_of(value: Any) -> int:
    """Return the size of a record or a value in bytes.

    Names count, and arrays count as .npy files. Flower's envelope does not count. Its
    own function for sizes fails on empty strings and lists.
    """
    if isinstance(value, (int, float)):
        return 1 if isinstance(value, bool) else 8
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, list):
        return sum(map(size_of, value))
    if isinstance(value, MemoryArray):
        return len(header(value.values.shape, value.values.dtype)) + value.values.nbytes
    if isinstance(value, Array):
        return len(value.data)
    entries = entries_of(value).items()
    return sum(len(name) + size_of(entry) for name, entry in entries)


def memory_record(arrays: Mapping[str, NDArray]) -> ArrayRecord:
    """Return an ArrayRecord of `MemoryArray`.

    Arrays in C order are not copied, so they must not be changed afterwards.
    """
    return fill(ArrayRecord(), {n: MemoryArray(v) for n, v in arrays.items()})


def fill(record: Record, entries: Mapping[str, Any]) -> Record:
    """Add entries to one of Flower's records, and return it.

    The entries must be of allowed types. Flower checks each of them, which takes
    longer than all other work on the small messages of a simulation.
    """
    entries_of(record).update(entries)
    return record


def entries_of(record: Any) -> dict[str, Any]:
    """Return the dictionary inside one of Flower's records. Do not modify it."""
    entries: dict[str, Any] = getattr(record, "_data", record)
    return entries


def message_of(content: RecordDict, metadata: Metadata) -> Message:
    """Return a message with these parts."""
    make: Callable[..., Message] = Message
    return make(content, metadata=metadata)


def message_like(message: Message, content: RecordDict, **fields: Any) -> Message:
    """Return a message with other content, and with some fields of metadata replaced.

    Parameters
    ----------
    message : Message
        A valid message, which is not changed.
    content : RecordDict
        The content.
    **fields
        Fields of `Metadata`, of valid types.
    """
    message = getattr(message, "plain", message)
    about = vars(message.metadata)
    if "_metadata" not in vars(message) or "_message_id" not in about:
        public = {name: getattr(message.metadata, name) for name in FIELDS}
        public |= {name: fields[name] for name in FIELDS if name in fields}
        return message_of(content, Metadata(**public))
    metadata = Metadata.__new__(Metadata)
    metadata.__dict__.update(about)
    metadata.__dict__.update({f"_{name}": value for name, value in fields.items()})
    copied = Message.__new__(Message)
    copied.__dict__.update(_metadata=metadata, _content=content, _error=None)
    return copied


def enter_run() -> None:
    """Let this process build messages, which Flower allows only within a run.

    Raises `SettingsError` if this release of Flower still builds none.
    """
    identity: Any = getattr(sys.modules[Message.__module__], "TaskIdentity", None)
    if identity is not None:
        identity.run_id, identity.task_id, identity.node_id = 1, 1, 0
    try:
        Message(RecordDict(), 1, "train")
    except Exception as error:
        text = "this release of Flower builds messages only for flwr run: "
        raise SettingsError(f"{text}{error}; install flwr 1.42", "flower") from None


def response_hooks(grid: Grid) -> list[Callable[..., None]]:
    """Return the functions that a grid's connection calls before it reads a body.

    They are an unused list if a grid has no connection of httpx.
    """
    connection: Any = getattr(grid, "_runtime_client", None)
    try:
        hooks: list[Callable[..., None]] = connection._client.event_hooks["response"]
    except (AttributeError, KeyError):
        return []
    return hooks


def reply_with(content: RecordDict, message: Message) -> Message:
    """Return a reply to a message, equal to ``Message(content, reply_to=message)``."""
    asked, now = message.metadata, time.time()
    return message_like(
        message,
        content,
        message_id="",
        reply_to_message_id=asked.message_id,
        src_node_id=asked.dst_node_id,
        dst_node_id=asked.src_node_id,
        src_task_id=asked.dst_task_id,
        dst_task_id=asked.src_task_id,
        delivered_at="",
        created_at=now,
        ttl=asked.created_at + asked.ttl - now,
    )


def error_reply(reason: str, message: Message) -> Message:
    """Return an error reply to a message."""
    return Message(Error(APP_FAILED, reason), reply_to=message)


class UnreadMessage(Message):
    """A message that is made when its content or its metadata are first read.

    Attributes
    ----------
    node : int
        The node to which, or from which, it is sent.
    is_unread : bool
        True until it is made.
    """

    node: int
    is_unread = True

    @cached_property
    def plain(self) -> Message:
        """The message, which may be changed from now on."""
        raise NotImplementedError

    @property
    def metadata(self) -> Metadata:
        """The metadata."""
        return self.plain.metadata

    @property
    def content(self) -> RecordDict:
        """The records."""
        return self.plain.content

    @content.setter
    def content(self, value: RecordDict) -> None:
        self.plain.content = value

    def has_content(self) -> bool:
        """Return True."""
        return True

    def has_error(self) -> bool:
        """Return False."""
        return False

    def __reduce__(self) -> tuple[Any, ...]:
        """Serialise as a plain message."""
        return message_of, (self.content, self.metadata)


@dataclass(eq=False, repr=False)
class Request(UnreadMessage):
    """A message of a round to a node.

    Parameters
    ----------
    template : Message
        A message whose metadata it has, except for the node and the id.
    node : int
        The node.
    records : dict of str to record
        The arrays, by key of the record.
    of_node : dict of str to object
        Entries of its config that may differ between the nodes.
    of_round : mapping of str to object
        Entries of its config that all messages share. An entry of the node replaces one
        of the round.
    message_id : str, default ""
        The id, which a grid gives it.
    """

    template: Message
    node: int
    records: dict[str, Any]
    of_node: dict[str, Any]
    of_round: Mapping[str, Any] = field(default_factory=dict)
    message_id: str = ""

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config."""
        return {**self.of_round, **self.of_node}

    @cached_property
    def plain(self) -> Message:
        """The message, which may be changed from now on."""
        self.is_unread = False
        records = dict(self.records)
        if self.config:
            records[CONFIG] = fill(ConfigRecord(), self.config)
        about = {"dst_node_id": self.node, "message_id": self.message_id}
        return message_like(self.template, fill(RecordDict(), records), **about)


def plain(messages: Iterable[Message]) -> list[Message]:
    """Return messages as Flower's own, which a SuperLink needs."""
    return [getattr(message, "plain", message) for message in messages]


def request_of(message: Message) -> Request:
    """Return a message as a request, without checking its config.

    A request that was read may have been changed, so it is read again.
    """
    if isinstance(message, Request) and message.is_unread:
        return message
    records, about, config = dict(entries_of(message.content)), message.metadata, {}
    # Another record, or an empty one, stays as it is.
    if isinstance(records.get(CONFIG), ConfigRecord) and records[CONFIG]:
        config = entries_of(records.pop(CONFIG))
    parts = message, about.dst_node_id, records, config
    return Request(*parts, message_id=about.message_id)


class Layout:
    """The places of float32 arrays in a vector.

    Parameters
    ----------
    names : tuple of str
        The arrays' names, in their order in the vector.
    shapes : tuple of tuple of int
        Their shapes.

    Attributes
    ----------
    places : dict of str to (slice, tuple of int)
        Each array's place and shape.
    size : int
        Number of values.
    num_bytes : int
        Number of bytes of the arrays as .npy files, and of their names.
    """

    def __init__(
        self, names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]
    ) -> None:
        *_, self.size = ends = [*accumulate(map(math.prod, shapes), initial=0)]
        places = zip(map(slice, ends, ends[1:]), shapes, strict=False)
        self.places = dict(zip(names, places, strict=True))
        headers = (header(tuple(shape), np.dtype(np.float32)) for shape in shapes)
        self.num_bytes = 4 * self.size + sum(map(len, (*names, *headers)))

    def views(self, vector: NDArray) -> dict[str, NDArray]:
        """Return views of the arrays in a vector, by name."""
        places = self.places.items()
        return {name: vector[at].reshape(shape) for name, (at, shape) in places}


# The layout is the same object for the same arrays.
layout_of = lru_cache(maxsize=64)(Layout)


class Matrix(NamedTuple):
    """Float32 arrays of several clients, with a row for each client."""

    rows: NDArray
    layout: Layout


@dataclass
class ReplyRows:
    """The replies of several clients to a round.

    Parameters
    ----------
    matrix : Matrix
        Their arrays, which must not be changed.
    metrics : dict of str to list
        The metrics, with a value for each client.
    messages : sequence of bytes, optional
        The attachment ``message`` of each client.

    Attributes
    ----------
    valid : list of bool or None
        Whether each reply has the arrays and metrics that it must have, once checked.
    """

    matrix: Matrix
    metrics: dict[str, list[int | float]]
    messages: Sequence[bytes] = ()
    valid: list[bool] | None = field(default=None, init=False)

    @cached_property
    def sizes(self) -> list[int]:
        """Number of bytes of each reply."""
        names = [ARRAYS, METRICS, *self.metrics]
        names += [BYTES, MESSAGE] if self.messages else []
        usual = self.matrix.layout.num_bytes + size_of(names) + 8 * len(self.metrics)
        messages = self.messages or [b""] * len(self.matrix.rows)
        return [usual + len(message) for message in messages]


@dataclass(eq=False, repr=False)
class RowArrays(Mapping[str, NDArray]):
    """A client's arrays, which are a row; views are made when they are read."""

    rows: ReplyRows
    row: int

    def __getitem__(self, name: str) -> NDArray:
        rows, layout = self.rows.matrix
        place, shape = layout.places[name]
        return rows[self.row, place].reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows.matrix.layout.places)

    def __len__(self) -> int:
        return len(self.rows.matrix.layout.places)


@dataclass(eq=False, repr=False)
class RowReply(UnreadMessage):
    """A reply that is a row of `ReplyRows`.

    Parameters
    ----------
    node : int
        The node that replies.
    arrays : RowArrays
        Its arrays.
    asked : Message
        The message that it answers.
    """

    node: int
    arrays: RowArrays
    asked: Message

    @cached_property
    def plain(self) -> Message:
        """The message, which may be changed from now on."""
        self.is_unread = False
        metrics = fill(MetricRecord(), self.metrics)
        records = {ARRAYS: memory_record(self.arrays), METRICS: metrics}
        if self.attachments:
            records[BYTES] = fill(ConfigRecord(), self.attachments)
        return reply_with(fill(RecordDict(), records), self.asked)

    @property
    def metrics(self) -> dict[str, int | float]:
        """The client's metrics."""
        rows, row = self.arrays.rows, self.arrays.row
        return {name: column[row] for name, column in rows.metrics.items()}

    @property
    def attachments(self) -> dict[str, bytes]:
        """The client's attachments."""
        messages = self.arrays.rows.messages
        return {MESSAGE: messages[self.arrays.row]} if messages else {}


@lru_cache(maxsize=1024)
def header(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> bytes:
    """Return the .npy header of a C-contiguous array, cached because it is slow."""
    stream = io.BytesIO()
    like = np.lib.format.header_data_from_array_1_0(np.empty((0,), dtype))
    np.lib.format.write_array_header_1_0(stream, {**like, "shape": shape})
    return stream.getvalue()


@lru_cache(maxsize=64)
def dtype_name(dtype: np.dtype[np.generic]) -> str:
    """Return ``str(dtype)``, cached because it is slow."""
    return str(dtype)


def is_parameter(name: str, value: NDArray) -> bool:
    """Return False for integers and statistics, which only a mean may change.

    An empty array is no parameter, either.
    """
    return (
        value.dtype.kind == "f"
        and value.size > 0
        and not (name.endswith(BATCH_NORM) or name.startswith(STATISTICS))
    )


def finite_rows(*arrays: NDArray) -> list[bool]:
    """Return for each row of some arrays whether all values are finite."""
    valid = np.full(len(arrays[0]), True)
    for array in arrays:
        if not is_finite(array):
            valid &= np.isfinite(array).all(tuple(range(1, array.ndim)))
    rows: list[bool] = valid.tolist()
    return rows


def is_finite(*arrays: NDArray) -> bool:
    """Return whether all numbers are finite and within float32's range."""
    for array in arrays:
        # One pass without a temporary array; `vdot` warns of no overflow. If the sum of
        # squares is too large, each value is tested.
        is_usual = array.dtype.char in ("f", "d")
        if is_usual and float(np.vdot(array, array)) <= LARGEST**2:
            continue
        if not np.isfinite(array).all():
            return False
        if array.dtype == np.float64 and np.abs(array).max() > LARGEST:
            return False
    return True
