"""A grid on which a speed model says whose replies come first, and what time it is."""

from collections.abc import Callable
from typing import cast

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from flwr_frl.strategies.grids.arrivals import ArrivalGrid
from flwr_frl.strategies.grids.speeds import SpeedModel


def _round_of(message: Message) -> int:
    config = next(iter(message.content.config_records.values()))
    return int(cast(int, config["server-round"]))


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

        In the place of a reply that does not count comes the next one. Other messages
        go to all and cost no time.
        """
        if not messages or messages[0].metadata.message_type != MessageType.TRAIN:
            return list(self.grid.send_and_receive(messages, timeout=timeout))
        times = self.speeds.times(_round_of(messages[0]))

        def arrival(message: Message) -> tuple[float, int]:
            position = self.position_of(message.metadata.dst_node_id)
            return float(times[position]), position

        left, last = sorted(messages, key=arrival), 0.0
        missing = len(left) if wanted is None else wanted
        replies: list[Message] = []
        while left and missing > 0:
            asked, left = left[:missing], left[missing:]
            last = arrival(asked[-1])[0]
            # Back in the order in which the strategy sent them.
            chosen = {message.metadata.dst_node_id for message in asked}
            batch = [m for m in messages if m.metadata.dst_node_id in chosen]
            came = list(self.grid.send_and_receive(batch, timeout=timeout))
            replies += came
            missing -= sum(not r.has_error() and self._is_valid(r) for r in came)
        self.seconds += last + self.communication_time
        return replies
