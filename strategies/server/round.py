"""A round: the messages to some clients, and their replies, which are checked once."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from logging import INFO, WARNING
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.common import log

from flwr_frl.common.flower_messages import entries_of
from flwr_frl.common.memory_array import values_of
from flwr_frl.common.messages import BYTES, PROPERTIES, SERVER_ROUND, UNUSED_STATE
from flwr_frl.common.settings import SettingsError
from flwr_frl.common.text import one_line
from flwr_frl.strategies.server.checks import (
    REPLY_ALLOWANCE,
    InvalidReplyError,
    check_arrays,
    count_bytes,
    error_reason,
    largest_reply,
    record_bytes,
    reply_metrics,
    reply_properties,
)
from flwr_frl.strategies.server.replies import Arrays, RunningMean

if TYPE_CHECKING:
    from flwr_frl.strategies.base import Strategy

# Total size in bytes of the replies that are requested before they are averaged, if
# clients of this process train on demand. One by one, small models take 6 % longer.
CHUNK_BYTES = 2**26


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

    def __init__(self, strategy: "Strategy", message: Message, size: int) -> None:
        self._strategy, self.message = strategy, message
        self.node = message.metadata.src_node_id
        self.client = strategy._run.clients.name_of(self.node)
        self.size = size
        self.metrics: dict[str, float] = {}
        self.decoded: dict[str, Arrays] = {}

    def read(self) -> Arrays:
        """Return its arrays without copying them, for reading only."""
        return self._strategy._arrays(self)

    @cached_property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Its arrays, by name, those that this client alone has received among them.

        They are writable copies, made at the first access.
        """
        return {name: array.copy() for name, array in self.read().items()}

    def metric(self, name: str) -> float:
        """Return a metric; raise `InvalidReplyError` if the reply lacks it."""
        if name not in self.metrics:
            raise InvalidReplyError(f"lacks the metric {name!r}")
        return self.metrics[name]

    def attachment(self, name: str) -> object:
        """Return the attachment of this name; None if there is none."""
        record = entries_of(self.message.content).get(BYTES)
        return record.get(name) if isinstance(record, ConfigRecord) else None


class Round:
    """A round of training or of evaluation.

    Parameters
    ----------
    strategy : Strategy
        The strategy.
    number : int, default 0
        The round, from 1.
    record : ArrayRecord, optional
        The shared arrays.
    config : ConfigRecord, optional
        Config that is sent to all clients; `Strategy.begin` may add to it.
    nodes : sequence of int
        Nodes to ask, in the order of their clients' names.
    trains : bool, default True
        False if replies contain metrics only.

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
        strategy: "Strategy",
        number: int = 0,
        record: ArrayRecord | None = None,
        config: ConfigRecord | None = None,
        nodes: Sequence[int] = (),
        trains: bool = True,
    ) -> None:
        self._strategy, self.number, self.trains = strategy, number, trains
        self.record = ArrayRecord() if record is None else record
        self.config = ConfigRecord() if config is None else config
        self.expected: Arrays | None = None
        self.returns_own = True
        self.replies: list[Reply] = []
        self.like: dict[str, ArrayRecord] = {}
        self.attached_bytes = self.bytes_down = self.bytes_up = 0
        # Evaluations and queries are sent to nodes that can answer at once.
        if nodes and not trains:
            nodes = strategy._run.clients.answering(nodes)
        self.nodes = nodes
        self.asked, self.asked_in = set(self.nodes), dict[int, int]()
        self.rejections: list[tuple[str, str]] = []
        self.silent: list[str] = []
        self.unused: dict[str, str] = {}
        self.running: RunningMean | None = None

    # Interface for algorithms.

    @cached_property
    def sent(self) -> dict[str, npt.NDArray[Any]]:
        """The shared arrays, by name; for reading only."""
        return {name: values_of(array) for name, array in self.record.items()}

    @property
    def clients(self) -> list[str]:
        """Names of the clients that are asked, in order."""
        return sorted(map(self._strategy._run.clients.name_of, self.asked))

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
        return self._strategy._mean(self.replies if replies is None else replies)

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

    def check(self, message: Message) -> Reply:
        """Return a message's reply; raise `InvalidReplyError` if it cannot count.

        It must have the expected arrays, finite numbers, no other records, a limited
        size, and the number of this round; and the algorithm must accept it.
        """
        content = entries_of(message.content)
        for key, record in content.items():
            arrays = isinstance(record, ArrayRecord) and key not in self.like
            config = isinstance(record, ConfigRecord) and key not in (BYTES, PROPERTIES)
            if arrays or config:
                raise InvalidReplyError(
                    f"has the record {one_line(repr(key), 120)}, for which nobody asked"
                )
        # Numbers and attachments have no expected names, so their size is limited.
        size = count_bytes(message)
        if size > REPLY_ALLOWANCE and size > (most := self.largest_reply):
            raise InvalidReplyError(f"has {size:,} bytes, more than {most:,.0f}")
        reply = Reply(self._strategy, message, size)
        for key, like in self.like.items():
            reply.decoded[key] = check_arrays(message, key, like)
        reply.metrics = reply_metrics(message, tests=not self.trains)
        if self.trains:
            # Detects repeated content; a Byzantine client can report any round.
            expected = self.asked_in.get(reply.node, self.number)
            if (reported := reply.metrics.get(SERVER_ROUND, expected)) != expected:
                raise InvalidReplyError(
                    f"is of round {reported:g}, not of round {expected}"
                )
            self._strategy._check_reply(reply)
        return reply

    def is_valid(self, message: Message) -> bool:
        """Return whether a reply without error can count."""
        try:
            self.check(message)
        except InvalidReplyError:
            return False
        return True

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
        clients = self._strategy._run.clients
        order = sorted(self.asked, key=lambda node: (clients.name_of(node), node))
        valid: dict[int, Reply] = {}
        came = set[int]()
        waiting = deque(order if use else ())
        for message in self._in_chunks(messages):
            came.add(message.metadata.src_node_id)
            self._take(message, valid)
            while use and waiting and waiting[0] in came:
                if reply := valid.get(waiting.popleft()):
                    use(reply)
        self.silent = [clients.name_of(node) for node in order if node not in came]
        if self.rejections:
            text = "rejected replies: %d; that of client %s %s"
            name, reason = self.rejections[0]
            log(WARNING, text, len(self.rejections), clients.label(name), reason)
        # Silent clients come before these.
        for node in waiting:
            if use and node in valid:
                use(valid[node])
        self.replies = [valid[node] for node in order if node in valid]

    def _in_chunks(self, messages: Iterable[Message]) -> Iterator[Message]:
        """Yield replies; as many as fit in `CHUNK_BYTES` are requested at a time."""
        expected = self.largest_reply - REPLY_ALLOWANCE
        waiting, size = iter(messages), max(1, int(CHUNK_BYTES / (expected + 1)))
        while chunk := deque(islice(waiting, size)):
            while chunk:
                yield chunk.popleft()

    def _take(self, message: Message, valid: dict[int, Reply]) -> None:
        """Add a reply to the valid ones by node, or log why it is not valid."""
        node, clients = message.metadata.src_node_id, self._strategy._run.clients
        name = clients.name_of(node)
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
            valid[node] = self.check(message)
            self.bytes_up += valid[node].size
        except InvalidReplyError as error:
            self.bytes_up += count_bytes(message)
            self.rejections.append((name, one_line(error)))
            log(INFO, "reply of client %s %s", clients.label(name), one_line(error))
            return
        reason = reply_properties(message).get(UNUSED_STATE, "")
        if reason and isinstance(reason, str):
            # The client starts from an older state, or without one.
            self.unused[name] = one_line(reason)
            text = "client %s goes on without what it had kept last: %s"
            log(WARNING, text, clients.label(name), self.unused[name])

    # Summary of the replies.

    @property
    def failure(self) -> str:
        """Why the first client has no valid reply; empty if all have one."""
        silent = [(name, "no answer") for name in self.silent]
        for name, reason in [*self.rejections, *silent]:
            return f"client {self._strategy._run.clients.label(name)}: {reason}"
        return ""

    def counts(self, prefix: str = "") -> dict[str, float]:
        """Return ``rejected`` and ``unanswered`` (with a prefix), and the bytes.

        The latter are ``bytes-down`` and ``bytes-up``.
        """
        rejected, unanswered = len(self.rejections), len(self.silent)
        counts = {f"{prefix}rejected": rejected, f"{prefix}unanswered": unanswered}
        return {**counts, "bytes-down": self.bytes_down, "bytes-up": self.bytes_up}
