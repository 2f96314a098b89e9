"""Asynchronous participation: which clients are at work, and the weight of a change.

Used by FedBuff and FedAsync; `flwr_frl.strategies.grids.asynchronous` delivers the
replies.
"""

from collections.abc import Callable, Iterable
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType
from flwr.common import log
from flwr.serverapp import Grid

from flwr_frl.common.memory_array import memory_record
from flwr_frl.common.messages import SERVER_ROUND
from flwr_frl.common.settings import SettingsError, require
from flwr_frl.strategies.base import Strategy
from flwr_frl.strategies.grids.asynchronous import RealWork, asynchronous_grid
from flwr_frl.strategies.server.aggregation import assumed_byzantine, least_replies
from flwr_frl.strategies.server.participation import Participation
from flwr_frl.strategies.server.replies import Arrays, count_bytes, rounded_to

# Key of the clients at work in the state of the wrapped strategy.
ASYNCHRONOUS = "asynchronous"
# Suffixes of the names of batch-norm statistics, which must stay averages.
STATISTICS = ("running_mean", "running_var")


class IdleNodes:
    """The nodes without work that can be asked in a version, drawn at random.

    Parameters
    ----------
    nodes : list of int
        The nodes, in the order of their clients' names.
    seed, version : int
        They fix all draws of the version.
    """

    def __init__(self, nodes: list[int], seed: int, version: int) -> None:
        self._rng = np.random.default_rng([seed, 0x5A3B, version])
        self._nodes, self._permuted = nodes, False

    def sample(self, count: int) -> list[int]:
        """Remove and return up to ``count`` nodes, as `Participation.sample` does."""
        nodes, count = self._nodes, min(count, len(self._nodes))
        chosen = sorted(self._rng.choice(len(nodes), count, replace=False))
        drawn = [nodes[i] for i in chosen]
        for i in reversed(chosen):
            del nodes[i]
        return drawn

    def draw(self, count: int) -> list[int]:
        """Remove and return up to ``count`` nodes.

        The first draw permutes all nodes, so that later ones take constant time a node.
        """
        if not self._permuted:
            order = self._rng.permutation(len(self._nodes))
            self._nodes, self._permuted = [self._nodes[i] for i in order], True
        return [self._nodes.pop() for _ in range(min(count, len(self._nodes)))]


class Asynchronous(Participation):
    """Keep C clients at work, and make a new version after every B changes.

    The state is part of the wrapped strategy's state. For each client at work it has
    the version that the client was sent (``since``) and the time at which its reply is
    due (``due``); it also has the arrays of these versions, and the numbers of changes
    that counted, by client (``updates``) and by ``staleness``.

    Parameters
    ----------
    strategy : Strategy
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

    Attributes
    ----------
    version, last_version : int
        The current version, and the last one of the run; 0 if it is unknown.
    """

    waits_for_all = False

    def __init__(
        self,
        strategy: Strategy,
        concurrency: int,
        buffer_size: int,
        staleness_exponent: float,
        max_staleness: int,
        step_size: float,
        from_sent: bool,
    ) -> None:
        base = strategy.participation
        super().__init__(base.fraction, base.least, base.seed)
        self.strategy = strategy
        self.concurrency, self.buffer_size = concurrency, buffer_size
        self.staleness_exponent, self.max_staleness = staleness_exponent, max_staleness
        self.step_size, self.from_sent = step_size, from_sent
        self.version = self.last_version = 0
        parts = ("since", "due", "versions", "updates", "staleness")
        empty: dict[str, Any] = {part: {} for part in parts}
        self._state: dict[str, Any] = strategy.state.setdefault(ASYNCHRONOUS, empty)
        # Connected nodes, by the names of their clients.
        self._nodes: dict[str, int] = {}
        # The largest number of nodes for which the buffer has been checked.
        self._checked = 0
        # Names that nodes had when they began to work; they may be renamed meanwhile.
        self._asked_as: dict[int, str] = {}
        # The current version's nodes without work, shared arrays, staleness of the
        # recent replies, clients whose changes counted or were dropped.
        self._idle = IdleNodes([], self.seed, 0)
        self._current: Arrays = {}
        self._staleness: dict[int, int] = {}
        self._counted: set[str] = set()
        self._dropped: set[str] = set()

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
        """Raise `SettingsError` if there are fewer than C clients."""
        allowed = f"at most {num_clients}, the number of clients"
        valid = self.concurrency <= num_clients
        require(valid, "concurrency", self.concurrency, allowed)
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
        valid = self.buffer_size >= needed
        require(valid, "buffer-size", self.buffer_size, allowed)

    def adapt_grid(self, grid: Grid, name_of: Callable[[int], str]) -> Grid:
        """Return a grid that returns replies as they arrive."""
        adapted = asynchronous_grid(grid, self)
        if adapted is None:
            raise SettingsError(
                "speed-model is 'none'; expected fixed, dynamic, groups, correlated or "
                "a file: in simulation it determines which reply arrives first",
                "speed-model",
            )
        # A run that starts again at version 1 is not in the former run's version 1.
        self.version = 0
        if isinstance(adapted, RealWork):
            # Clients of an earlier process cannot answer this one, so checkpoints leave
            # out who is at work, and the arrays of up to C versions.
            self._asked_as = {}
            self._state |= {"since": {}, "due": {}, "versions": {}}
            self._state = {**self._state, "since": {}, "due": {}, "versions": {}}
        return adapted

    # Sampling.

    def sample(self, server_round: int, nodes: list[int], others: int = 0) -> list[int]:
        """Return the nodes to ask at the start of a version, so that C are at work."""
        if server_round != self.version:
            self.version = server_round
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
        self._idle = IdleNodes(idle, self.seed, server_round)
        return self._idle.sample(self._missing)

    @property
    def _missing(self) -> int:
        return self.concurrency - len(self._state["since"])

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
        round, nodes = self.strategy.round, self._idle.draw(self._missing)
        sent = round.like[self.strategy.arrayrecord_key]
        about = sent, round.config, MessageType.TRAIN
        return round.ask([self.strategy._message(node, *about) for node in nodes])

    # Clients at work (the interface `Work`).

    def due(self) -> dict[int, float]:
        """Return the nodes at work, and when their replies are due."""
        due = self._state["due"].items()
        nodes = self._nodes | {name: node for node, name in self._asked_as.items()}
        return {nodes[name]: at for name, at in due if name in nodes}

    def begin(self, messages: Iterable[Message], due: Callable[[int], float]) -> None:
        """Record that the nodes of these messages begin to work."""
        state = self._state
        state["versions"][str(self.version)] = self._current
        for message in messages:
            node = message.metadata.dst_node_id
            name = self._asked_as[node] = self.strategy.clients.name_of(node)
            state["since"][name], state["due"][name] = self.version, due(node)

    def end(self, node: int) -> bool:
        """Record that a node is done; return whether its change is recent enough."""
        version = self._stop(node)
        round, staleness = self.strategy.round, self.version - version
        round.asked.add(node)
        round.asked_in[node] = version
        recent = self.max_staleness < 0 or staleness <= self.max_staleness
        if recent:
            self._staleness[node] = staleness
        else:
            self._dropped.add(self.strategy.clients.name_of(node))
        return recent

    def give_up(self, node: int) -> None:
        """Record that a node's reply is no longer awaited."""
        self._stop(node)

    def _stop(self, node: int) -> int:
        """Record that a node no longer works; return the version that it was sent."""
        # After a resume, only the names of the clients at work are known.
        name = self._asked_as.pop(node, self.strategy.clients.name_of(node))
        del self._state["due"][name]
        version: int = self._state["since"].pop(name)
        return version

    def drop(self, reply: Message) -> None:
        """Discard a change that is too old; the client's personal part still counts."""
        round, node = self.strategy.round, reply.metadata.src_node_id
        round.bytes_up += count_bytes(reply)
        if not reply.has_error() and round.is_valid(reply):
            made_in = {self.strategy.clients.name_of(node): round.asked_in[node]}
            self.strategy.ledger.acknowledge(made_in, self.version)

    def message(self, node: int) -> Message:
        """Rebuild the message that a node was sent, from the arrays of its version."""
        round, strategy = self.strategy.round, self.strategy
        version = round.asked_in[node]
        config = ConfigRecord({**round.config, SERVER_ROUND: version})
        arrays = memory_record(self._state["versions"][str(version)])
        sent = strategy._as_transported(arrays)
        return strategy._message(node, sent, config, MessageType.TRAIN)

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
        staleness = self._staleness[node]
        if staleness == 0 and self.step_size == 1:
            return arrays
        weight = (1.0 + staleness) ** -self.staleness_exponent
        version = str(self.strategy.round.asked_in[node])
        sent = self._state["versions"][version] if self.from_sent else self._current
        moved = {}
        for name, array in arrays.items():
            if array.dtype.kind != "f":
                moved[name] = array
                continue
            averaged = name.endswith(STATISTICS)
            origin = self._current[name] if averaged else sent[name]
            size = min(self.step_size, 1.0) if averaged else self.step_size
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
        histogram = state["staleness"]
        for name, staleness in counted.items():
            updates[name] = updates.get(name, 0) + 1
            histogram[str(staleness)] = histogram.get(str(staleness), 0) + 1
        out = set(map(str, state["since"].values()))
        for version in state["versions"].keys() - out:
            del state["versions"][version]
        round, known = self.strategy.round, state["since"].keys() | self._dropped
        round.silent = [name for name in round.silent if name not in known]
        ages = list(counted.values())
        values = ages or [0]
        return {
            "unanswered": len(round.silent),
            "version": self.version,
            "staleness": ages,
            "staleness-mean": sum(values) / len(values),
            "staleness-max": max(values),
            "dropped": len(self._dropped),
        }
