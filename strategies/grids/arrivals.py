"""Grids that close a round when the first n clients have answered.

They decorate Flower's Grid, so any strategy that sends messages gets the first n
replies, including differential-privacy wrappers and Flower's own FedAvg.
"""

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from itertools import islice
from logging import INFO, WARNING
from typing import Any

from flwr.app import Message, MessageType
from flwr.common import log
from flwr.serverapp import Grid

from flwr_frl.common.text import several
from flwr_frl.strategies.grids.patient import GridDecorator, PatientGrid

# Seconds between two pulls: the minimum, the fraction of the time waited so far, and
# the maximum. SuperNodes pull every 3 s, so a smaller minimum would not shorten rounds;
# with one, pulls took half of the SuperLink's time.
PULL_INTERVAL, LATENESS, LONGEST_INTERVAL = 0.3, 0.05, 3.0
# Number of messages whose replies are pulled at a time. Each takes a separate request.
LOOKED_AT = 100
# Seconds after which missing nodes are first logged; the time doubles each time.
FIRST_WORD = 60.0


def with_retries(
    grid: Grid,
    name_of: Callable[[int], str],
    longest: float = math.inf,
    largest_reply: Callable[[str], float] = lambda kind: math.inf,
) -> Grid:
    """Return a grid that survives outages and silent nodes.

    ``name_of`` and ``longest`` are arguments of `RealArrivals`, ``largest_reply`` is
    one of `PatientGrid`. Grids in simulation are returned unchanged.
    """
    if isinstance(grid, ArrivalGrid) or getattr(grid, "in_process", False):
        return grid
    return RealArrivals(PatientGrid(grid, largest_reply), name_of, longest)


class ArrivalGrid(GridDecorator):
    """A grid decorator that can close a round at n replies.

    Parameters
    ----------
    grid : Grid
        The decorated grid.
    """

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self._wanted: int | None = None
        self._is_valid: Callable[[Message], bool] = lambda reply: True
        self._weight_of: Callable[[int], int] = lambda node: 1
        self._required: Container[int] = ()

    def wait_for(
        self,
        count: int,
        is_valid: Callable[[Message], bool] | None = None,
        weight_of: Callable[[int], int] | None = None,
        required: Container[int] = (),
    ) -> None:
        """Close the next `send_and_receive` after this number of valid replies.

        ``is_valid`` returns whether a reply without error counts; all do by default.
        ``weight_of`` returns the weight of a node's reply, as a number of replies; 1 by
        default. Places are reserved for the nodes in ``required``, even if other nodes
        reply earlier.
        """
        self._wanted = count
        self._is_valid = is_valid or (lambda reply: True)
        self._weight_of = weight_of or (lambda node: 1)
        self._required = required

    def total_weight(self, messages: Iterable[Message], count_all: bool) -> int:
        """Return the total weight of the replies; 1 each if ``count_all``."""
        nodes = [message.metadata.dst_node_id for message in messages]
        return len(nodes) if count_all else sum(map(self._weight_of, nodes))

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Return all replies; after `wait_for` only the `first_replies`."""
        wanted, self._wanted = self._wanted, None
        return self.first_replies(list(messages), wanted, timeout)

    @abstractmethod
    def first_replies(
        self, messages: list[Message], wanted: int | None, timeout: float | None
    ) -> list[Message]:
        """Return replies and errors until ``wanted`` replies are valid (None: all).

        After ``timeout`` seconds the round closes with the replies so far.
        """


@dataclass
class _OwedReply:
    """A message that awaits a late reply.

    Parameters
    ----------
    node : int
        Node that owes the reply.
    expires : float
        End of the message's time to live, by `time.time`.
    until : float
        Time until which the node is not asked again, by `time.monotonic`.
    wait : float
        Seconds for which the reply was awaited.
    """

    node: int
    expires: float
    until: float
    wait: float


@dataclass
class _Silence:
    """Number of consecutive messages that a node has not answered, and since when.

    The node's pause is a multiple of the last waiting time.
    """

    times: int
    since: float
    wait: float

    def lasts(self, doublings: int) -> bool:
        """Return whether the pause of 2^doublings − 1 waiting times is not over."""
        # A larger power of 2 would be out of range, and the pause lasts in any case.
        pause: float = (2.0 ** min(doublings, 1000) - 1) * self.wait
        return time.monotonic() < self.since + pause


class RealArrivals(ArrivalGrid):
    """Close rounds by the real order of arrival, and do not wait for silent nodes.

    A node that still owes a reply is unavailable (`get_node_ids`) until it has
    answered; it is silent if it takes longer than its round's waiting time. After the
    k-th time in a row, a silent node receives no training messages for 2^(k−1) − 1
    waiting times, and no other messages for 2^k − 1. It is available again as soon as
    its reply arrives. Late replies are pulled and dropped, so that they do not
    accumulate in the SuperLink.

    Parameters
    ----------
    grid : Grid
        Flower's grid.
    name_of : callable, default str
        Returns a node's name for the log.
    longest : float, default inf
        Longest waiting time in seconds: ``round-timeout``.
    """

    def __init__(
        self,
        grid: Grid,
        name_of: Callable[[int], str] = str,
        longest: float = math.inf,
    ) -> None:
        super().__init__(grid)
        self.name_of = name_of
        self.longest = longest
        # By message id.
        self._owed: dict[str, _OwedReply] = {}
        self._silent: dict[int, _Silence] = {}
        self.dropped = 0
        # All nodes that were connected at the last `get_node_ids`.
        self.connected: frozenset[int] = frozenset()

    @property
    def silent(self) -> list[str]:
        """Names of the nodes that did not answer in time."""
        return sorted(map(self.name_of, self._silent))

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes that are available; if none is, those that owe no reply."""
        self.drain()
        nodes = list(self.grid.get_node_ids())
        self.connected = frozenset(nodes)
        # Forget nodes that have left or come back under another id.
        heard_of = self.connected | {debt.node for debt in self._owed.values()}
        self._silent = {n: s for n, s in self._silent.items() if n in heard_of}
        busy, train = self._busy(), MessageType.TRAIN
        free = [n for n in nodes if n not in busy and not self._is_silent(n, train)]
        return free or [node for node in nodes if node not in busy]

    def _busy(self) -> set[int]:
        now = time.monotonic()
        return {debt.node for debt in self._owed.values() if debt.until > now}

    def _is_silent(self, node: int, kind: str) -> bool:
        """Return whether a node is paused for messages of a kind."""
        silence = self._silent.get(node)
        if silence is None:
            return False
        doublings = silence.times - (1 if kind == MessageType.TRAIN else 0)
        return silence.lasts(doublings)

    def silent_for(self, kind: str) -> frozenset[int]:
        """Return the nodes that are paused for messages of a kind."""
        return frozenset(n for n in self._silent if self._is_silent(n, kind))

    def forgive(self) -> None:
        """End the pauses of silent nodes; the next ones are longer."""
        for silence in self._silent.values():
            silence.since = -math.inf

    def drain(self) -> None:
        """Drop late replies that have arrived, and forget expired messages.

        If there are very many messages, stop when a pull returns nothing.
        """
        for _ in range(math.ceil(len(self._owed) / LOOKED_AT)):
            late = self._look(self._owed, LOOKED_AT)
            if not late:
                break
            for reply in late:
                debt = self._owed.pop(reply.metadata.reply_to_message_id, None)
                if debt is None:
                    continue
                self.dropped += 1
                log(INFO, "late reply of node %s dropped", self.name_of(debt.node))
                # An error may be the SuperLink's report that the node is gone.
                if not reply.has_error():
                    self._silent.pop(debt.node, None)
        now = time.monotonic()
        for debt in self._owed.values():
            if debt.until != 0 and debt.until <= now:
                debt.until = 0
                self._note_silence([debt.node], debt.wait)
        now = time.time()
        self._owed = {i: debt for i, debt in self._owed.items() if debt.expires > now}

    def _look(self, waiting: dict[str, Any], most: int) -> list[Message]:
        """Return replies to the messages that were checked longest ago."""
        ids = list(islice(waiting, most))
        for message_id in ids:
            # Move it to the end.
            waiting[message_id] = waiting.pop(message_id)
        return list(self.grid.pull_messages(ids))

    def _note_silence(self, nodes: Iterable[int], wait: float) -> None:
        often: dict[int, list[str]] = {}
        for node in nodes:
            times = self._silent[node].times + 1 if node in self._silent else 1
            self._silent[node] = _Silence(times, time.monotonic(), wait)
            often.setdefault(times, []).append(self.name_of(node))
        for times, names in sorted(often.items()):
            text = "client %s has not answered within %g s, %d times in a row"
            log(WARNING, text, several(sorted(names)), wait, times)

    def first_replies(
        self, messages: list[Message], wanted: int | None, timeout: float | None
    ) -> list[Message]:
        """Push the messages and pull until there are enough valid replies.

        If fewer than ``wanted`` can still arrive, the round closes with those and a
        warning.
        """
        self.drain()
        messages = self._without_silent(messages)
        # `is_valid` checks replies to training only.
        count_all = wanted is None
        total = self.total_weight(messages, count_all)
        wanted = total if wanted is None else min(wanted, total)
        wait = self.longest if timeout is None else min(timeout, self.longest)
        current = self._push(messages) if messages else {}
        total = self.total_weight(current.values(), count_all)
        first, wanted = wanted < total, min(wanted, total)
        replies: list[Message] = []
        valid = 0
        patience = Patience(wait)
        while current and valid < wanted:
            # Check all messages if the order of arrival matters or time is up.
            over = patience.is_over()
            most = len(current) if over or first else LOOKED_AT
            # Within one pull, replies are ordered by their creation.
            arrived = sorted(
                self._look(current, most),
                key=lambda r: (r.metadata.created_at, r.metadata.src_node_id),
            )
            for reply in arrived:
                # Skip unexpected and repeated replies.
                message = current.pop(reply.metadata.reply_to_message_id, None)
                if message is None:
                    continue
                self._silent.pop(message.metadata.dst_node_id, None)
                fine = not reply.has_error() and self._is_valid(reply)
                counts = count_all or fine
                places = wanted - valid
                if not count_all and message.metadata.dst_node_id not in self._required:
                    places -= self.total_weight(self._awaited(current), count_all)
                if places > 0 or not counts:
                    replies.append(reply)
                    valid += self.total_weight([message], count_all) if counts else 0
                else:
                    self.dropped += 1
            if over:
                break
            # After a partial check with replies, others have probably answered as well.
            check_again = arrived and len(current) > most
            if current and valid < wanted and not check_again:
                self.drain()
                patience.wait(
                    self.name_of(m.metadata.dst_node_id) for m in current.values()
                )
        waited_for = valid < wanted
        if waited_for:
            log(WARNING, "the round closes with %d of %d replies", valid, wanted)
            missing = [m.metadata.dst_node_id for m in current.values()]
            self._note_silence(missing, wait)
        busy_until = 0.0 if waited_for else time.monotonic() + wait
        self._owe(current, busy_until, wait)
        return replies

    def _awaited(self, current: dict[str, Message]) -> list[Message]:
        """Return the unanswered messages to required nodes."""
        required = self._required
        return [m for m in current.values() if m.metadata.dst_node_id in required]

    def _owe(self, messages: dict[str, Message], until: float, wait: float) -> None:
        """Record that replies to these messages, by their ids, are late."""
        for message_id, message in messages.items():
            about = message.metadata
            expires = about.created_at + about.ttl
            debt = _OwedReply(about.dst_node_id, expires, until, wait)
            self._owed[message_id] = debt

    def _without_silent(self, messages: list[Message]) -> list[Message]:
        """Return the messages to nodes that are not paused."""
        kept: list[Message] = []
        left: list[Message] = []
        busy = self._busy()
        for message in messages:
            node, kind = message.metadata.dst_node_id, message.metadata.message_type
            alone = node in busy or self._is_silent(node, kind)
            (left if alone else kept).append(message)
        if not kept:
            # No other node can train.
            kept = [
                m
                for m in left
                if m.metadata.message_type == MessageType.TRAIN
                and m.metadata.dst_node_id not in busy
            ]
        chosen = {m.metadata.dst_node_id for m in kept}
        nodes = {m.metadata.dst_node_id for m in left} - chosen
        if nodes:
            names = several(sorted(map(self.name_of, nodes)))
            log(INFO, "not asked, as answers are still to come: %s", names)
        return kept

    def _push(self, messages: list[Message]) -> dict[str, Message]:
        """Return the messages that could be sent, by their ids."""
        ids = list(self.grid.push_messages(messages))
        # Flower returns no id for a message that it could not send.
        current = {i: m for i, m in zip(ids, messages, strict=False) if i}
        if len(current) != len(messages):
            missing = len(messages) - len(current)
            log(WARNING, "%d messages were not sent", missing)
        return current


class Patience:
    """The waiting time of a round, the pauses between pulls, and log messages."""

    def __init__(self, timeout: float) -> None:
        self._began = time.monotonic()
        self._timeout = timeout
        self._next_word = FIRST_WORD

    def is_over(self) -> bool:
        """Return whether the waiting time is over."""
        return time.monotonic() >= self._began + self._timeout

    def wait(self, missing: Iterable[str]) -> None:
        """Wait until the next pull; log missing nodes at growing intervals."""
        waited = time.monotonic() - self._began
        if waited >= self._next_word:
            self._next_word *= 2
            log(INFO, "for %.0f s waiting for %s", waited, several(sorted(missing)))
        pause = min(max(PULL_INTERVAL, waited * LATENESS), LONGEST_INTERVAL)
        time.sleep(max(0.0, min(pause, self._timeout - waited)))
