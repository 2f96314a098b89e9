"""A grid for real nodes, which may answer late or never, and when a round closes.

Before a round, `Participation.open` may give a `Closing` to the grid by ``wait_for``:
to `Inbox` on real nodes, to `SimulatedArrivals` in simulation. Without one, a round
waits for all replies.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import Any, TypeVar

import httpx
from flwr.app import Message, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from flwr_frl.common.arrays import (
    SUPERLINK,
    error_reply,
    message_like,
    plain,
    response_hooks,
)
from flwr_frl.common.errors import SettingsError, error_line
from flwr_frl.common.text import several

# Seconds between two pulls: the minimum, the fraction of the time waited so far, and
# the maximum. SuperNodes pull every 3 s, so a smaller minimum would not shorten rounds;
# with one, pulls took half of the SuperLink's time.
PULL_INTERVAL, LATENESS, LONGEST_INTERVAL = 0.3, 0.05, 3.0
# Number of messages after which a pull may stop. Each takes a separate request.
LOOKED_AT = 100
# Seconds after which missing nodes are first logged; the time doubles each time.
FIRST_WORD = 60.0
# Seconds for which a request to an unavailable SuperLink is repeated, and the pauses in
# between, which double from the first to the longest.
OUTAGE_LIMIT = 600.0
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0

T = TypeVar("T")


@dataclass(eq=False)
class Closing:
    """Close a round once enough valid replies have arrived; by default with all.

    Parameters
    ----------
    missing : float, default inf
        The number of valid replies.
    is_valid : callable, optional
        Returns whether a reply without error counts; by default, all do.

    Attributes
    ----------
    missing : float
        The number of replies that are missing.
    at_work : dict of int to (Message, float)
        Messages that await replies, by node, and when their replies are due.
    ready : deque of (Message, int)
        Replies that have arrived and were not needed so far, and the nodes asked.
    """

    missing: float = math.inf
    is_valid: Callable[[Message], bool] = lambda reply: True
    at_work: dict[int, tuple[Message, float]] = field(default_factory=dict, init=False)
    ready: deque[tuple[Message, int]] = field(default_factory=deque, init=False)

    # True if replies that arrive after the round's end belong to the next round.
    lasts = False
    # True if the round also waits for replies that it does not need.
    waits_for_rest = False

    def begin(self, message: Message, due: float = 0.0) -> None:
        """Record that a message was sent, and when its node's reply is due."""
        self.at_work[message.metadata.dst_node_id] = message, due

    def end(self, node: int) -> None:
        """Record that a node is done, or given up."""
        self.at_work.pop(node, None)

    def take(self, reply: Message) -> None:
        """Count a reply if it is valid."""
        if not reply.has_error() and self.is_valid(reply):
            self.missing -= 1

    def refill(self) -> list[Message]:
        """Return messages to send now, as other nodes are done."""
        return []


def delegate(name: str) -> Any:
    """Return a property that reads ``name`` from the decorated grid."""
    return property(lambda self: getattr(self.grid, name))


@dataclass(eq=False, repr=False)
class GridDecorator(Grid):
    """A grid that passes all calls on to another grid, unless a subclass handles them.

    Parameters
    ----------
    grid : Grid
        The decorated grid.
    """

    grid: Grid

    # `Grid` defines these, so that `__getattr__` is not called for them.
    set_run = delegate("set_run")
    run = delegate("run")
    create_message = delegate("create_message")
    get_node_ids = delegate("get_node_ids")
    get_nodes = delegate("get_nodes")
    push_messages = delegate("push_messages")
    pull_messages = delegate("pull_messages")
    send_and_receive = delegate("send_and_receive")

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["grid"], name)


def request(call: Callable[[], T]) -> T:
    """Return the result of a request to the SuperLink, repeated during an outage.

    A message that is pushed again is delivered once: its id is a digest of its content,
    and the SuperLink stores one message per id.
    """
    deadline, pause = time.monotonic() + OUTAGE_LIMIT, FIRST_PAUSE
    while True:
        try:
            return call()
        except httpx.HTTPError as error:
            if not is_outage(error):
                raise
            if time.monotonic() + pause > deadline:
                raise SettingsError(
                    f"the SuperLink could not be used for {OUTAGE_LIMIT:g} s: "
                    f"{error_line(error)}"
                ) from None
            text = "the SuperLink cannot serve; asked again in %g s: %s"
            log(WARNING, text, pause, error_line(error))
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


@contextlib.contextmanager
def limited(grid: Grid, largest: float) -> Iterator[None]:
    """Raise `ValueError` before more bytes than ``largest`` are downloaded.

    Flower downloads all objects of a reply in one call, in threads.
    """
    sizes = list[int]()

    def check(response: httpx.Response) -> None:
        sizes.append(int(response.headers.get("content-length", 0)))
        if sum(sizes) > largest:
            raise ValueError(f"it has more than {largest:,.0f} bytes")

    hooks = response_hooks(grid)
    hooks.append(check)
    try:
        yield
    finally:
        hooks.remove(check)


def pull(grid: Grid, message: Message, largest: float) -> Message | None:
    """Return the reply to a message; None if it has not arrived.

    Flower decodes replies while it pulls them and does not catch exceptions: one
    client's reply can raise any exception, and all replies of the same pull are lost.
    So replies are pulled one by one, and an unreadable, forged or too large one becomes
    an error reply of its node. An `httpx.HTTPError` is not its fault, and raised.
    """
    try:
        with limited(grid, largest):
            for reply in grid.pull_messages([message.metadata.message_id]):
                _check_envelope(reply, message)
                return reply
    except httpx.HTTPError:
        raise
    except Exception as error:
        return error_reply(f"the reply cannot be read: {error_line(error)}", message)
    return None


def _check_envelope(reply: Message, message: Message) -> None:
    """Raise unless a reply answers a message, from its node or the SuperLink.

    The client writes the envelope, so it may be forged.
    """
    about, asked = reply.metadata, message.metadata
    if about.reply_to_message_id != asked.message_id:
        raise ValueError("it says that it answers another message")
    of_superlink = about.src_node_id == SUPERLINK and reply.has_error()
    if about.src_node_id != asked.dst_node_id and not of_superlink:
        raise ValueError(f"it says that it is of node {about.src_node_id}")


def is_outage(error: httpx.HTTPError) -> bool:
    """Return whether the server rather than the request is at fault."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code >= 500
    return isinstance(error, httpx.TransportError)


@dataclass
class _Sent:
    """A message that awaits its reply.

    Parameters
    ----------
    message : Message
        The message without its content.
    largest : float
        Limit of the reply in bytes.
    closing : Closing or None
        The policy of its round; with None the reply is dropped.
    since, wait : float
        When it was sent, by `time.monotonic`, and after how many seconds without a
        reply the node is silent.
    silent : bool
        Whether this time is over.
    stopped : bool
        Whether a pull has stopped at this message, which was not checked since.
    """

    message: Message
    largest: float
    closing: Closing | None
    since: float
    wait: float
    silent: bool = False
    stopped: bool = False

    @property
    def node(self) -> int:
        return self.message.metadata.dst_node_id


@dataclass(eq=False, repr=False)
class Inbox(GridDecorator):
    """Receive replies in the order of arrival, and do not wait for silent nodes.

    Outages of the SuperLink are waited out, and bad replies become errors of their
    nodes (`pull`). A `Closing` decides when a round of training is over.

    A node that still owes a reply to a closed round is unavailable (`get_node_ids`)
    until it has answered. It is silent if its reply takes longer than the round's
    timeout. After the k-th time in a row, a silent node is unavailable for 2^k − 1
    waiting times, unless there are no others. It is available again as soon as its
    reply arrives. Late replies are pulled and dropped, so that they do not accumulate
    in the SuperLink.

    Parameters
    ----------
    grid : Grid
        Flower's grid.
    name_of : callable, default str
        Returns a node's name for the log.
    longest : float, default inf
        Longest waiting time in seconds: ``round-timeout``.
    largest_reply : callable, optional
        Returns the limit in bytes of replies to a kind of message when it is sent.
        Larger replies are not downloaded.

    Attributes
    ----------
    connected : frozenset of int
        All nodes that were connected at the last `get_node_ids`.
    """

    name_of: Callable[[int], str] = str
    longest: float = math.inf
    largest_reply: Callable[[str], float] = lambda kind: math.inf
    connected: frozenset[int] = field(default=frozenset(), init=False)
    _closing: Closing | None = field(default=None, init=False)
    # By message id. The one that was checked longest ago comes first.
    _sent: dict[str, _Sent] = field(default_factory=dict, init=False)
    # How many messages in a row a node has not answered, and the end of its pause.
    _silences: dict[int, tuple[int, float]] = field(default_factory=dict, init=False)

    # Nodes.

    def get_nodes(self) -> Iterable[Any]:
        """Return information about the nodes, once the SuperLink is available."""
        return request(lambda: list(self.grid.get_nodes()))

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes that are available; if none is, those that owe no reply."""
        self.drain()
        nodes = request(lambda: list(self.grid.get_node_ids()))
        self.connected = frozenset(nodes)
        sent, now = self._sent.values(), time.monotonic()
        # Forget nodes that have left or come back under another id.
        heard_of = self.connected | {each.node for each in sent}
        self._silences = {n: s for n, s in self._silences.items() if n in heard_of}
        owing = {s.node for s in sent if s.closing is None and not s.silent}
        free = [node for node in nodes if node not in owing]
        paused = {node for node, (_, end) in self._silences.items() if now < end}
        return [node for node in free if node not in paused] or free

    @property
    def at_work(self) -> frozenset[int]:
        """The nodes whose replies still count for an open round."""
        return frozenset(each.node for each in self._sent.values() if each.closing)

    @property
    def silent(self) -> list[str]:
        """Names of the nodes that did not answer in time."""
        return sorted(map(self.name_of, self._silences))

    # Rounds.

    def wait_for(self, closing: Closing) -> None:
        """Close the next `send_and_receive` by a policy; by default at all replies.

        Without a reply to close it, the round ends when all nodes are silent.
        """
        self._closing = closing

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Return the replies that close the round, in the order of their creation.

        No reply is awaited longer than ``timeout`` seconds.
        """
        closing, self._closing = self._closing or Closing(), None
        wait = self.longest if timeout is None else min(timeout, self.longest)
        self._send(list(messages), closing, wait)
        replies: list[Message] = []
        pauses = self._pauses(closing)
        while closing.missing > 0 and (closing.ready or self._awaited(closing)):
            if not closing.ready:
                self._receive(closing, pauses)
            while closing.missing > 0 and closing.ready:
                reply, node = closing.ready.popleft()
                closing.end(node)
                closing.take(reply)
                replies.append(reply)
            if closing.missing > 0:
                self._send(closing.refill(), closing, wait)
        if 0 < closing.missing < math.inf:
            text = "the round closes although valid replies are missing: %d"
            log(WARNING, text, closing.missing)
        while closing.waits_for_rest and self._awaited(closing):
            self._receive(closing, pauses)
        if not closing.lasts:
            for sent in self._awaited(closing).values():
                sent.closing = None
        return replies

    def drain(self) -> None:
        """Drop late replies that have arrived, and forget expired messages."""
        for _, node in self._pull([*self._awaited(None)]):
            log(INFO, "late reply of node %s dropped", self.name_of(node))
        self._note_silence(None)

    def _awaited(self, closing: Closing | None) -> dict[str, _Sent]:
        """Return the messages of a round that await replies; with None, late ones."""
        return {i: sent for i, sent in self._sent.items() if sent.closing is closing}

    def _send(self, messages: list[Message], closing: Closing, wait: float) -> None:
        # Flower refuses a request without messages.
        if not messages:
            return
        push, messages = self.grid.push_messages, plain(messages)
        ids = request(lambda: list(push(messages)))
        now = time.monotonic()
        largest = self.largest_reply(messages[0].metadata.message_type)
        for message_id, message in zip(ids, messages, strict=False):
            # Flower returns no id for a message that it could not send.
            if not message_id:
                node = message.metadata.dst_node_id
                log(WARNING, "a message to node %d was not sent", node)
                continue
            closing.begin(message)
            # Without its content, as nodes may be silent for long.
            stub = message_like(message, RecordDict(), message_id=message_id)
            limit = min(wait, message.metadata.ttl)
            self._sent[message_id] = _Sent(stub, largest, closing, now, limit)

    def _receive(self, closing: Closing, pauses: Iterator[float]) -> None:
        """Pull a round's replies after a pause; give up nodes whose time is over."""
        awaited = self._awaited(closing)
        ends = min(sent.since + sent.wait for sent in awaited.values())
        if (pause := min(next(pauses), ends - time.monotonic())) > 0:
            time.sleep(pause)
        over = time.monotonic() >= ends
        # Check all messages if the order of arrival matters or time is up.
        is_ordered = closing.missing < math.inf and not closing.lasts
        size = len(awaited) if over or is_ordered else LOOKED_AT
        closing.ready.extend(self._pull([*awaited], size))
        if over:
            self._note_silence(closing)

    def _pauses(self, closing: Closing) -> Iterator[float]:
        """Yield the seconds before each pull; log missing nodes now and then."""
        began, next_word = time.monotonic(), FIRST_WORD
        yield 0.0
        while True:
            waited = time.monotonic() - began
            if waited >= next_word:
                next_word *= 2
                nodes = (sent.node for sent in self._awaited(closing).values())
                names = several(sorted(map(self.name_of, nodes)))
                log(INFO, "for %.0f s waiting for %s", waited, names)
            yield min(max(PULL_INTERVAL, waited * LATENESS), LONGEST_INTERVAL)

    def _pull(
        self, message_ids: list[str], size: int = LOOKED_AT
    ) -> list[tuple[Message, int]]:
        """Return the replies that have arrived, and the nodes that were asked.

        The pull stops after a portion of this size for which nothing has arrived: then
        the others have probably not answered either. It also stops at an outage.
        """
        arrived: list[tuple[Message, int]] = []
        found = 0
        for number, message_id in enumerate(message_ids, 1):
            # It comes last in the next pull, so that it does not block others.
            sent = self._sent[message_id] = self._sent.pop(message_id)
            try:
                reply = pull(self.grid, sent.message, sent.largest)
            except httpx.HTTPError as error:
                if not is_outage(error):
                    raise
                # Only the first of consecutive outages is logged.
                if not any(each.stopped for each in self._sent.values()):
                    text = "the SuperLink gives no replies: %s"
                    log(WARNING, text, error_line(error))
                sent.stopped = True
                break
            sent.stopped = False
            if reply is not None:
                del self._sent[message_id]
                arrived.append((reply, sent.node))
                # Else the SuperLink reports that the node is gone.
                if reply.metadata.src_node_id == sent.node:
                    self._silences.pop(sent.node, None)
            if number % size == 0:
                if len(arrived) == found:
                    break
                found = len(arrived)
        return sorted(arrived, key=lambda pair: (pair[0].metadata.created_at, pair[1]))

    def _note_silence(self, closing: Closing | None) -> None:
        """Give up the nodes that have not answered in time, and expired messages."""
        now = time.monotonic()
        given_up: list[str] = []
        for message_id, sent in self._awaited(closing).items():
            if not sent.silent and now >= sent.since + sent.wait:
                sent.closing, sent.silent = None, True
                if closing:
                    closing.end(sent.node)
                times = 1 + self._silences.get(sent.node, (0, now))[0]
                # A larger power of 2 would be out of range.
                pause = (2.0 ** min(times, 1000) - 1) * sent.wait
                self._silences[sent.node] = times, now + pause
                given_up.append(self.name_of(sent.node))
            if now >= sent.since + sent.message.metadata.ttl:
                # It gets no reply.
                del self._sent[message_id]
        if given_up:
            text = "no answer in time, so not asked for a while: %s"
            log(WARNING, text, several(sorted(given_up)))
