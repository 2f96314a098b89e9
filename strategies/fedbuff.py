"""FedBuff (Nguyen et al., AISTATS 2022): asynchronous rounds with a buffer.

No client waits for another: C clients are at work at any time, and the server makes a
new version as soon as B changes have arrived, of whatever version they are. The base
algorithm, with its personal parts, is unchanged.
"""

from collections.abc import Callable, Iterable
from logging import INFO
from typing import Annotated, Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from flwr_frl.strategies.algorithms import build_strategy
from flwr_frl.strategies.base import BaseStrategy
from flwr_frl.strategies.grids.asynchronous import RealWork, asynchronous_grid
from flwr_frl.strategies.server.participation import Participation
from flwr_frl.strategies.server.replies import (
    Arrays,
    count_bytes,
    rounded_to,
    to_record,
)
from flwr_frl.strategies.traits import Algorithm
from flwr_frl.strategies.wrapping import Wrapping
from flwr_frl.task.messages import SERVER_ROUND
from flwr_frl.task.settings import (
    Free,
    Range,
    Settings,
    SettingsError,
    build,
    require,
    validate,
)

# Key of the clients at work in the state of the wrapped strategy.
ASYNCHRONOUS = "asynchronous"
# Ends of the names of batch-norm statistics, which must stay averages.
STATISTICS = ("running_mean", "running_var")


class Asynchronous(Participation):
    """Keep C clients at work, and make a version of every B changes.

    Its state, in the wrapped strategy's, has the clients at work with their versions,
    the arrays of these versions (each once), the number of changes of each client that
    counted, and how many changes had each staleness.

    Parameters
    ----------
    strategy : BaseStrategy
        The wrapped strategy.
    concurrency : int
        Number of clients C at work at any time.
    buffer_size : int
        Number of changes B that make a version.
    staleness_exponent : float
        a in the weight s(τ) = (1 + τ)^−a of a change that is τ versions old.
    max_staleness : int
        Largest τ of a change that counts; −1 sets no limit.
    step_size : float
        Factor of all weights: η_g, or α of FedAsync.
    from_sent : bool
        True if a change is the difference from the version that its client was sent;
        False if it is the difference from the current one.
    """

    def __init__(
        self,
        strategy: BaseStrategy,
        concurrency: int,
        buffer_size: int,
        staleness_exponent: float,
        max_staleness: int,
        step_size: float,
        from_sent: bool,
    ) -> None:
        base = strategy.participation
        super().__init__(base.fraction, base.least, base.seed, False)
        self.strategy = strategy
        self.concurrency, self.buffer_size = concurrency, buffer_size
        self.staleness_exponent, self.max_staleness = staleness_exponent, max_staleness
        self.step_size, self.from_sent = step_size, from_sent
        self.version = 0
        empty: dict[str, Any] = {
            "work": {},
            "versions": {},
            "updates": {},
            "staleness": {},
        }
        self._state: dict[str, Any] = strategy.state.setdefault(ASYNCHRONOUS, empty)
        # Of the current version: connected nodes, draws, shared arrays, nodes whose
        # replies have arrived, staleness of the changes that count, dropped changes.
        self._nodes: list[int] = []
        self._draws = 0
        self._current: Arrays = {}
        self._arrived: set[int] = set()
        self._staleness: dict[int, int] = {}
        self._dropped = 0

    @property
    def updates(self) -> dict[str, int]:
        """Number of changes that counted, by the client's name."""
        updates: dict[str, int] = self._state["updates"]
        return updates

    @property
    def staleness(self) -> dict[int, int]:
        """Number of changes that counted, by their staleness."""
        return {int(age): count for age, count in self._state["staleness"].items()}

    def check(self, num_clients: int, sample: Callable[[], list[int]]) -> None:
        """Raise `SettingsError` unless there are as many clients as work at a time."""
        allowed = f"at most {num_clients}, the number of clients"
        valid = self.concurrency <= num_clients
        require(valid, "concurrency", self.concurrency, allowed)

    def adapt_grid(self, grid: Grid, name_of: Callable[[int], str]) -> Grid:
        """Return a grid that returns replies as they arrive."""
        adapted = asynchronous_grid(grid, self)
        if adapted is None:
            raise SettingsError(
                "speed-model is 'none'; expected fixed, dynamic, groups, correlated or "
                "a file: in simulation it determines which reply arrives first",
                "speed-model",
            )
        if isinstance(adapted, RealWork):
            # Clients of an earlier process cannot answer this one.
            self._state["work"], self._state["versions"] = {}, {}
        return adapted

    # Who is asked.

    def sample(self, server_round: int, nodes: list[int], others: int = 0) -> list[int]:
        """Return clients for a new version, so that C clients are at work."""
        if server_round != self.version:
            self.version, self._draws = server_round, 0
            self._arrived, self._staleness, self._dropped = set(), {}, 0
        self._nodes = nodes
        return self._drawn()

    def _drawn(self) -> list[int]:
        working = self._state["work"]
        name_of, arrived = self.strategy.name_of, self._arrived
        # A version has at most one change of each client.
        idle = [
            n for n in self._nodes if n not in arrived and name_of(n) not in working
        ]
        count = min(self.concurrency - len(working), len(idle))
        entropy = [self.seed, 0x5A3B, self.version, *[self._draws] * (self._draws > 0)]
        self._draws += 1
        chosen = np.random.default_rng(entropy).choice(len(idle), count, replace=False)
        return [idle[i] for i in sorted(chosen)]

    def open(
        self,
        server_round: int,
        messages: list[Message],
        grid: Grid,
        is_valid: Callable[[Message], bool],
    ) -> None:
        """Let the grid return after B valid replies."""
        self._current = self.strategy._centre()
        grid.wait_for(self.buffer_size, is_valid)  # type: ignore[attr-defined]

    def refill(self) -> list[Message]:
        """Return training messages of the current version for idle clients."""
        pending, nodes = self.strategy.pending, self._drawn()
        sent = pending.expected[self.strategy.arrayrecord_key]
        return pending.ask([self._message(n, sent, self.version) for n in nodes])

    def _message(self, node: int, sent: ArrayRecord, version: int) -> Message:
        config = ConfigRecord({**self.strategy.pending.config, SERVER_ROUND: version})
        return self.strategy._message(node, sent, config, MessageType.TRAIN)

    # Who is at work (`Work`).

    def due(self) -> dict[int, float]:
        """Return the nodes at work, and when their replies are due."""
        working, name_of = self._state["work"], self.strategy.name_of
        named = [(node, name_of(node)) for node in self._nodes]
        return {node: working[n]["due"] for node, n in named if n in working}

    def begin(self, messages: Iterable[Message], due: Callable[[int], float]) -> None:
        """Record that the nodes of these messages begin to work."""
        for message in messages:
            node = message.metadata.dst_node_id
            work = {"version": self.version, "due": due(node)}
            self._state["work"][self.strategy.name_of(node)] = work
            self._state["versions"][str(self.version)] = self._current

    def end(self, node: int) -> bool:
        """Record that a node is done; return whether its change is recent enough."""
        work = self._state["work"].pop(self.strategy.name_of(node))
        pending, staleness = self.strategy.pending, self.version - work["version"]
        pending.asked.add(node)
        pending.asked_in[node] = work["version"]
        self._arrived.add(node)
        recent = self.max_staleness < 0 or staleness <= self.max_staleness
        if recent:
            self._staleness[node] = staleness
        return recent

    def give_up(self, node: int) -> None:
        """Record that nobody waits for a node any longer."""
        self._state["work"].pop(self.strategy.name_of(node))

    def drop(self, reply: Message) -> None:
        """Count a change that is too old; its client's personal part still counts."""
        self._dropped += 1
        pending = self.strategy.pending
        pending.bytes_up += count_bytes(reply)
        if not reply.has_error() and self.strategy._is_valid(reply):
            self.strategy.ledger.acknowledge(pending.rounds([reply]), self.version)

    def message(self, node: int) -> Message:
        """Return the message that a node has received, made again from its version."""
        version = self.strategy.pending.asked_in[node]
        sent = to_record(self._state["versions"][str(version)])
        return self._message(node, self.strategy._as_transported(sent), version)

    # Changes.

    def rebased(self, node: int, arrays: Arrays) -> Arrays:
        """Return x + η s(τ) Δ, in which x is the current version and Δ the change.

        The mean of the results is the current version plus the mean weighted change.
        Batch-norm statistics become (1 − s(τ)) x + s(τ) y, so that variances stay
        positive. A change of the current version with weight 1 stays as it is.
        """
        staleness = self._staleness[node]
        weight = (1.0 + staleness) ** -self.staleness_exponent
        if staleness == 0 and self.step_size == 1:
            return arrays
        version = str(self.strategy.pending.asked_in[node])
        sent = self._state["versions"][version] if self.from_sent else self._current
        moved = {}
        for name, array in arrays.items():
            if array.dtype.kind != "f":
                moved[name] = array
                continue
            averaged = name.endswith(STATISTICS)
            origin = self._current[name] if averaged else sent[name]
            step = weight if averaged else weight * self.step_size
            change = np.subtract(array, origin, dtype=np.float64)
            change *= step
            moved[name] = rounded_to(array.dtype, change + self._current[name])
        return moved

    def close(self) -> dict[str, float]:
        """Forget versions of which nobody is at work; return ``staleness-mean`` etc."""
        pending, state = self.strategy.pending, self._state
        rejected = {name for name, _ in pending.rejections}
        counted = {
            name: staleness
            for node, staleness in self._staleness.items()
            if (name := self.strategy.name_of(node)) not in rejected
        }
        for name, staleness in counted.items():
            self.updates[name] = self.updates.get(name, 0) + 1
            histogram = state["staleness"]
            histogram[str(staleness)] = histogram.get(str(staleness), 0) + 1
        out = {str(work["version"]) for work in state["work"].values()}
        for version in state["versions"].keys() - out:
            del state["versions"][version]
        values = list(counted.values()) or [0]
        return {
            "version": self.version,
            "staleness-mean": float(np.mean(values)),
            "staleness-max": max(values),
            "dropped": self._dropped,
        }


class FedBuff(
    Wrapping,
    # Simulated clients have no speed of their own, and all are compared by one clock.
    simulation_defaults={"speed-model": "fixed"},
):
    """Algorithm 1: x ← x + η_g/B Σ s(τ_i) Δ_i as soon as B changes have arrived.

    Δ_i is the difference of client i's arrays from the version that it was sent, τ_i
    the number of versions since then, and s(τ) = (1 + τ)^−a (section 5). With
    ``weighting`` or ``aggregation`` the base combines the same changes by its rule.
    Personal parts stay with their clients and are as new as their last training. Client
    i is asked again, with the newest version, once its change has been used.

    Parameters
    ----------
    strategy : BaseStrategy
        The base; an algorithm that averages, with `Traits.asynchronous`.
    async_base : str, default "fedavg"
        Name or import path of the base, where settings choose it.
    concurrency : int, default 10
        Number of clients C at work at any time.
    buffer_size : int, default 5
        Number of changes B that make a version; at most C.
    staleness_exponent : float, default 0.5
        a in s(τ), the authors' value.
    max_staleness : int, default -1
        Largest τ of a change that counts; older ones are dropped. −1 sets no limit.
    global_learning_rate : float, default 1
        The server's step size η_g.
    """

    base_setting = "async-base"
    strategy: BaseStrategy

    def __init__(
        self,
        strategy: BaseStrategy,
        async_base: Annotated[str, Free("an algorithm")] = "fedavg",
        concurrency: Annotated[int, Range("[1, inf)")] = 10,
        buffer_size: Annotated[int, Range("[1, inf)")] = 5,
        staleness_exponent: Annotated[float, Range("[0, inf)")] = 0.5,
        max_staleness: Annotated[int, Range("[-1, inf)")] = -1,
        global_learning_rate: Annotated[float, Range("(0, inf)")] = 1.0,
    ) -> None:
        self.strategy = strategy
        self.concurrency, self.buffer_size = concurrency, buffer_size
        self.staleness_exponent, self.max_staleness = staleness_exponent, max_staleness
        self.global_learning_rate = global_learning_rate
        validate(self)
        allowed = f"at most {concurrency}, the number of clients at work (concurrency)"
        require(buffer_size <= concurrency, "buffer-size", buffer_size, allowed)
        useless = max_staleness == 0 and concurrency > buffer_size
        allowed = "at least 1 with a concurrency above buffer-size: changes of clients "
        allowed += "that are still at work at the end of a version would never count"
        require(not useless, "max-staleness", max_staleness, allowed)
        noise = strategy.settings.server_dp_noise
        allowed = "0 with asynchronous rounds: the privacy account assumes rounds"
        require(noise == 0, "server-dp-noise", noise, allowed)
        self.participation = self._participation()
        self.install()

    def _participation(self) -> Asynchronous:
        return Asynchronous(
            self.strategy,
            self.concurrency,
            self.buffer_size,
            self.staleness_exponent,
            self.max_staleness,
            self.global_learning_rate,
            from_sent=True,
        )

    @classmethod
    def allowed_base(cls, strategy: type[Algorithm]) -> str:
        """Return "" if a strategy can average changes of different versions."""
        allowed = "an algorithm that averages and does not need all replies of a round"
        return "" if strategy.traits.asynchronous else allowed

    @classmethod
    def from_settings(cls, settings: Settings) -> BaseStrategy:
        """Return the base that the settings name, with asynchronous participation."""
        wrapped = build_strategy(cls.wrapped_settings(settings))
        build(cls, settings, strategy=wrapped)
        return wrapped

    def start(self, grid: Grid, *args: Any, **kwargs: Any) -> Result:
        """Run as Flower's ``Strategy.start``; ``num_rounds`` is that of versions."""
        return self.strategy.start(grid, *args, **kwargs)

    def summary(self) -> None:
        """Log the configuration."""
        text = "\t├──> Asynchronous: %d clients at work, %d changes make a version"
        log(INFO, text, self.concurrency, self.buffer_size)
        self.strategy.summary()
