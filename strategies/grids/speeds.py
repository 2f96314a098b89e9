"""Speed models: the computation time of each simulated client in a round.

SRPFL, section 5 and appendix C. A grid delivers replies in the order of these times.
"""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from pathlib import Path

import numpy as np
import numpy.typing as npt
from flwr.app import Message, MessageType

from flwr_frl.common.errors import reading, require, unknown
from flwr_frl.common.settings import Checked, Settings, build, setting
from flwr_frl.strategies.grids.inbox import Closing, GridDecorator

Times = npt.NDArray[np.float64]

MODELS = ("fixed", "dynamic", "groups", "correlated")
FAST_MEAN, STRAGGLER_MEAN = 0.1, 10.0
# Number of draws from which expected arrival times are estimated.
DRAWS = 1000


NO_SPEEDS = {"speed-model": ("none",)}


@dataclass(frozen=True)
class SpeedModel(Checked):
    """Computation times of clients, in the order of their names.

    Parameters
    ----------
    speed_model : str, default "none"
        ``none``: no simulated speeds. ``fixed``: T_i ~ Exp(1), drawn once.
        ``dynamic``: λ_i ~ U[1/M, 1] drawn once, T_i ~ Exp(λ_i) in every round.
        ``groups``: T_i ~ Exp with mean 0.1, or mean 10 for the stragglers, who are the
        last clients, drawn once. ``correlated``: as ``fixed``, but sorted, so that with
        the partition ``class-groups`` speed and labels go together. Or the path of a
        file with one time per line, for each client; further lines are ignored.
    clients : int
        Number of clients M.
    straggler_fraction : float, default 0.1
        Share of stragglers in ``groups``.
    redraw_speeds : bool, default False
        True if ``groups`` draws new times in every round instead of once.
    communication_time : float, default 0
        Additional time of each round, in the unit of the speeds.
    seed : int, default 0
        Fixes all times.

    Raises
    ------
    SettingsError
        If the model or file is unknown, or the file has a negative time or too few.
    """

    speed_model: str = setting(
        "none", form="none, fixed, dynamic, groups, correlated or a file"
    )
    clients: int = 1
    straggler_fraction: float = setting(0.1, ge=0, le=1, unused_if=NO_SPEEDS)
    redraw_speeds: bool = setting(False, unused_if=NO_SPEEDS)
    communication_time: float = setting(0.0, ge=0, unused_if=NO_SPEEDS)
    seed: int = setting(0, ge=0)

    def __post_init__(self) -> None:
        """Read the file of a model that is one."""
        super().__post_init__()
        if self.speed_model not in ("none", *MODELS):
            _ = self._listed

    @cached_property
    def _listed(self) -> Times:
        """The times in the file that the model names, one number per line."""
        name, known, n = self.speed_model, ("none", *MODELS), self.clients
        if not Path(name).is_file():
            raise unknown("speed-model", name, known, others="the path of a file")
        allowed = f"a finite number of at least 0 a line, for each of {n} clients"
        with reading(Path(name), "speed-model", allowed):
            times = np.loadtxt(name, ndmin=1, encoding="utf-8").ravel()[:n]
        valid = len(times) == n and bool(((times >= 0) & (times < np.inf)).all())
        require(valid, "speed-model", name, f"a file with {allowed}")
        return times

    def times(self, server_round: int) -> Times:
        """Return each client's time in a round (from 1), in the model's unit."""
        name, n = self.speed_model, self.clients
        if name not in MODELS:
            return self._listed
        once = np.random.default_rng([self.seed, 0x59EED])
        each = np.random.default_rng([self.seed, 0x59EED, server_round])
        if name == "dynamic":
            return each.exponential(1 / once.uniform(1 / n, 1.0, n))
        if name == "groups":
            means = np.full(n, FAST_MEAN)
            means[n - round(self.straggler_fraction * n) :] = STRAGGLER_MEAN
            return (each if self.redraw_speeds else once).exponential(means)
        times = once.exponential(1.0, n)
        return np.sort(times) if name == "correlated" else times

    def expected_arrivals(self, sampled: int) -> Times:
        """Return E[T_(n)], when the n-th of N sampled clients is done, for n = 1 … N.

        Estimated by the mean over 1,000 rounds.
        """
        rng = np.random.default_rng([self.seed, 0xA221])
        total = np.zeros(sampled)
        for server_round in range(1, DRAWS + 1):
            chosen = rng.choice(self.clients, sampled, replace=False)
            total += np.sort(self.times(server_round)[chosen])
        return total / DRAWS


def speed_model(settings: Settings, clients: int) -> SpeedModel | None:
    """Return the speed model of the settings; None for ``none``."""
    model = build(SpeedModel, settings, clients=clients)
    return None if model.speed_model == "none" else model


@dataclass(eq=False, repr=False)
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
    position_of : callable
        Returns a node's position in the order of the clients' names.
    seconds : float, default 0
        Initial time of the clock.
    """

    speeds: SpeedModel
    position_of: Callable[[int], int]
    seconds: float = 0.0
    _closing: Closing | None = field(default=None, init=False)

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
        # Nodes at work by the times of their replies.
        at_work = closing.at_work.items()
        queue = [(due, self.position_of(node), node) for node, (_, due) in at_work]
        heapq.heapify(queue)

        def start(messages: list[Message]) -> None:
            if messages:
                times = self.speeds.times(int(messages[0].metadata.group_id))
                due = times + self.speeds.communication_time + self.seconds
            for message in messages:
                node = message.metadata.dst_node_id
                position = self.position_of(node)
                closing.begin(message, float(due[position]))
                heapq.heappush(queue, (float(due[position]), position, node))

        start(messages)
        replies: list[Message] = []
        while closing.missing > 0 and queue:
            # Clients whose replies can close the round train together.
            batch: list[tuple[int, Message]] = []
            while len(batch) < closing.missing and queue:
                due, position, node = heapq.heappop(queue)
                self.seconds = max(self.seconds, due)
                batch.append((position, closing.at_work[node][0]))
                closing.end(node)
                is_last = not queue or queue[0][0] > due
                if len(batch) < closing.missing and is_last:
                    start(closing.refill())
            asked = [message for _, message in sorted(batch, key=itemgetter(0))]
            for reply in self.grid.send_and_receive(asked, timeout=timeout):
                closing.take(reply)
                replies.append(reply)
            if closing.missing > 0:
                # Clients with an invalid reply are replaced as well.
                start(closing.refill())
        return replies
