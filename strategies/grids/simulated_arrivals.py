"""A grid whose speed model determines the order of replies and the simulated time."""

import heapq
from collections.abc import Callable, Iterable
from operator import itemgetter

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from flwr_frl.strategies.grids.closing import Closing, GridDecorator
from flwr_frl.strategies.grids.speeds import SpeedModel


class SimulatedArrivals(GridDecorator):
    """Deliver the replies of training in the order of a speed model's times.

    A node that is sent a message at time t replies at t plus its computation and the
    communication time. It trains when its reply is delivered, so nodes whose replies a
    round does not wait for do not train at all, and the others train together. Nodes
    whose replies are due at the same time are served in the order of their positions.
    Other messages take no time.

    Parameters
    ----------
    grid : Grid
        The simulation's grid.
    speeds : SpeedModel
        Computation time of each client.
    communication_time : float
        Additional time of a round, in the unit of the speeds.
    position_of : callable
        Returns a node's position in the order of the clients' names.
    seconds : float, default 0
        Initial time of the clock.
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
        self._closing: Closing | None = None

    def wait_for(self, closing: Closing) -> None:
        """Close the next `send_and_receive` by a policy; by default at all replies."""
        self._closing = closing

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Advance the clock until the replies that close the round are delivered."""
        messages, closing = list(messages), self._closing
        self._closing = None
        if closing is None:
            if not messages or messages[0].metadata.message_type != MessageType.TRAIN:
                return self.grid.send_and_receive(messages, timeout=timeout)
            closing = Closing()
        # Nodes at work: required ones first, then by the times of their replies.
        queue: list[tuple[bool, float, int, int]] = []

        def entry(node: int) -> tuple[bool, float, int, int]:
            due = closing.at_work[node][1]
            return node not in closing.required, due, self.position_of(node), node

        def start(messages: list[Message]) -> None:
            if messages:
                times = self.speeds.times(int(messages[0].metadata.group_id))
                due = times + self.communication_time + self.seconds
            for message in messages:
                node = message.metadata.dst_node_id
                closing.begin(message, float(due[self.position_of(node)]))
                heapq.heappush(queue, entry(node))

        for node in closing.at_work:
            heapq.heappush(queue, entry(node))
        start(messages)
        replies: list[Message] = []
        while closing.missing > 0 and queue:
            # Clients whose replies can close the round train together.
            batch: list[tuple[int, Message]] = []
            weights: dict[int, int] = {}
            expected = 0
            while expected < closing.missing and queue:
                _, due, position, node = heapq.heappop(queue)
                self.seconds = max(self.seconds, due)
                batch.append((position, closing.at_work[node][0]))
                weights[node] = closing.end(node)
                expected += weights[node]
                if expected < closing.missing and not (queue and queue[0][1] == due):
                    start(closing.refill())
            asked = [message for _, message in sorted(batch, key=itemgetter(0))]
            for reply in self.grid.send_and_receive(asked, timeout=timeout):
                if closing.take(reply, weights[reply.metadata.src_node_id]):
                    replies.append(reply)
            if closing.missing > 0:
                # Clients with an invalid reply are replaced as well.
                start(closing.refill())
        return replies
