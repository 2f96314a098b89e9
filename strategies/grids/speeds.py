"""Speed models: the computation time of each simulated client in a round.

SRPFL, section 5 and appendix C. A grid delivers replies in the order of these times.
"""

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import numpy as np
import numpy.typing as npt
from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from flwr_frl.common.settings import (
    Checked,
    Settings,
    SettingsError,
    build,
    setting,
    unknown,
)
from flwr_frl.strategies.grids.closing import Closing, GridDecorator

Times = npt.NDArray[np.float64]

MODELS = ("fixed", "dynamic", "groups", "correlated")
FAST_MEAN, STRAGGLER_MEAN = 0.1, 10.0
# Number of draws from which expected arrival times are estimated.
DRAWS = 1000


class SpeedModel:
    """Computation times of M clients, in the order of their names.

    Parameters
    ----------
    name : str
        As `SpeedSettings.speed_model`.
    num_clients : int
        Number of clients M.
    seed, straggler_fraction, redraw
        As in `SpeedSettings`.

    Raises
    ------
    SettingsError
        If the model or file is unknown, or the file has a negative time or too few.
    """

    def __init__(
        self,
        name: str,
        num_clients: int,
        seed: int = 0,
        straggler_fraction: float = 0.1,
        redraw: bool = False,
    ) -> None:
        self.name, self.num_clients, self.seed = name, num_clients, seed
        self.redraw = redraw
        self.num_stragglers = round(straggler_fraction * num_clients)
        self._listed: Times | None = None
        if name not in MODELS:
            if not Path(name).is_file():
                known = ("none", *MODELS)
                raise unknown("speed-model", name, known, others="the path of a file")
            self._listed = read_times(Path(name), num_clients)

    def times(self, server_round: int) -> Times:
        """Return each client's time in a round (from 1), in the model's unit."""
        if self._listed is not None:
            return self._listed
        n = self.num_clients
        once = np.random.default_rng([self.seed, 0x59EED])
        each = np.random.default_rng([self.seed, 0x59EED, server_round])
        if self.name == "dynamic":
            return each.exponential(1 / once.uniform(1 / n, 1.0, n))
        if self.name == "groups":
            means = np.full(n, FAST_MEAN)
            means[n - self.num_stragglers :] = STRAGGLER_MEAN
            return (each if self.redraw else once).exponential(means)
        times = once.exponential(1.0, n)
        return np.sort(times) if self.name == "correlated" else times

    def expected_arrivals(self, sampled: int) -> Times:
        """Return E[T_(n)], when the n-th of N sampled clients is done, for n = 1 … N.

        Estimated by the mean over 1,000 rounds.
        """
        rng = np.random.default_rng([self.seed, 0xA221])
        total = np.zeros(sampled)
        for server_round in range(1, DRAWS + 1):
            chosen = rng.choice(self.num_clients, sampled, replace=False)
            total += np.sort(self.times(server_round)[chosen])
        return total / DRAWS


def read_times(path: Path, num_clients: int) -> Times:
    """Read a time for each client, one number per line; further lines are ignored.

    Raises `SettingsError` if a line is not a number, a time is negative or not finite,
    or there are too few.
    """
    try:
        lines = path.read_text(encoding="utf-8").split()[:num_clients]
        times = np.array([float(line) for line in lines])
        wrong = [line for line in lines if not 0 <= float(line) < math.inf]
    # Undecodable bytes are a ValueError as well.
    except (OSError, ValueError) as error:
        times, wrong = np.zeros(0), [str(error)]
    if wrong or len(times) < num_clients:
        reason = wrong[0] if wrong else f"there are {len(times)}"
        raise SettingsError(
            f"speed-model {str(path)!r}: {reason}; expected a finite number of at "
            f"least 0 a line, for each of {num_clients} clients",
            "speed-model",
        )
    return times


NO_SPEEDS = {"speed-model": ("none",)}


@dataclass(frozen=True)
class SpeedSettings(Checked):
    """Speeds of simulated clients (SRPFL, section 5 and appendix C).

    Parameters
    ----------
    speed_model : str, default "none"
        ``none``: no simulated speeds. ``fixed``: T_i ~ Exp(1), drawn once.
        ``dynamic``: λ_i ~ U[1/M, 1] drawn once, T_i ~ Exp(λ_i) in every round.
        ``groups``: T_i ~ Exp with mean 0.1, or mean 10 for the stragglers, who are the
        last clients, drawn once. ``correlated``: as ``fixed``, but sorted, so that with
        the partition ``class-groups`` speed and labels go together. Or the path of a
        file with one time per line, for each client.
    straggler_fraction : float, default 0.1
        Share of stragglers in ``groups``.
    redraw_speeds : bool, default False
        True if ``groups`` draws new times in every round instead of once.
    communication_time : float, default 0
        Additional time of each round, in the unit of the speeds.
    seed : int, default 0
        Fixes all times.
    """

    speed_model: str = setting(
        "none", form="none, fixed, dynamic, groups, correlated or a file"
    )
    straggler_fraction: float = setting(0.1, ge=0, le=1, unused_if=NO_SPEEDS)
    redraw_speeds: bool = setting(False, unused_if=NO_SPEEDS)
    communication_time: float = setting(0.0, ge=0, unused_if=NO_SPEEDS)
    seed: int = setting(0, ge=0)


def speed_model(settings: Settings, num_clients: int) -> SpeedModel | None:
    """Return the speed model of the settings (`SpeedSettings`); None for ``none``."""
    speeds = build(SpeedSettings, settings)
    if speeds.speed_model == "none":
        return None
    details = speeds.seed, speeds.straggler_fraction, speeds.redraw_speeds
    return SpeedModel(speeds.speed_model, num_clients, *details)


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
