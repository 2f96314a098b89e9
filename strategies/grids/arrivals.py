"""Grids that close a round when the first n clients have answered.

Decorators of Flower's Grid: whatever strategy sends the messages, differential-privacy
wrappers and Flower's own FedAvg included, gets the first n replies.
"""

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from logging import INFO, WARNING
from typing import Any

from flwr.app import Message, MessageType
from flwr.common import log
from flwr.serverapp import Grid

from flwr_frl.strategies.grids.patient import GridDecorator, PatientGrid
from flwr_frl.strategies.server.checks import several

# Seconds between two looks for replies: the least, the share of the time waited so far
# by which one is seen too late, and the most. A SuperNode looks for messages every 3 s,
# so that less than the least would gain nothing; it cost the SuperLink half its work.
PULL_INTERVAL, LATENESS, LONGEST_INTERVAL = 0.3, 0.05, 3.0
# Of how many messages replies are looked for at a time: each is a request of its own.
LOOKED_AT = 100
# After so many seconds the log says who is waited for, and again after twice as many.
FIRST_WORD = 60.0


def with_retries(
    grid: Grid,
    name_of: Callable[[int], str] = str,
    longest: float = math.inf,
    largest_reply: Callable[[str], float] = lambda kind: math.inf,
) -> Grid:
    """Return a grid that nothing ends and nobody holds up; a simulation's as it is.

    ``name_of`` and ``longest`` are those of `RealArrivals`, ``largest_reply`` is that
    of `PatientGrid`.
    """
    if isinstance(grid, ArrivalGrid) or getattr(grid, "in_process", False):
        return grid
    return RealArrivals(PatientGrid(grid, largest_reply), name_of, longest)


class ArrivalGrid(GridDecorator):
    """A grid that forwards everything, and can wait for n replies only.

    Parameters
    ----------
    grid : Grid
        The grid that does the work.
    """

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self._wanted: int | None = None
        self._is_valid: Callable[[Message], bool] = lambda reply: True

    def wait_for(
        self, count: int, is_valid: Callable[[Message], bool] | None = None
    ) -> None:
        """Close the next `send_and_receive` after so many valid replies, or all.

        ``is_valid`` says whether a reply without error counts; all do by default.
        """
        self._wanted = count
        self._is_valid = is_valid or (lambda reply: True)

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
        """Return the first ``wanted`` valid replies (None: all) and the errors before.

        ``timeout``, in seconds, closes the round with what has come.
        """


@dataclass
class _OwedReply:
    """A message whose reply has not come.

    Parameters
    ----------
    node : int
        Who owes it.
    expires : float
        When its time to live is over, by `time.time`.
    until : float
        How long it keeps its node from being asked again, by `time.monotonic`.
    wait : float
        Seconds for which its reply could be waited for.
    """

    node: int
    expires: float
    until: float
    wait: float


@dataclass
class _Silence:
    """How often in a row a node has not answered, since when it is left alone.

    Its pause is a multiple of the seconds for which it was waited for the last time.
    """

    times: int
    since: float
    wait: float

    def lasts(self, doublings: int) -> bool:
        """Return whether less than 2^doublings − 1 times that wait has passed since."""
        pause: float = (2.0**doublings - 1) * self.wait
        return time.monotonic() < self.since + pause


class RealArrivals(ArrivalGrid):
    """The first replies are those that arrive first; nobody holds up the others.

    A node that was not waited for is not there (`get_node_ids`) until it has answered;
    it is silent if it takes longer than a round may. Of a silent node nobody waits for
    twice in a round: after the k-th time in a row it is not asked to train for another
    2^(k−1) − 1 rounds' time, or anything else for 2^k − 1. It is back as soon as its
    reply comes. Late replies are pulled and dropped, so that nothing piles up in the
    SuperLink.

    Parameters
    ----------
    grid : Grid
        Flower's grid.
    name_of : callable, default str
        What a node is called in the log.
    longest : float, default inf
        Seconds that no wait takes longer than: ``round-timeout``.
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
        # Those of `get_node_ids` and the others that were connected then.
        self.connected: frozenset[int] = frozenset()

    @property
    def silent(self) -> list[str]:
        """Names of the nodes that have not answered when they were waited for."""
        return sorted(map(self.name_of, self._silent))

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes that are not left alone; all, where that is nobody."""
        self.drain()
        nodes = list(self.grid.get_node_ids())
        self.connected = frozenset(nodes)
        # Who has left for good, or has come back under another id, says nothing more.
        heard_of = self.connected | {debt.node for debt in self._owed.values()}
        self._silent = {n: s for n, s in self._silent.items() if n in heard_of}
        busy, train = self._busy(), MessageType.TRAIN
        free = [n for n in nodes if n not in busy and not self._is_silent(n, train)]
        return free or [node for node in nodes if node not in busy]

    def _busy(self) -> set[int]:
        now = time.monotonic()
        return {debt.node for debt in self._owed.values() if debt.until > now}

    def _is_silent(self, node: int, kind: str) -> bool:
        """Return whether a node is not to be asked yet, as it did not answer."""
        silence = self._silent.get(node)
        if silence is None:
            return False
        doublings = silence.times - (1 if kind == MessageType.TRAIN else 0)
        return silence.lasts(doublings)

    def silent_for(self, kind: str) -> frozenset[int]:
        """Return the silent nodes to which no message of a kind is sent now."""
        return frozenset(n for n in self._silent if self._is_silent(n, kind))

    def forgive(self) -> None:
        """Ask silent nodes again; the next time they are left alone for longer."""
        for silence in self._silent.values():
            silence.since = -math.inf

    def drain(self) -> None:
        """Drop the late replies that have come, and forget what has expired.

        Of very many only as long as each look finds some.
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
                # An error can be the SuperLink's word that it is gone.
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
        """Return what has come to those messages that were looked at longest ago."""
        ids = list(islice(waiting, most))
        for message_id in ids:
            # The last one now.
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
        """Push the messages and pull until enough valid replies are in.

        If fewer than ``wanted`` can still come, the round closes with those, which the
        log says.
        """
        self.drain()
        messages = self._without_silent(messages)
        # What must be in a reply to training need not be in one to anything else.
        everybody = wanted is None
        wanted = len(messages) if wanted is None else min(wanted, len(messages))
        wait = self.longest if timeout is None else min(timeout, self.longest)
        current = self._push(messages) if messages else {}
        first, wanted = wanted < len(current), min(wanted, len(current))
        replies: list[Message] = []
        valid = 0
        patience = _Patience(wait)
        while current and valid < wanted:
            # Where the first count, and before the round closes, all are looked at.
            over = patience.is_over()
            most = len(current) if over or first else LOOKED_AT
            # At one look, what was created first is taken to have arrived first.
            arrived = sorted(
                self._look(current, most),
                key=lambda r: (r.metadata.created_at, r.metadata.src_node_id),
            )
            for reply in arrived:
                # Not what answers nothing, or comes twice.
                message = current.pop(reply.metadata.reply_to_message_id, None)
                if message is None:
                    continue
                self._silent.pop(message.metadata.dst_node_id, None)
                fine = not reply.has_error() and self._is_valid(reply)
                counts = everybody or fine
                if valid < wanted or not counts:
                    replies.append(reply)
                    valid += counts
                else:
                    self.dropped += 1
            if over:
                break
            # Where some have answered of very many, others have as well by now.
            on = arrived and len(current) > most
            if current and valid < wanted and not on:
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
        for message_id, message in current.items():
            about = message.metadata
            expires = about.created_at + about.ttl
            debt = _OwedReply(about.dst_node_id, expires, busy_until, wait)
            self._owed[message_id] = debt
        return replies

    def _without_silent(self, messages: list[Message]) -> list[Message]:
        """Return the messages to the nodes that are not left alone."""
        kept: list[Message] = []
        left: list[Message] = []
        busy = self._busy()
        for message in messages:
            node, kind = message.metadata.dst_node_id, message.metadata.message_type
            alone = node in busy or self._is_silent(node, kind)
            (left if alone else kept).append(message)
        if not kept:
            # There is nobody else to train with.
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
        # Flower gives no id for a message that it could not send.
        current = {i: m for i, m in zip(ids, messages, strict=False) if i}
        if len(current) != len(messages):
            missing = len(messages) - len(current)
            log(WARNING, "%d messages were not sent", missing)
        return current


class _Patience:
    """How long replies are waited for, how often they are looked for, what is said."""

    def __init__(self, timeout: float) -> None:
        self._began = time.monotonic()
        self._timeout = timeout
        self._next_word = FIRST_WORD

    def is_over(self) -> bool:
        return time.monotonic() >= self._began + self._timeout

    def wait(self, missing: Iterable[str]) -> None:
        """Wait until it is time to look again; say now and then who is missing."""
        waited = time.monotonic() - self._began
        if waited >= self._next_word:
            self._next_word *= 2
            log(INFO, "for %.0f s waiting for %s", waited, several(sorted(missing)))
        pause = min(max(PULL_INTERVAL, waited * LATENESS), LONGEST_INTERVAL)
        time.sleep(max(0.0, min(pause, self._timeout - waited)))
