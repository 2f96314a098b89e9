"""Messages of a round that await replies, and the checks of these replies."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from logging import INFO, WARNING
from typing import NamedTuple
from weakref import WeakKeyDictionary

from flwr.app import Array, ArrayRecord, ConfigRecord, Message
from flwr.common import log

from flwr_frl.common.flower_messages import entries_of
from flwr_frl.common.messages import BYTES, PROPERTIES, SERVER_ROUND
from flwr_frl.common.text import one_line
from flwr_frl.strategies.server.checks import InvalidReplyError, error_reason
from flwr_frl.strategies.server.replies import (
    REPLY_ALLOWANCE,
    Arrays,
    check_arrays,
    check_metrics,
    count_bytes,
    largest_reply,
    record_bytes,
    unused_state,
)

# Total size in bytes of the replies that are requested before they are averaged, if
# clients of this process train on demand. One by one, small models take 6 % longer.
CHUNK_BYTES = 2**26


class _Decoded(NamedTuple):
    """NumPy arrays, and the Flower arrays from which they were decoded."""

    held: tuple[Array, ...]
    arrays: Arrays


class PendingRound:
    """Messages of one kind in one round, and their replies.

    Parameters
    ----------
    server_round : int, default 0
        The round.
    name_of : callable, default str
        Returns a node's name.
    sent : ArrayRecord, optional
        Shared arrays from which the messages were made.
    label : callable, default str
        Returns a client's name in logs and errors.

    Attributes
    ----------
    config : ConfigRecord
        Config of the messages, without the entries that are added for each client.
    asked_in : dict of int to int
        Round of the message that a node answers, if it may be an earlier round.
    expected : dict of str to ArrayRecord
        Arrays whose names, shapes and dtypes replies must have, by key of the record.
    attached_bytes : int
        Number of expected bytes besides arrays and numbers.
    rejections : list of (str, str)
        Clients whose replies were rejected, with the reason.
    silent : list of str
        Clients that were asked and did not reply.
    unused : dict of str to str
        Clients that could not use their saved state, with the reason.
    bytes_down, bytes_up : int
        Bytes of all messages to clients, and of the replies until the round closed.
    """

    def __init__(
        self,
        server_round: int = 0,
        name_of: Callable[[int], str] = str,
        sent: ArrayRecord | None = None,
        label: Callable[[str], str] = str,
    ) -> None:
        self.server_round, self.name_of = server_round, name_of
        self._label = label
        self.sent = ArrayRecord() if sent is None else sent
        self.asked: set[int] = set()
        self.asked_in: dict[int, int] = {}
        self.config = ConfigRecord()
        self.expected: dict[str, ArrayRecord] = {}
        self.attached_bytes = 0
        self.rejections: list[tuple[str, str]] = []
        self.silent: list[str] = []
        self.unused: dict[str, str] = {}
        self.bytes_down = self.bytes_up = 0
        # The expected records, and the number of bytes of each by its id.
        self._sized: tuple[tuple[ArrayRecord, ...], dict[int, int]] = (), {}
        # Sizes in bytes of the replies that `is_valid` has accepted.
        self._valid: WeakKeyDictionary[Message, int] = WeakKeyDictionary()
        # Decoded arrays, which are views of the replies' bytes, by reply and key.
        self._arrays: WeakKeyDictionary[Message, dict[str, _Decoded]]
        self._arrays = WeakKeyDictionary()

    def expect(self, key: str, like: ArrayRecord) -> None:
        """Expect arrays of these names, shapes and dtypes under a key."""
        self.expected[key] = like
        self._arrays.clear()
        self._valid.clear()

    def ask(self, messages: list[Message]) -> list[Message]:
        """Store who is asked, count the bytes, and return the same messages."""
        self.asked |= {message.metadata.dst_node_id for message in messages}
        # The records' ids are unique as long as the messages hold the records.
        sizes = dict(self._expected_bytes()[1])
        self.bytes_down += sum(count_bytes(message, sizes) for message in messages)
        return messages

    def asked_names(self) -> list[str]:
        """Return the names of the clients that were asked, in their order."""
        return sorted(map(self.name_of, self.asked))

    @property
    def largest_reply(self) -> float:
        """Limit of a reply in bytes: twice the expected size, plus 16 MiB."""
        records, sizes = self._expected_bytes()
        total = sum(sizes[id(record)] for record in records)
        return largest_reply(total + self.attached_bytes)

    def _expected_bytes(self) -> tuple[tuple[ArrayRecord, ...], dict[int, int]]:
        records = tuple(self.expected.values())
        if records != self._sized[0]:
            self._sized = records, {id(r): record_bytes(r) for r in records}
        return self._sized

    def is_valid(self, reply: Message, check: Callable[[Message], object]) -> bool:
        """Return whether a reply is valid; `close` then need not check it again."""
        size = count_bytes(reply)
        try:
            self.check_content(reply, size)
            check(reply)
        except InvalidReplyError:
            return False
        self._valid[reply] = size
        return True

    def check_content(self, reply: Message, size: int) -> None:
        """Raise `InvalidReplyError` if a reply has unexpected records or is too large.

        Numbers and attachments have no expected names, so only their size is limited.
        ``size`` is the number of the reply's bytes.
        """
        for key, record in entries_of(reply.content).items():
            arrays = isinstance(record, ArrayRecord) and key not in self.expected
            config = isinstance(record, ConfigRecord) and key not in (BYTES, PROPERTIES)
            if arrays or config:
                raise InvalidReplyError(
                    f"has the record {one_line(repr(key), 120)}, for which nobody asked"
                )
        if size > (most := self.largest_reply):
            raise InvalidReplyError(f"has {size:,} bytes, more than {most:,.0f}")

    def check(self, reply: Message) -> None:
        """Raise `InvalidReplyError` unless a reply is as expected and of this round."""
        for key in self.expected:
            self.arrays(reply, key)
        # Detects repeated content; a Byzantine client can report any round.
        expected = self._asked_in(reply)
        reported = check_metrics(reply).get(SERVER_ROUND, expected)
        if reported != expected:
            raise InvalidReplyError(
                f"is of round {reported:g}, not of round {expected}"
            )

    def _round_of(self, reply: Message) -> float:
        """Return a reply's round: the reported one, or else that of its message."""
        return check_metrics(reply).get(SERVER_ROUND, self._asked_in(reply))

    def _asked_in(self, reply: Message) -> int:
        """Return the round of the message that a reply answers."""
        return self.asked_in.get(reply.metadata.src_node_id, self.server_round)

    def arrays(self, reply: Message, key: str) -> Arrays:
        """Return a reply's arrays under a key, in the expected order.

        They are checked once, and again if they were replaced: Flower's
        differential-privacy wrappers clip the arrays of a reply.
        """
        decoded = self._arrays.setdefault(reply, {})
        record = entries_of(reply.content).get(key)
        held = tuple(record.values()) if isinstance(record, ArrayRecord) else ()
        if key not in decoded or decoded[key].held != held:
            arrays = check_arrays(reply, key, self.expected[key])
            decoded[key] = _Decoded(held, arrays)
            self._valid.pop(reply, None)
        return dict(decoded[key].arrays)

    def forget_arrays(self, reply: Message, key: str) -> None:
        """Remove the arrays under a key from a reply, to free their memory."""
        del reply.content[key]
        self._arrays.pop(reply, None)

    def close(
        self,
        replies: Iterable[Message],
        check: Callable[[Message], object],
        use: Callable[[Message], object] | None = None,
    ) -> list[Message]:
        """Return the valid replies, at most one a client, in the order of names.

        Parameters
        ----------
        replies : iterable of Message
            Replies in any order; each is checked as it arrives.
        check : callable
            Raises `InvalidReplyError` for an invalid reply, which is logged with the
            client's name and the reason.
        use : callable, optional
            Called with each valid reply in the order of names, as soon as the replies
            of all clients before it have arrived.
        """
        valid: dict[int, Message] = {}
        came, used = set[int](), set[int]()

        def in_order(node: int) -> tuple[str, int]:
            return self.name_of(node), node

        def use_next(node: int) -> None:
            if use and node in valid and node not in used:
                used.add(node)
                use(valid[node])

        awaited = deque(sorted(self.asked, key=in_order) if use else ())
        for reply in self._in_chunks(replies):
            came.add(reply.metadata.src_node_id)
            size = self._valid.get(reply) or count_bytes(reply)
            self.bytes_up += size
            self._take(reply, size, valid, check)
            while awaited and awaited[0] in came:
                use_next(awaited.popleft())
        self.silent = sorted(map(self.name_of, self.asked - came))
        if self.rejections:
            text = "rejected replies: %d; that of client %s %s"
            name, reason = self.rejections[0]
            log(WARNING, text, len(self.rejections), self._label(name), reason)
        order = sorted(valid, key=in_order)
        for node in order:
            use_next(node)
        return [valid[node] for node in order]

    def _in_chunks(self, replies: Iterable[Message]) -> Iterator[Message]:
        """Yield replies; as many as fit in `CHUNK_BYTES` are requested at a time."""
        expected = self.largest_reply - REPLY_ALLOWANCE
        waiting, size = iter(replies), max(1, int(CHUNK_BYTES / (expected + 1)))
        while chunk := deque(islice(waiting, size)):
            while chunk:
                yield chunk.popleft()

    def _take(
        self,
        reply: Message,
        size: int,
        valid: dict[int, Message],
        check: Callable[[Message], object],
    ) -> None:
        """Add a reply to the valid ones by node, or log why it is not valid."""
        node = reply.metadata.src_node_id
        if reply.has_error() and node not in self.asked:
            # The SuperLink reports, under its own id, that a node has left.
            log(INFO, "a client has not answered: %s", error_reason(reply))
            return
        try:
            if node not in self.asked:
                raise InvalidReplyError("comes from a node that was not asked")
            if node in valid:
                raise InvalidReplyError("comes twice")
            if reply.has_error():
                raise InvalidReplyError(f"is an error: {error_reason(reply)}")
            if not self._is_still_valid(reply):
                self.check_content(reply, size)
                check(reply)
            valid[node] = reply
            if reason := unused_state(reply):
                self.unused[self.name_of(node)] = reason
        except InvalidReplyError as error:
            name, reason = self.name_of(node), one_line(error)
            self.rejections.append((name, reason))
            log(INFO, "reply of client %s %s", self._label(name), reason)

    def _is_still_valid(self, reply: Message) -> bool:
        """Return whether a reply was valid and its arrays were not replaced since."""
        if reply in self._valid:
            for key in self.expected:
                self.arrays(reply, key)
        return reply in self._valid

    @property
    def failure(self) -> str:
        """Why the first client has no valid reply; empty if all have one."""
        silent = [(name, "no answer") for name in self.silent]
        for name, reason in [*self.rejections, *silent]:
            return f"client {self._label(name)}: {reason}"
        return ""

    def counts(self, prefix: str = "") -> dict[str, float]:
        """Return ``rejected`` and ``unanswered`` (with a prefix), and the bytes.

        The latter are ``bytes-down`` and ``bytes-up``.
        """
        rejected, unanswered = len(self.rejections), len(self.silent)
        counts = {f"{prefix}rejected": rejected, f"{prefix}unanswered": unanswered}
        return {**counts, "bytes-down": self.bytes_down, "bytes-up": self.bytes_up}

    def names(self, replies: Iterable[Message]) -> list[str]:
        """Return the names of the clients that sent the replies, in their order."""
        return [self.name_of(reply.metadata.src_node_id) for reply in replies]

    def rounds(self, replies: Iterable[Message]) -> dict[str, int]:
        """Return the rounds of replies, by the clients' names.

        A reply may be of an earlier round, if a grid delivers it late.
        """
        return {
            self.name_of(reply.metadata.src_node_id): int(
                min(max(self._round_of(reply), 0), self.server_round)
            )
            for reply in replies
        }
