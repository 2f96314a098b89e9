"""FedBuff (Nguyen et al., AISTATS 2022): asynchronous rounds with a buffer.

No client waits for another: C clients are at work at any time, and the server makes a
new version as soon as B changes have arrived, regardless of the versions from which
they started. The base algorithm, with its personal parts, is unchanged.
"""

from collections import deque
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from flwr_frl.common.arrays import memory_record
from flwr_frl.common.errors import require
from flwr_frl.common.messages import BATCH_NORM, SERVER_ROUND
from flwr_frl.common.settings import setting
from flwr_frl.strategies.base import Strategy
from flwr_frl.strategies.grids.inbox import Closing
from flwr_frl.strategies.server.replies import Arrays, rounded_to
from flwr_frl.strategies.server.round import SAMPLED, Round
from flwr_frl.strategies.server.traits import Algorithm
from flwr_frl.strategies.wrapping import ClosesEarly, Wrapping

# Key of the clients at work in the state of the wrapped strategy.
ASYNCHRONOUS = "asynchronous"


class Asynchronous(ClosesEarly, Closing):
    """Keep C clients at work, and make a new version after every B changes.

    In simulation, checkpoints also have the clients at work: the version that each was
    sent (``since``), the time at which its reply is due (``due``) and the arrays of
    these versions. Clients of an earlier process on real nodes cannot answer this one.

    Parameters
    ----------
    strategy : Strategy
        The wrapped strategy.
    settings : object
        The settings of `AsynchronousRounds`.
    size : int
        Number of changes that make a version.
    step : float
        The server's step size.
    from_sent : bool
        Whether changes are measured from the version that a client was sent, or from
        the newest one.

    Attributes
    ----------
    version : int
        The current version.
    last_version : int
        The last version of the run; 0 if it is unknown.
    """

    # A client's change may be in a later version than the one that asked for it.
    lasts = True

    def __init__(
        self, strategy: Strategy, settings: Any, size: int, step: float, from_sent: bool
    ) -> None:
        ClosesEarly.__init__(self, strategy)
        Closing.__init__(self)
        self.settings, self.buffer_size = settings, size
        self.step, self.from_sent = step, from_sent
        self.version = self.last_version = 0
        self.strategy.state[ASYNCHRONOUS] = {"updates": {}}
        # Name and version of each node at work; nodes may be renamed meanwhile.
        self._since: dict[int, tuple[str, int]] = {}
        # Shared arrays of the versions in use.
        self._versions: dict[int, Arrays] = {}
        # The current version's nodes without work in random order, and the staleness of
        # the recent replies.
        self._idle: list[int] = []
        self._staleness: dict[int, int] = {}

    def set_rounds(self, num_rounds: int) -> None:
        """Set the number of versions."""
        self.last_version = num_rounds

    @property
    def waits_for_rest(self) -> bool:  # type: ignore[override]
        """Whether the version also waits for the clients that are still at work.

        They would not be in the last evaluation.
        """
        return self.version == self.last_version

    @property
    def updates(self) -> dict[str, int]:
        """Number of changes that counted, by the client's name."""
        updates: dict[str, int] = self.strategy.state[ASYNCHRONOUS]["updates"]
        return updates

    def check_clients(self, num_clients: int) -> None:
        """Raise `SettingsError` if there are too few clients, or B is too small."""
        active = self.settings.concurrency
        allowed = f"at most {num_clients}, the number of clients"
        require(active <= num_clients, "concurrency", active, allowed)
        self.check_replies("buffer-size", self.buffer_size, num_clients)

    # Sampling.

    def sample(self, server_round: int, nodes: list[int], others: int = 0) -> list[int]:
        """Return the nodes to ask at the start of a version, so that C are at work."""
        name_of, self.clients = self.strategy._run.clients.name_of, len(nodes)
        if server_round == 1:
            self.check_replies("buffer-size", self.buffer_size, len(nodes))
        if self.version == 0 or server_round <= self.version:
            # A run begins. The clients that were at work in a checkpoint continue.
            saved = self.strategy.state[ASYNCHRONOUS]
            since, at = saved.get("since", {}), {name_of(n): n for n in nodes}
            self.at_work, self.ready = {}, deque()
            self._since = {at[n]: (n, v) for n, v in since.items() if n in at}
            self._versions = {int(v): a for v, a in saved.get("versions", {}).items()}
        self.version = server_round
        self._staleness = {}
        # A version asks each client at most once, silent ones included.
        names = {name for name, _ in self._since.values()}
        idle = [n for n in nodes if n not in self._since and name_of(n) not in names]
        rng = np.random.default_rng([self.seed, SAMPLED, server_round])
        # So that C clients are at work.
        count = min(self.settings.concurrency - len(self._since), len(idle))
        chosen = set(rng.choice(len(idle), count, replace=False).tolist())
        rest = [node for i, node in enumerate(idle) if i not in chosen]
        self._idle = [rest[i] for i in rng.permutation(len(rest))]
        return [node for i, node in enumerate(idle) if i in chosen]

    def open(self, round: Round, messages: list[Message], grid: Grid) -> None:
        """Let the grid return after B valid replies."""
        self._in_process = getattr(grid, "in_process", False)
        self._versions[self.version] = round.centre()
        self.missing, self.is_valid = self.buffer_size, round.is_valid
        for node in self._since.keys() - self.at_work.keys():
            name, version = self._since[node]
            if not self._in_process:
                del self._since[node]
                continue
            # In a resumed run, the node is sent its message again.
            config = ConfigRecord({**round.config, SERVER_ROUND: version})
            sent = memory_record(self._versions[version])
            earlier = Round(self.strategy, version, sent, config)
            (message,) = self.strategy._messages(earlier, [node])
            self.at_work[node] = message, self.strategy.state[ASYNCHRONOUS]["due"][name]
        self.close_by(self, grid)

    # Clients at work.

    def begin(self, message: Message, due: float = 0.0) -> None:
        """Record that the node of a message begins to work."""
        super().begin(message, due)
        node = message.metadata.dst_node_id
        self._since[node] = self.strategy._run.clients.name_of(node), self.version

    def refill(self) -> list[Message]:
        """Return training messages of the current version for idle clients."""
        current = self.strategy._run.round
        count = min(self.settings.concurrency - len(self._since), len(self._idle))
        nodes = [self._idle.pop() for _ in range(count)]
        return self.strategy._messages(current, nodes)

    def end(self, node: int) -> None:
        """Record that a node is done, and the staleness of its change."""
        super().end(node)
        _, version = self._since.pop(node)
        self._staleness[node] = self.version - version
        self.strategy._run.round.asked[node] = version

    # Changes.

    def sent_to(self, node: int, round: Round) -> Arrays:
        """Return the version that a node was sent."""
        return self._versions[round.asked[node]]

    def rebased(self, node: int, arrays: Arrays) -> Arrays:
        """Return x + η s(τ) Δ, where x is the current version and Δ the change.

        The mean of the results is the current version plus the mean weighted change.
        Received batch-norm statistics y become (1 − w) x + w y, w = min(η, 1) s(τ), so
        that variances stay positive. Arrays with τ = 0 and η = 1 are returned
        unchanged.
        """
        staleness, step = self._staleness[node], self.step
        if staleness == 0 and step == 1:
            return arrays
        weight = (1.0 + staleness) ** -self.settings.staleness_exponent
        current = self._versions[self.version]
        version = self.strategy._run.round.asked[node]
        sent = self._versions[version] if self.from_sent else current
        moved = dict(arrays)
        for name, array in arrays.items():
            if array.dtype.kind == "f":
                averaged = name.endswith(BATCH_NORM)
                origin, size = (current, min(step, 1.0)) if averaged else (sent, step)
                change = np.subtract(array, origin[name], dtype=np.float64)
                point = current[name] + change * (weight * size)
                moved[name] = rounded_to(array.dtype, point)
        return moved

    def close(
        self, round: Round, arrays: ArrayRecord | None
    ) -> dict[str, float | list[int]]:
        """Store who is at work; return ``staleness`` etc.

        Clients that are at work are not silent.
        """
        counted = {reply.client for reply in ([] if arrays is None else round.replies)}
        name_of, updates, ages = self.strategy._run.clients.name_of, self.updates, []
        for node, staleness in self._staleness.items():
            if (name := name_of(node)) in counted:
                updates[name] = updates.get(name, 0) + 1
                ages.append(staleness)
        in_use = {version for _, version in self._since.values()}
        self._versions = {v: a for v, a in self._versions.items() if v in in_use}
        state: dict[str, Any] = {"updates": updates}
        if self._in_process:
            since = self._since.items()
            state["since"] = dict(self._since.values())
            state["due"] = {name: self.at_work[node][1] for node, (name, _) in since}
            state["versions"] = {str(v): a for v, a in self._versions.items()}
        self.strategy.state[ASYNCHRONOUS] = state
        at_work = {name for name, _ in self._since.values()}
        round.silent = [name for name in round.silent if name not in at_work]
        values = ages or [0]
        return {
            "unanswered": len(round.silent),
            "version": self.version,
            "staleness": ages,
            "staleness-mean": sum(values) / len(values),
            "staleness-max": max(values),
        }


class AsynchronousRounds(Wrapping):
    """Run a strategy with asynchronous rounds.

    Parameters
    ----------
    strategy : Strategy
        The base, with ``uses_mean="only"`` (`StrategyTraits`); its replies must not be
        changes.
    async_base : str, default "fedavg"
        Name or import path of the base, if settings choose it.
    concurrency : int, default 10
        Number of clients C at work at any time.
    staleness_exponent : float, default 0.5
        a in s(τ), the authors' value.
    """

    async_base: str = setting("fedavg", form="an algorithm", code=True)
    concurrency: int = setting(10, ge=1)
    staleness_exponent: float = setting(0.5, ge=0)

    base_setting = "async-base"

    # Whether changes are measured from the version that a client was sent, or from the
    # newest one.
    from_sent: ClassVar[bool]

    def __new__(cls, strategy: Strategy, **values: Any) -> Strategy:  # type: ignore[misc]
        """Return the strategy with an `Asynchronous` participation."""
        cls._check_base(type(strategy), "strategy", type(strategy).__name__)
        settings = cls._settings_type(**values)
        size, step = cls.buffer(strategy, settings)
        active = settings.concurrency
        allowed = f"at most {active}, the number of clients at work (concurrency)"
        require(size <= active, "buffer-size", size, allowed)
        noise = strategy.settings.server_dp_noise
        allowed = "0 with asynchronous rounds: the privacy account assumes rounds"
        require(noise == 0, "server-dp-noise", noise, allowed)
        participation = Asynchronous(strategy, settings, size, step, cls.from_sent)
        strategy._run.participation = participation
        return strategy

    @classmethod
    def buffer(cls, strategy: Strategy, settings: Any) -> tuple[int, float]:
        """Return the number of changes in a version, and the server's step size."""
        raise NotImplementedError

    @classmethod
    def allowed_base(cls, strategy: type[Algorithm]) -> str:
        """Return "" if a strategy can average changes of different versions."""
        needed = "an algorithm that averages and does not need all replies of a round"
        return "" if strategy._traits.averages_models else needed


class FedBuff(AsynchronousRounds):
    """Algorithm 1: x ← x + η_g/B Σ s(τ_i) Δ_i as soon as B changes have arrived.

    Δ_i is the difference of client i's arrays from the version that it was sent, τ_i
    the number of versions since then, and s(τ) = (1 + τ)^−a (section 5). With
    ``weighting`` or ``aggregation`` the base combines the same changes by its rule.
    Personal parts stay with their clients and change in their own training only. Client
    i is asked again, with the newest version, once its change has been used.

    Parameters
    ----------
    buffer_size : int, default 5
        Number of changes B that make a version (K in the paper, where it is 10 in most
        experiments); at most C. A client counts once in a version. An ``aggregation``
        other than the mean needs at least 2f + 1 changes, ``multi-krum`` 2f + 3, where
        f is ``byzantine-fraction`` times the number of clients, rounded up: all f may
        be so fast that they are in every version.
    global_learning_rate : float, default 1
        The server's step size η_g.
    """

    buffer_size: int = setting(5, ge=1)
    global_learning_rate: float = setting(1.0, gt=0)

    from_sent = True

    @classmethod
    def buffer(cls, strategy: Strategy, settings: Any) -> tuple[int, float]:
        """Return B and η_g."""
        return settings.buffer_size, settings.global_learning_rate
