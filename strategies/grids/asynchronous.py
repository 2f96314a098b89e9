"""Grids for asynchronous rounds: clients may work over several versions of the model.

After `wait_for`, a call of `send_and_receive` closes a version: it returns as soon as
enough changes have arrived, whichever versions they started from. The other clients'
replies belong to later calls.
"""

import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from logging import WARNING
from typing import Protocol

from flwr.app import Message
from flwr.common import log
from flwr.serverapp import Grid

from flwr_frl.strategies.grids.arrivals import (
    LOOKED_AT,
    ArrivalGrid,
    Patience,
    RealArrivals,
)
from flwr_frl.strategies.grids.simulated_arrivals import SimulatedArrivals


class Work(Protocol):
    """The interface by which a grid reads and records which clients are at work."""

    version: int
    last_version: int

    def due(self) -> dict[int, float]:
        """Return the nodes at work, and when their replies are due."""

    def begin(self, messages: Iterable[Message], due: Callable[[int], float]) -> None:
        """Record that the nodes of these messages begin to work."""

    def end(self, node: int) -> bool:
        """Record that a node is done; return whether its change is recent enough."""

    def give_up(self, node: int) -> None:
        """Record that a node's reply is no longer awaited."""

    def drop(self, reply: Message) -> None:
        """Count a reply whose change is too old."""

    def refill(self) -> list[Message]:
        """Return training messages of the current version for idle clients."""

    def message(self, node: int) -> Message:
        """Rebuild the message that a node was sent."""


class SimulatedWork(ArrivalGrid):
    """Deliver replies in the order of a speed model's times.

    A client that receives a message at time t delivers its reply at t plus its
    computation and the communication time, and another client begins at once. Clients
    train when their reply is delivered, on the version that they were sent, so the
    replies of a version are computed together, and a checkpoint holds no reply. Clients
    whose replies are due at the same time are served in the order of their names.

    Parameters
    ----------
    clock : SimulatedArrivals
        The simulation's grid, with the speed model and the time.
    work : Work
        Which clients are at work.
    """

    def __init__(self, clock: SimulatedArrivals, work: Work) -> None:
        super().__init__(clock)
        self.clock, self.work = clock, work
        # Messages of clients at work, by node. Those sent before a resume are missing.
        self._sent: dict[int, Message] = {}

    def first_replies(
        self, messages: list[Message], wanted: int | None, timeout: float | None
    ) -> list[Message]:
        """Advance the clock until the wanted number of replies has been delivered."""
        clock, work = self.clock, self.work
        if wanted is None:
            return list(clock.grid.send_and_receive(messages, timeout=timeout))
        times = clock.speeds.times(work.version)

        def due(node: int) -> float:
            computing = float(times[clock.position_of(node)])
            return clock.seconds + computing + clock.communication_time

        self._begin(messages, due)
        queue = [(at, clock.position_of(n), n) for n, at in work.due().items()]
        heapq.heapify(queue)

        def refill() -> None:
            more = work.refill()
            self._begin(more, due)
            for message in more:
                node = message.metadata.dst_node_id
                heapq.heappush(queue, (due(node), clock.position_of(node), node))

        replies: list[Message] = []
        missing = wanted
        while missing > 0 and queue:
            # Whether each node's change is recent enough, and how many are.
            delivered: dict[int, bool] = {}
            recent = 0
            while recent < missing and queue:
                at, _, node = heapq.heappop(queue)
                clock.seconds = max(clock.seconds, at)
                delivered[node] = work.end(node)
                recent += delivered[node]
                if (queue and queue[0][0] == at) or recent == missing:
                    continue
                refill()
            batch = [self._message(node) for node in sorted(delivered)]
            for reply in clock.grid.send_and_receive(batch, timeout=timeout):
                if not delivered[reply.metadata.src_node_id]:
                    work.drop(reply)
                    continue
                replies.append(reply)
                missing -= not reply.has_error() and self._is_valid(reply)
            if missing > 0:
                # Clients with an invalid reply are replaced as well.
                refill()
        return replies

    def _begin(self, messages: list[Message], due: Callable[[int], float]) -> None:
        self.work.begin(messages, due)
        self._sent |= {m.metadata.dst_node_id: m for m in messages}

    def _message(self, node: int) -> Message:
        """Return a client's message, rebuilt if it has used half its time to live."""
        sent = self._sent.pop(node, None)
        if sent is not None:
            about = sent.metadata
            if time.time() - about.created_at < about.ttl / 2:
                return sent
        return self.work.message(node)


class RealWork(RealArrivals):
    """Push messages and pull replies as they arrive, over real nodes.

    A node that does not answer within ``longest`` seconds is silent, as in
    `RealArrivals`: another client is asked, and the silent one in a later version at
    the earliest. Nodes at work are not sent evaluations, so the last version waits for
    them once its changes have arrived.

    Parameters
    ----------
    grid : RealArrivals
        The grid whose nodes and pauses are used.
    work : Work
        Which clients are at work.
    """

    def __init__(self, grid: RealArrivals, work: Work) -> None:
        super().__init__(grid.grid, grid.name_of, grid.longest)
        self.work = work
        self._owed, self._silent = grid._owed, grid._silent
        # Messages at work and when they were sent, by message id.
        self._sent: dict[str, tuple[Message, float]] = {}
        # Replies that have arrived, with the nodes that were asked. Replies that a
        # version does not need belong to the next one.
        self._ready: deque[tuple[Message, int]] = deque()

    @property
    def at_work(self) -> frozenset[int]:
        """The nodes that are training."""
        messages = (message for message, _ in self._sent.values())
        return frozenset(message.metadata.dst_node_id for message in messages)

    def first_replies(
        self, messages: list[Message], wanted: int | None, timeout: float | None
    ) -> list[Message]:
        """Pull until the wanted number of valid and recent replies has arrived."""
        if wanted is None:
            return super().first_replies(messages, wanted, timeout)
        self._send(messages)
        replies: list[Message] = []
        taken = 0
        wait = self.longest if timeout is None else min(timeout, self.longest)
        # A version with silent clients takes longer than ``wait``.
        patience = Patience(math.inf)
        while taken < wanted and (self._ready or self._sent):
            if not self._ready:
                self._pull(patience, wait)
            while self._ready and taken < wanted:
                reply, node = self._ready.popleft()
                if not self.work.end(node):
                    self.work.drop(reply)
                    continue
                replies.append(reply)
                taken += not reply.has_error() and self._is_valid(reply)
            if taken < wanted:
                self._send(self.work.refill())
        if taken < wanted:
            log(WARNING, "the version closes with %d of %d changes", taken, wanted)
        if self.work.version == self.work.last_version:
            while self._sent:
                self._pull(patience, wait)
        return replies

    def _send(self, messages: list[Message]) -> None:
        if not messages:
            return
        sent = self._push(messages)
        self.work.begin(sent.values(), lambda node: 0.0)
        now = time.monotonic()
        self._sent |= {i: (message, now) for i, message in sent.items()}

    def _pull(self, patience: Patience, wait: float) -> None:
        """Store the replies that have arrived; pause if there are none."""
        now = time.monotonic()
        over = any(now - sent > wait for _, sent in self._sent.values())
        # Check all messages before any client is given up.
        arrived = self._arrived(len(self._sent) if over else LOOKED_AT)
        self._ready.extend(arrived)
        self._give_up_silent(wait, now)
        if not arrived:
            self.drain()
            patience.wait(map(self.name_of, self.at_work))

    def _arrived(self, count: int) -> list[tuple[Message, int]]:
        """Return replies to the messages checked longest ago, and the nodes asked."""
        ids = list(islice(self._sent, count))
        for i in ids:
            self._sent[i] = self._sent.pop(i)
        arrived = []
        for reply in self.grid.pull_messages(ids):
            # Skip repeated replies.
            if asked := self._sent.pop(reply.metadata.reply_to_message_id, None):
                node = asked[0].metadata.dst_node_id
                self._silent.pop(node, None)
                arrived.append((reply, node))
        return sorted(arrived, key=lambda pair: (pair[0].metadata.created_at, pair[1]))

    def _give_up_silent(self, wait: float, now: float) -> None:
        """Treat clients that have not answered in time as silent."""
        late = {i: m for i, (m, sent) in self._sent.items() if now - sent > wait}
        for i, message in late.items():
            del self._sent[i]
            self.work.give_up(message.metadata.dst_node_id)
        self._owe(late, 0.0, wait)
        self._note_silence([m.metadata.dst_node_id for m in late.values()], wait)


def asynchronous_grid(grid: Grid, work: Work) -> ArrivalGrid | None:
    """Return a grid for asynchronous rounds; None in one process without speeds."""
    if isinstance(grid, SimulatedArrivals):
        return SimulatedWork(grid, work)
    return RealWork(grid, work) if isinstance(grid, RealArrivals) else None
