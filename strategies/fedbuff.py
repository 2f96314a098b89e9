"""FedBuff (Nguyen et al., AISTATS 2022): asynchronous rounds with a buffer.

No client waits for another: C clients are at work at any time, and the server makes a
new version as soon as B changes have arrived, regardless of the versions from which
they started. The base algorithm, with its personal parts, is unchanged.
"""

from collections.abc import Callable, Iterable
from logging import INFO, WARNING
from typing import Annotated, Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from flwr_frl.common.memory_array import memory_record
from flwr_frl.common.messages import SERVER_ROUND
from flwr_frl.common.settings import (
    Settings,
    SettingsError,
    build,
    require,
    setting,
    validate,
)
from flwr_frl.strategies.algorithms import build_strategy
from flwr_frl.strategies.base import Strategy
from flwr_frl.strategies.grids.closing import Closing
from flwr_frl.strategies.grids.inbox import closing_grid
from flwr_frl.strategies.server.aggregation import assumed_byzantine, least_replies
from flwr_frl.strategies.server.participation import Participation
from flwr_frl.strategies.server.replies import Arrays, count_bytes, rounded_to
from flwr_frl.strategies.server.traits import Algorithm
from flwr_frl.strategies.wrapping import Wrapping

# Key of the clients at work in the state of the wrapped strategy.
ASYNCHRONOUS = "asynchronous"
# Suffixes of the names of batch-norm statistics, which must stay averages.
STATISTICS = ("running_mean", "running_var")
NEEDED = "averages and does not need all replies of a round"


class Asynchronous(Participation, Closing):
    """Keep C clients at work, and make a new version after every B changes.

    The state is part of the wrapped strategy's state. For each client at work it has
    the version that the client was sent (``since``) and the time at which its reply is
    due (``due``); it also has the arrays of these versions, and the number of each
    client's changes that counted (``updates``).

    Parameters
    ----------
    fedbuff : FedBuff
        The wrapped strategy and the settings.

    Attributes
    ----------
    round : int
        The current version.
    last_version : int
        The last version of the run; 0 if it is unknown.
    """

    waits_for_all = False
    # A client's change may be in a later version than the one that asked for it.
    lasts = True

    def __init__(self, fedbuff: "FedBuff") -> None:
        self.settings, self.strategy = fedbuff, fedbuff.strategy
        base = self.strategy.participation
        Participation.__init__(self, base.fraction, base.least, base.seed)
        Closing.__init__(self)
        self.last_version = 0
        empty: dict[str, Any] = {"since": {}, "due": {}, "versions": {}, "updates": {}}
        self._state: dict[str, Any]
        self._state = self.strategy.state.setdefault(ASYNCHRONOUS, empty)
        # Connected nodes, by the names of their clients.
        self._nodes: dict[str, int] = {}
        # The largest number of nodes for which the buffer has been checked.
        self._checked = 0
        # Names that nodes had when they began to work; they may be renamed meanwhile.
        self._asked_as: dict[int, str] = {}
        # The current version's nodes without work in random order, shared arrays,
        # staleness of the recent replies, clients whose changes counted or were
        # dropped.
        self._idle: list[int] = []
        self._current: Arrays = {}
        self._staleness: dict[int, int] = {}
        self._counted: set[str] = set()
        self._dropped: set[str] = set()

    @property
    def is_last(self) -> bool:
        """Whether the version also waits for the clients that are still at work.

        They would not be in the last evaluation.
        """
        return self.round == self.last_version

    @property
    def updates(self) -> dict[str, int]:
        """Number of changes that counted, by the client's name."""
        updates: dict[str, int] = self._state["updates"]
        return updates

    def check(self, num_clients: int, sample: Callable[[], list[int]]) -> None:
        """Raise `SettingsError` if there are fewer than C clients."""
        active = self.settings.concurrency
        allowed = f"at most {num_clients}, the number of clients"
        require(active <= num_clients, "concurrency", active, allowed)
        self._check_buffer(num_clients)

    def _check_buffer(self, num_clients: int) -> None:
        """Raise `SettingsError` if a buffer has fewer than `least_replies`."""
        settings = self.strategy.settings
        rule, share = settings.aggregation, settings.byzantine_fraction
        needed = least_replies(rule, num_clients, share, settings.bucket_size)
        f = assumed_byzantine(num_clients, share)
        allowed = f"at least {needed}, and concurrency at least {needed}, with "
        allowed += f"aggregation={rule!r} and byzantine-fraction={share}: {f} fast "
        allowed += f"clients of {num_clients} may be in every buffer"
        valid = self.settings.buffer_size >= needed
        require(valid, "buffer-size", self.settings.buffer_size, allowed)

    def adapt_grid(self, grid: Grid, name_of: Callable[[int], str]) -> Grid:
        """Return a grid that returns replies as they arrive."""
        grid = closing_grid(grid, name_of)
        # A run that starts again at version 1 is not in the former run's version 1.
        self.round = 0
        self.at_work.clear()
        self.ready.clear()
        self._asked_as.clear()
        if not getattr(grid, "in_process", False):
            # Clients of an earlier process cannot answer this one, so checkpoints leave
            # out who is at work, and the arrays of up to C versions.
            self._state |= {"since": {}, "due": {}, "versions": {}}
            self._state = {**self._state, "since": {}, "due": {}, "versions": {}}
        return grid

    # Sampling.

    def sample(self, server_round: int, nodes: list[int], others: int = 0) -> list[int]:
        """Return the nodes to ask at the start of a version, so that C are at work."""
        if server_round != self.round:
            self.round = server_round
            self._staleness, self._counted, self._dropped = {}, set(), set()
        self._nodes = {self.strategy.clients.name_of(node): node for node in nodes}
        if len(nodes) > self._checked:
            self._checked = len(nodes)
            try:
                self._check_buffer(len(nodes))
            except SettingsError as error:
                # Later, clients that join must not end the run.
                if server_round == 1:
                    raise
                log(WARNING, "%s", error)
        # A version asks each client at most once, silent ones included.
        names, asked = self._state["since"], self._asked_as
        named = self._nodes.items()
        idle = [n for name, n in named if name not in names and n not in asked]
        rng = np.random.default_rng([self.seed, 0x5A3B, server_round])
        count = min(self._unused, len(idle))
        chosen = set(rng.choice(len(idle), count, replace=False).tolist())
        rest = [node for i, node in enumerate(idle) if i not in chosen]
        self._idle = [rest[i] for i in rng.permutation(len(rest))]
        return [node for i, node in enumerate(idle) if i in chosen]

    @property
    def _unused(self) -> int:
        """Number of clients that must begin to work so that C are at work."""
        return self.settings.concurrency - len(self._state["since"])

    def open(
        self,
        server_round: int,
        messages: list[Message],
        grid: Grid,
        is_valid: Callable[[Message], bool],
    ) -> None:
        """Let the grid return after B valid replies."""
        self._current = self.strategy._centre()
        self.missing, self._is_valid = self.settings.buffer_size, is_valid
        # After a resume, the clients that were at work continue.
        for name in self._state["due"].keys() - set(self._asked_as.values()):
            node = self._nodes[name]
            self.at_work[node] = self._repeated(name, node), self._state["due"][name]
            self._asked_as[node] = name
        grid.wait_for(self)  # type: ignore[attr-defined]

    def _repeated(self, name: str, node: int) -> Message:
        """Return the message that a client was sent, from the arrays of its version."""
        strategy, version = self.strategy, self._state["since"][name]
        config = ConfigRecord({**strategy.round.config, SERVER_ROUND: version})
        arrays = memory_record(self._state["versions"][str(version)])
        sent = strategy._as_transported(arrays)
        return strategy._message(node, sent, config, MessageType.TRAIN)

    # Clients at work.

    def begin(
        self,
        messages: Iterable[Message],
        due: Callable[[int], float] = lambda node: 0.0,
    ) -> None:
        """Record that the nodes of these messages begin to work."""
        super().begin(messages := list(messages), due)
        state = self._state
        state["versions"][str(self.round)] = self._current
        for message in messages:
            node = message.metadata.dst_node_id
            name = self._asked_as[node] = self.strategy.clients.name_of(node)
            state["since"][name], state["due"][name] = self.round, due(node)

    def refill(self) -> list[Message]:
        """Return training messages of the current version for idle clients."""
        current, count = self.strategy.round, min(self._unused, len(self._idle))
        sent = current.like[self.strategy.arrayrecord_key]
        about = sent, current.config, MessageType.TRAIN
        nodes = [self._idle.pop() for _ in range(count)]
        return current.ask([self.strategy._message(node, *about) for node in nodes])

    def end(self, node: int) -> int:
        """Record that a node is done; return 1 if its change is recent enough."""
        version = self._stop(node)
        current, staleness = self.strategy.round, self.round - version
        current.asked.add(node)
        current.asked_in[node] = version
        if 0 <= self.settings.max_staleness < staleness:
            self._dropped.add(self.strategy.clients.name_of(node))
            return 0
        self._staleness[node] = staleness
        return 1

    def take(self, reply: Message, weight: int) -> bool:
        """Count a valid reply; of too old a change, only the personal part counts."""
        current, node = self.strategy.round, reply.metadata.src_node_id
        if not weight:
            current.bytes_up += count_bytes(reply)
            if not reply.has_error() and current.is_valid(reply):
                made_in = {self.strategy.clients.name_of(node): current.asked_in[node]}
                self.strategy.ledger.acknowledge(made_in, self.round)
        return super().take(reply, weight)

    def give_up(self, node: int) -> None:
        """Record that a node's reply is no longer awaited."""
        self._stop(node)

    def _stop(self, node: int) -> int:
        """Record that a node no longer works; return the version that it was sent."""
        super().give_up(node)
        name = self._asked_as.pop(node)
        del self._state["due"][name]
        version: int = self._state["since"].pop(name)
        return version

    # Changes.

    def byzantine_share(self, fraction: float, count: int) -> float:
        """Return the share of all Byzantine clients, who may all have answered."""
        return assumed_byzantine(max(count, len(self._nodes)), fraction) / count

    def rebased(self, node: int, arrays: Arrays) -> Arrays:
        """Return x + η s(τ) Δ, where x is the current version and Δ the change.

        The mean of the results is the current version plus the mean weighted change.
        Received batch-norm statistics y become (1 − w) x + w y, w = min(η, 1) s(τ), so
        that variances stay positive. Arrays with τ = 0 and η = 1 are returned
        unchanged.
        """
        staleness, step = self._staleness[node], self.settings.global_learning_rate
        if staleness == 0 and step == 1:
            return arrays
        weight = (1.0 + staleness) ** -self.settings.staleness_exponent
        version = str(self.strategy.round.asked_in[node])
        sent = (
            self._state["versions"][version]
            if self.settings.from_sent
            else self._current
        )
        moved = {}
        for name, array in arrays.items():
            if array.dtype.kind != "f":
                moved[name] = array
                continue
            averaged = name.endswith(STATISTICS)
            origin = self._current[name] if averaged else sent[name]
            size = min(step, 1.0) if averaged else step
            change = np.subtract(array, origin, dtype=np.float64)
            change *= weight * size
            change += self._current[name]
            moved[name] = rounded_to(array.dtype, change)
        return moved

    def note(self, names: list[str], sent: ArrayRecord, arrays: ArrayRecord) -> None:
        """Record whose changes are in the new version."""
        self._counted = set(names)

    def close(self) -> dict[str, float | list[int]]:
        """Remove versions on which no client works; return ``staleness`` etc.

        Clients that are at work, or whose change was dropped, are not silent.
        """
        counted = {
            name: staleness
            for node, staleness in self._staleness.items()
            if (name := self.strategy.clients.name_of(node)) in self._counted
        }
        state, updates = self._state, self.updates
        for name in counted:
            updates[name] = updates.get(name, 0) + 1
        out = set(map(str, state["since"].values()))
        for version in state["versions"].keys() - out:
            del state["versions"][version]
        current, known = self.strategy.round, state["since"].keys() | self._dropped
        current.silent = [name for name in current.silent if name not in known]
        ages = list(counted.values())
        values = ages or [0]
        return {
            "unanswered": len(current.silent),
            "version": self.round,
            "staleness": ages,
            "staleness-mean": sum(values) / len(values),
            "staleness-max": max(values),
            "dropped": len(self._dropped),
        }


class FedBuff(Wrapping):
    """Algorithm 1: x ← x + η_g/B Σ s(τ_i) Δ_i as soon as B changes have arrived.

    Δ_i is the difference of client i's arrays from the version that it was sent, τ_i
    the number of versions since then, and s(τ) = (1 + τ)^−a (section 5). With
    ``weighting`` or ``aggregation`` the base combines the same changes by its rule.
    Personal parts stay with their clients and change in their own training only. Client
    i is asked again, with the newest version, once its change has been used.

    Parameters
    ----------
    strategy : Strategy
        The base, with ``Traits.uses_mean="only"``; its replies must not be changes.
    async_base : str, default "fedavg"
        Name or import path of the base, if settings choose it.
    concurrency : int, default 10
        Number of clients C at work at any time.
    buffer_size : int, default 5
        Number of changes B that make a version (K in the paper, where it is 10 in most
        experiments); at most C. A client counts once in a version. An ``aggregation``
        other than the mean needs at least 2f + 1 changes, ``multi-krum`` 2f + 3, where
        f is ``byzantine-fraction`` times the number of clients, rounded up: all f may
        be so fast that they are in every version.
    staleness_exponent : float, default 0.5
        a in s(τ), the authors' value.
    max_staleness : int, default -1
        Largest τ of a change that counts; older ones are dropped. −1 sets no limit.
    global_learning_rate : float, default 1
        The server's step size η_g.
    """

    base_setting = "async-base"
    strategy: Strategy
    participation: Asynchronous
    # Whether changes are measured from the version that a client was sent, or from the
    # newest one.
    from_sent: ClassVar[bool] = True

    def __init__(
        self,
        strategy: Strategy,
        async_base: Annotated[str, setting(form="an algorithm", code=True)] = "fedavg",
        concurrency: Annotated[int, setting(ge=1)] = 10,
        buffer_size: Annotated[int, setting(ge=1)] = 5,
        staleness_exponent: Annotated[float, setting(ge=0)] = 0.5,
        max_staleness: Annotated[int, setting(ge=-1)] = -1,
        global_learning_rate: Annotated[float, setting(gt=0)] = 1.0,
    ) -> None:
        allowed = "a strategy object, such as FedAvg()"
        require(not isinstance(strategy, type), "strategy", strategy, allowed)
        allowed = "one of this package's that " + NEEDED
        ours = isinstance(strategy, Strategy) and not self.allowed_base(type(strategy))
        require(ours, "strategy", type(strategy).__name__, allowed)
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
        self.participation = Asynchronous(self)
        self.install()

    @classmethod
    def allowed_base(cls, strategy: type[Algorithm]) -> str:
        """Return "" if a strategy can average changes of different versions."""
        traits = strategy.traits
        valid = traits.uses_mean == "only" and not traits.replies_are_changes
        return "" if valid else f"an algorithm that {NEEDED}"

    @classmethod
    def from_settings(cls, settings: Settings) -> Strategy:
        """Return the base that the settings name, with asynchronous participation."""
        wrapped = build_strategy(cls.wrapped_settings(settings))
        wrapper = build(cls, settings, strategy=wrapped)
        wrapper.participation.last_version = int(settings["num-server-rounds"])
        return wrapped

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        *args: Any,
        **kwargs: Any,
    ) -> Result:
        """Run as Flower's ``Strategy.start``; ``num_rounds`` counts versions."""
        self.participation.last_version = num_rounds
        return self.strategy.start(grid, initial_arrays, num_rounds, *args, **kwargs)

    def summary(self) -> None:
        """Log the configuration."""
        text = "\t├──> Asynchronous: %d clients at work, %d changes make a version"
        log(INFO, text, self.concurrency, self.buffer_size)
        self.strategy.summary()
