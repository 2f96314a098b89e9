"""A round: the messages to some clients, and their replies, which are checked once."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import islice
from logging import INFO, WARNING
from typing import Any

import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.common import log

from flwr_frl.common.flower_messages import entries_of
from flwr_frl.common.memory_array import values_of
from flwr_frl.common.messages import BYTES, PROPERTIES, SERVER_ROUND
from flwr_frl.common.settings import SettingsError
from flwr_frl.common.text import one_line
from flwr_frl.strategies.server.checks import InvalidReplyError, error_reason
from flwr_frl.strategies.server.clients import Clients
from flwr_frl.strategies.server.replies import (
    REPLY_ALLOWANCE,
    Arrays,
    RunningMean,
    check_arrays,
    count_bytes,
    evaluation_metrics,
    largest_reply,
    record_bytes,
    reply_metrics,
    unused_state,
)

# Total size in bytes of the replies that are requested before they are averaged, if
# clients of this process train on demand. One by one, small models take 6 % longer.
CHUNK_BYTES = 2**26


class _Copies(Mapping[str, npt.NDArray[Any]]):
    """Arrays by name, each copied when it is first read."""

    def __init__(self, views: Arrays) -> None:
        self._views = views
        self._copies: Arrays = {}

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        if name not in self._copies:
            self._copies[name] = self._views[name].copy()
        return self._copies[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)


class Reply:
    """A client's checked reply.

    Attributes
    ----------
    client : str
        The client's name.
    node : int
        Its node.
    message : Message
        The reply as Flower's message.
    size : int
        Its number of bytes when it arrived.
    metrics : dict of str to float
        Its metrics, ``num-examples`` and ``train-loss`` among them; empty for an
        evaluation without test examples.
    decoded : dict of str to dict
        The expected arrays as they were received, by key of the record. They are views
        of the message's bytes.
    """

    def __init__(
        self,
        client: str,
        message: Message,
        size: int,
        metrics: dict[str, float],
        decoded: dict[str, Arrays],
        arrays_of: "Callable[[Reply], Arrays]",
    ) -> None:
        self.client, self.message, self.size = client, message, size
        self.node = message.metadata.src_node_id
        self.metrics, self.decoded = metrics, decoded
        self._records = {key: message.content[key] for key in decoded}
        self._arrays_of = arrays_of

    def read(self) -> Arrays:
        """Return its arrays without copying them, for reading only."""
        return self._arrays_of(self)

    @cached_property
    def arrays(self) -> Mapping[str, npt.NDArray[Any]]:
        """Its arrays, by name, those that this client alone has received among them.

        They are writable copies, made when they are first read.
        """
        return _Copies(self.read())

    def metric(self, name: str) -> float:
        """Return a metric; raise `InvalidReplyError` if the reply lacks it."""
        if name not in self.metrics:
            raise InvalidReplyError(f"lacks the metric {name!r}")
        return self.metrics[name]

    def weight(self, name: str) -> float:
        """Return a metric that is a weight; `InvalidReplyError` if it is negative."""
        if (weight := self.metric(name)) < 0:
            raise InvalidReplyError(f"metric {name!r} is {weight}, a weight below 0")
        return weight

    def attachment(self, name: str) -> object:
        """Return the attachment of this name; None if there is none."""
        record = entries_of(self.message.content).get(BYTES)
        return record.get(name) if isinstance(record, ConfigRecord) else None

    def is_of(self, message: Message) -> bool:
        """Return whether a message still has the content that was decoded."""
        content = message.content
        return message is self.message and all(
            content.get(key) is record for key, record in self._records.items()
        )

    def free(self, key: str) -> None:
        """Remove the arrays under a key, to free their memory."""
        del self.message.content[key], self.decoded[key], self._records[key]


class Round:
    """A round of training or of evaluation.

    Parameters
    ----------
    number : int, default 0
        The round, from 1.
    record : ArrayRecord
        The shared arrays.
    config : ConfigRecord
        Config that is sent to all clients; `Strategy.begin` may add to it.
    table : Clients
        Knows the names of nodes and the labels of clients.
    nodes : iterable of int
        Nodes that are asked.
    trains : bool, default True
        False if replies contain metrics only.
    check : callable
        Raises `InvalidReplyError` for a reply that cannot count.
    arrays_of : callable
        Returns all arrays of a reply.
    combine : callable
        Combines replies by the run's rule.

    Attributes
    ----------
    expected : dict of str to ndarray or None
        Arrays whose names, shapes and dtypes replies must have, by default those of
        ``sent``; `Strategy.begin` may set it.
    returns_own : bool
        True if clients also return the arrays that they alone receive; `Strategy.begin`
        may set it.
    replies : list of Reply
        The valid replies, in the order of the clients' names.
    like : dict of str to ArrayRecord
        All arrays that replies must resemble, by key of the record.
    attached_bytes : int
        Number of expected bytes besides arrays and numbers.
    asked : set of int
        Nodes that are asked.
    asked_in : dict of int to int
        Round of the message that a node answers, if it may be an earlier round.
    rejections : list of (str, str)
        Clients whose replies were rejected, with the reason.
    silent : list of str
        Clients that were asked and did not reply.
    unused : dict of str to str
        Clients that could not use their saved state, with the reason.
    bytes_down, bytes_up : int
        Bytes of all messages to clients, and of the replies until the round closed.
    running : RunningMean or None
        The mean of the replies so far, if they are averaged as they arrive.
    """

    def __init__(
        self,
        number: int = 0,
        record: ArrayRecord | None = None,
        config: ConfigRecord | None = None,
        table: Clients | None = None,
        nodes: Iterable[int] = (),
        trains: bool = True,
        check: Callable[[Reply], object] = lambda reply: None,
        arrays_of: Callable[[Reply], Arrays] = lambda reply: {},
        combine: Callable[[list[Reply]], Arrays | None] = lambda replies: None,
    ) -> None:
        self.number, self.trains = number, trains
        self.record = ArrayRecord() if record is None else record
        self.config = ConfigRecord() if config is None else config
        self._table = Clients() if table is None else table
        self._check, self._arrays_of, self._combine = check, arrays_of, combine
        self.expected: Arrays | None = None
        self.returns_own = True
        self.replies: list[Reply] = []
        self.like: dict[str, ArrayRecord] = {}
        self.attached_bytes = self.bytes_down = self.bytes_up = 0
        self.asked, self.asked_in = set(nodes), dict[int, int]()
        self.rejections: list[tuple[str, str]] = []
        self.silent: list[str] = []
        self.unused: dict[str, str] = {}
        self.running: RunningMean | None = None
        # Replies that were decoded, by node.
        self._arrived: dict[int, Reply] = {}

    # Interface for algorithms.

    @cached_property
    def sent(self) -> dict[str, npt.NDArray[Any]]:
        """The shared arrays, by name; for reading only."""
        return {name: values_of(array) for name, array in self.record.items()}

    @property
    def clients(self) -> list[str]:
        """Names of the clients that are asked, in order."""
        return sorted(map(self._table.name_of, self.asked))

    def need(self, *names: str) -> None:
        """Raise `SettingsError` if the shared arrays lack one of these."""
        if missing := [name for name in names if name not in self.record]:
            raise SettingsError(
                f"initial_arrays lacks {', '.join(map(repr, missing))}, which the "
                "algorithm sends beside the model; pass the arrays that "
                "initialize(grid) returns, with flwr_frl.clients.client_app:app",
                "initial-arrays",
            )

    def mean(self, replies: list[Reply] | None = None) -> Arrays | None:
        """Return the mean of replies, or the result of the rule of ``aggregation``.

        Parameters
        ----------
        replies : list of Reply, optional
            Some of the replies, by default all.

        Returns
        -------
        dict of str to ndarray, or None
            None if all weights are 0.
        """
        return self._combine(self.replies if replies is None else replies)

    # Messages.

    def ask(self, messages: list[Message]) -> list[Message]:
        """Store who is asked, count the bytes, and return the same messages."""
        self.asked |= {message.metadata.dst_node_id for message in messages}
        # The records' ids are unique as long as the messages hold the records.
        sizes: dict[int, int] = {}
        self.bytes_down += sum(count_bytes(message, sizes) for message in messages)
        return messages

    @property
    def largest_reply(self) -> float:
        """Limit of a reply in bytes: twice the expected size, plus 16 MiB."""
        expected = sum(map(record_bytes, self.like.values()))
        return largest_reply(expected + self.attached_bytes)

    # Replies.

    def reply_of(self, message: Message) -> Reply:
        """Return a message's reply; raise `InvalidReplyError` if it cannot count.

        It is decoded and checked once. Only if its arrays were replaced since it
        arrived, it is decoded again: Flower's differential-privacy wrappers clip them.
        """
        node = message.metadata.src_node_id
        if (reply := self._arrived.get(node)) and reply.is_of(message):
            return reply
        reply = self._arrived[node] = self._read(message)
        return reply

    def is_valid(self, message: Message) -> bool:
        """Return whether a reply without error can count."""
        try:
            self.reply_of(message)
        except InvalidReplyError:
            return False
        return True

    def _read(self, message: Message) -> Reply:
        """Return a reply that is as expected and of this round."""
        size = count_bytes(message)
        self._check_content(message, size)
        node = message.metadata.src_node_id
        decoded = {k: check_arrays(message, k, like) for k, like in self.like.items()}
        metrics = (reply_metrics if self.trains else evaluation_metrics)(message)
        if self.trains:
            # Detects repeated content; a Byzantine client can report any round.
            expected = self.asked_in.get(node, self.number)
            if (reported := metrics.get(SERVER_ROUND, expected)) != expected:
                raise InvalidReplyError(
                    f"is of round {reported:g}, not of round {expected}"
                )
        client = self._table.name_of(node)
        reply = Reply(client, message, size, metrics, decoded, self._arrays_of)
        self._check(reply)
        return reply

    def _check_content(self, message: Message, size: int) -> None:
        """Raise `InvalidReplyError` if a reply has unexpected records or is too large.

        Numbers and attachments have no expected names, so only their size is limited.
        """
        for key, record in entries_of(message.content).items():
            arrays = isinstance(record, ArrayRecord) and key not in self.like
            config = isinstance(record, ConfigRecord) and key not in (BYTES, PROPERTIES)
            if arrays or config:
                raise InvalidReplyError(
                    f"has the record {one_line(repr(key), 120)}, for which nobody asked"
                )
        if size > REPLY_ALLOWANCE and size > (most := self.largest_reply):
            raise InvalidReplyError(f"has {size:,} bytes, more than {most:,.0f}")

    def close(
        self,
        messages: Iterable[Message],
        use: Callable[[Reply], object] | None = None,
    ) -> None:
        """Store the valid replies, at most one a client, in the order of names.

        Parameters
        ----------
        messages : iterable of Message
            Replies in any order; each is checked as it arrives. A rejected one is
            logged with the client's name and the reason.
        use : callable, optional
            Called with each valid reply in the order of names, as soon as the replies
            of all clients before it have arrived.
        """
        valid: dict[int, Reply] = {}
        came = set[int]()

        def in_order(node: int) -> tuple[str, int]:
            return self._table.name_of(node), node

        awaited = deque(sorted(self.asked, key=in_order) if use else ())
        for message in self._in_chunks(messages):
            came.add(message.metadata.src_node_id)
            self._take(message, valid)
            while use and awaited and awaited[0] in came:
                if reply := valid.get(awaited.popleft()):
                    use(reply)
        self.silent = sorted(map(self._table.name_of, self.asked - came))
        if self.rejections:
            text = "rejected replies: %d; that of client %s %s"
            name, reason = self.rejections[0]
            log(WARNING, text, len(self.rejections), self._table.label(name), reason)
        # Silent clients come before these.
        for node in awaited:
            if use and node in valid:
                use(valid[node])
        self.replies = [valid[node] for node in sorted(valid, key=in_order)]

    def _in_chunks(self, messages: Iterable[Message]) -> Iterator[Message]:
        """Yield replies; as many as fit in `CHUNK_BYTES` are requested at a time."""
        expected = self.largest_reply - REPLY_ALLOWANCE
        waiting, size = iter(messages), max(1, int(CHUNK_BYTES / (expected + 1)))
        while chunk := deque(islice(waiting, size)):
            while chunk:
                yield chunk.popleft()

    def _take(self, message: Message, valid: dict[int, Reply]) -> None:
        """Add a reply to the valid ones by node, or log why it is not valid."""
        node = message.metadata.src_node_id
        if message.has_error() and node not in self.asked:
            # The SuperLink reports, under its own id, that a node has left.
            log(INFO, "a client has not answered: %s", error_reason(message))
            return
        try:
            if node not in self.asked:
                raise InvalidReplyError("comes from a node that was not asked")
            if node in valid:
                raise InvalidReplyError("comes twice")
            if message.has_error():
                raise InvalidReplyError(f"is an error: {error_reason(message)}")
            reply = valid[node] = self.reply_of(message)
            self.bytes_up += reply.size
            if reason := unused_state(message):
                self.unused[reply.client] = reason
        except InvalidReplyError as error:
            self.bytes_up += count_bytes(message)
            name, reason = self._table.name_of(node), one_line(error)
            self.rejections.append((name, reason))
            log(INFO, "reply of client %s %s", self._table.label(name), reason)

    def forget_replies(self) -> None:
        """Free the replies' memory, as they hold whole messages."""
        self.replies, self._arrived, self.running = [], {}, None

    # Summary of the replies.

    @property
    def failure(self) -> str:
        """Why the first client has no valid reply; empty if all have one."""
        silent = [(name, "no answer") for name in self.silent]
        for name, reason in [*self.rejections, *silent]:
            return f"client {self._table.label(name)}: {reason}"
        return ""

    def counts(self, prefix: str = "") -> dict[str, float]:
        """Return ``rejected`` and ``unanswered`` (with a prefix), and the bytes.

        The latter are ``bytes-down`` and ``bytes-up``.
        """
        rejected, unanswered = len(self.rejections), len(self.silent)
        counts = {f"{prefix}rejected": rejected, f"{prefix}unanswered": unanswered}
        return {**counts, "bytes-down": self.bytes_down, "bytes-up": self.bytes_up}
