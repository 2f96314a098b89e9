"""Grids that close a round when the first n clients have answered.

Decorators of Flower's Grid: whatever strategy sends the messages, differential-privacy
wrappers and Flower's own FedAvg included, gets the first n replies.
"""

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from logging import INFO, WARNING
from typing import cast

from flwr.app import Message, MessageType, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from strategies.grids.speeds import SpeedModel

PULL_INTERVAL = 0.1


class ArrivalGrid(Grid):
    """A grid that forwards everything, and can wait for n replies only.

    Parameters
    ----------
    grid : Grid
        The grid that does the work.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
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

    # The rest of Flower's interface goes to the inner grid.

    def set_run(self, run: Run) -> None:  # noqa: D102
        self.grid.set_run(run)

    @property
    def run(self) -> Run:  # noqa: D102
        return self.grid.run

    def create_message(  # noqa: D102
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return self.grid.create_message(
            content, message_type, dst_node_id, group_id, ttl
        )

    def get_node_ids(self) -> Iterable[int]:  # noqa: D102
        return self.grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:  # noqa: D102
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:  # noqa: D102
        return self.grid.pull_messages(message_ids)


def _round_of(message: Message) -> int:
    config = next(iter(message.content.config_records.values()))
    return int(cast(int, config["server-round"]))


class RealArrivals(ArrivalGrid):
    """The first replies are those that arrive first.

    A node that still owes a reply is not there (`get_node_ids`) until it has answered
    or its message's time to live has run out. Late replies are pulled and dropped, so
    that nothing piles up in the SuperLink.

    Parameters
    ----------
    grid : Grid
        Flower's grid.
    """

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        # Message id to node and time at which the message expires.
        self._owed: dict[str, tuple[int, float]] = {}
        self.dropped = 0

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes that owe no reply."""
        self.drain()
        busy = {node for node, _ in self._owed.values()}
        return [node for node in self.grid.get_node_ids() if node not in busy]

    def drain(self) -> None:
        """Drop the late replies that have come, and forget what has expired."""
        if not self._owed:
            return
        for reply in self.grid.pull_messages(list(self._owed)):
            self._owed.pop(reply.metadata.reply_to_message_id, None)
            self.dropped += 1
            log(INFO, "late reply of node %d dropped", reply.metadata.src_node_id)
        now = time.time()
        self._owed = {i: owed for i, owed in self._owed.items() if owed[1] > now}

    def first_replies(
        self, messages: list[Message], wanted: int | None, timeout: float | None
    ) -> list[Message]:
        """Push the messages and pull until enough valid replies are in.

        If fewer than ``wanted`` can still come, the round closes with those, which the
        log says.
        """
        self.drain()
        busy = {node for node, _ in self._owed.values()}
        messages = [m for m in messages if m.metadata.dst_node_id not in busy]
        # What must be in a reply to training need not be in one to anything else.
        everybody = wanted is None
        wanted = len(messages) if wanted is None else min(wanted, len(messages))
        deadline = None if timeout is None else time.monotonic() + timeout
        ids = list(self.grid.push_messages(messages))
        if len(ids) != len(messages) or not all(ids):
            log(
                WARNING,
                "%d messages were not sent",
                len(messages) - sum(map(bool, ids)),
            )
        # Flower gives no id for a message that it could not send.
        current = {
            message_id: message
            for message_id, message in zip(ids, messages, strict=False)
            if message_id
        }
        wanted = min(wanted, len(current))
        replies: list[Message] = []
        valid = 0
        while current and valid < wanted:
            # In one pull, what was created first is taken to have arrived first.
            arrived = sorted(
                self.grid.pull_messages(list(current)),
                key=lambda r: (r.metadata.created_at, r.metadata.src_node_id),
            )
            for reply in arrived:
                del current[reply.metadata.reply_to_message_id]
                fine = not reply.has_error() and self._is_valid(reply)
                counts = everybody or fine
                if valid < wanted or not counts:
                    replies.append(reply)
                    valid += counts
                else:
                    self.dropped += 1
            if deadline is not None and time.monotonic() >= deadline:
                break
            if current and valid < wanted:
                self.drain()
                time.sleep(PULL_INTERVAL)
        for message_id, message in current.items():
            expires = message.metadata.created_at + message.metadata.ttl
            self._owed[message_id] = (message.metadata.dst_node_id, expires)
        if valid < wanted:
            log(WARNING, "the round closes with %d of %d replies", valid, wanted)
        return replies


class SimulatedArrivals(ArrivalGrid):
    """The first replies are those of the fastest clients by a speed model.

    Clients that would not be among them are not even asked. A clock counts the rounds'
    times: the slowest used client plus the communication.

    Parameters
    ----------
    grid : Grid
        The simulation's grid.
    speeds : SpeedModel
        Who is how fast.
    communication_time : float
        Time that a round takes besides, in the unit of the speeds.
    position_of : callable
        A node's position in the order of the clients' names.
    seconds : float, default 0
        Where the clock starts.
    """

    def __init__(
        self,
        grid: Grid,
        speeds: SpeedModel,
        communication_time: float,
        position_of: Callable[[int], int],
        seconds: float = 0.0,
    ) -> None:
        super().__init__(grid)
        self.speeds = speeds
        self.communication_time = communication_time
        self.position_of = position_of
        self.seconds = seconds

    def first_replies(
        self, messages: list[Message], wanted: int | None, timeout: float | None
    ) -> list[Message]:
        """Send training messages only to the fastest clients, and move the clock.

        Other messages go to all and cost no time.
        """
        if messages and messages[0].metadata.message_type == MessageType.TRAIN:
            times = self.speeds.times(_round_of(messages[0]))

            def arrival(message: Message) -> tuple[float, int]:
                position = self.position_of(message.metadata.dst_node_id)
                return float(times[position]), position

            used = sorted(messages, key=arrival)[:wanted]
            self.seconds += arrival(used[-1])[0] + self.communication_time
            # Back in the order in which the strategy sent them.
            chosen = {message.metadata.dst_node_id for message in used}
            messages = [m for m in messages if m.metadata.dst_node_id in chosen]
        return list(self.grid.send_and_receive(messages, timeout=timeout))
