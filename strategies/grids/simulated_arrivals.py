"""A grid whose speed model determines the order of replies and the simulated time."""

from collections.abc import Callable
from typing import cast

import numpy as np
from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from flwr_frl.strategies.grids.arrivals import ArrivalGrid
from flwr_frl.strategies.grids.speeds import SpeedModel


def _round_of(message: Message) -> int:
    config = next(iter(message.content.config_records.values()))
    return int(cast(int, config["server-round"]))


class SimulatedArrivals(ArrivalGrid):
    """Close rounds at the replies of the fastest clients by a speed model.

    Slower clients are not asked at all. A clock adds up the times of the rounds. A
    round takes as long as its slowest used client, plus the communication time.

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

    def first_replies(
        self, messages: list[Message], wanted: int | None, timeout: float | None
    ) -> list[Message]:
        """Send training messages to the fastest clients only, and advance the clock.

        An invalid reply is replaced by that of the next client. Other messages are sent
        to all clients and take no time.
        """
        if not messages or messages[0].metadata.message_type != MessageType.TRAIN:
            return list(self.grid.send_and_receive(messages, timeout=timeout))
        times = self.speeds.times(_round_of(messages[0]))

        def time_of(message: Message) -> float:
            return float(times[self.position_of(message.metadata.dst_node_id)])

        def order(message: Message) -> tuple[bool, float, int]:
            node = message.metadata.dst_node_id
            required = node in self._required
            return not required, time_of(message), self.position_of(node)

        left, last = sorted(messages, key=order), 0.0
        count_all = wanted is None
        missing = len(left) if wanted is None else wanted
        replies: list[Message] = []
        while left and missing > 0:
            weights = [self.total_weight([message], count_all) for message in left]
            reached = np.flatnonzero(np.cumsum(weights) >= missing)
            count = int(reached[0]) + 1 if len(reached) else len(left)
            asked, left = left[:count], left[count:]
            last = max(last, *map(time_of, asked))
            # Restore the strategy's order.
            chosen = {message.metadata.dst_node_id for message in asked}
            batch = [m for m in messages if m.metadata.dst_node_id in chosen]
            came = list(self.grid.send_and_receive(batch, timeout=timeout))
            replies += came
            fine = {
                r.metadata.src_node_id
                for r in came
                if not r.has_error() and self._is_valid(r)
            }
            missing -= self.total_weight(
                (m for m in batch if m.metadata.dst_node_id in fine), count_all
            )
        self.seconds += last + self.communication_time
        return replies
