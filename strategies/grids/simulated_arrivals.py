"""A grid whose speed model determines the order of replies and the simulated time."""

import heapq
import time
from collections.abc import Callable, Iterable
from typing import cast

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from flwr_frl.common.messages import SERVER_ROUND
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
        messages = list(messages)
        closing, self._closing = self._closing, None
        if closing is None:
            if not messages or messages[0].metadata.message_type != MessageType.TRAIN:
                return self.grid.send_and_receive(messages, timeout=timeout)
            closing = Closing()
        server_round = closing.round or _round_of(messages[0])
        times = self.speeds.times(server_round) + self.communication_time

        def begin(messages: list[Message]) -> None:
            began = self.seconds
            closing.begin(
                messages, lambda node: began + float(times[self.position_of(node)])
            )

        def entry(node: int) -> tuple[bool, float, int, int]:
            due = closing.at_work[node][1]
            return node not in closing.required, due, self.position_of(node), node

        begin(messages)
        queue = sorted(map(entry, closing.at_work))

        def refill() -> None:
            begin(more := closing.refill())
            for message in more:
                heapq.heappush(queue, entry(message.metadata.dst_node_id))

        replies: list[Message] = []
        while closing.missing > 0 and queue:
            batch: list[tuple[int, Message]] = []
            weights: dict[int, int] = {}
            expected = 0
            while expected < closing.missing and queue:
                _, at, position, node = heapq.heappop(queue)
                self.seconds = max(self.seconds, at)
                batch.append((position, closing.at_work[node][0]))
                weights[node] = closing.end(node)
                expected += weights[node]
                if expected < closing.missing and not (queue and queue[0][1] == at):
                    refill()
            asked = [message for _, message in sorted(batch, key=lambda pair: pair[0])]
            for message in asked:
                # Its time to live begins when its node trains.
                message.metadata.created_at = time.time()
            for reply in self.grid.send_and_receive(asked, timeout=timeout):
                if closing.take(reply, weights[reply.metadata.src_node_id]):
                    replies.append(reply)
            if closing.missing > 0:
                # Clients with an invalid reply are replaced as well.
                refill()
        return replies


def _round_of(message: Message) -> int:
    config = next(iter(message.content.config_records.values()))
    return int(cast(int, config[SERVER_ROUND]))
