"""SRPFL (Tziotis et al., TMLR 2023): begin with the fastest clients, then double.

A wrapper of any strategy, like Flower's differential-privacy strategies: each round
uses only the first n clients that answer, and n doubles from stage to stage. Clients
outside the n keep their personal parts.
"""

from collections.abc import Iterable, Mapping, Sequence
from logging import INFO, WARNING
from typing import Annotated, Any, ClassVar, Self, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flwr_frl.strategies.algorithms import (
    build_strategy,
    client_path,
    settings_owners,
    strategy_class,
)
from flwr_frl.strategies.grids.arrivals import ArrivalGrid, RealArrivals
from flwr_frl.strategies.grids.speeds import speed_model
from flwr_frl.strategies.hooks import RunHooks
from flwr_frl.strategies.server.checks import InvalidReplyError
from flwr_frl.strategies.server.replies import Arrays
from flwr_frl.strategies.server.stages import (
    automatic_stages,
    listed_stages,
    nodes_of,
    theory_stages,
)
from flwr_frl.task.settings import (
    Free,
    Range,
    Setting,
    Settings,
    SettingsError,
    require,
    validate,
)

# In a checkpoint: of how many rounds the stages of ``auto`` are.
STAGED = "staged-rounds"


class SRPFL(RunHooks):
    """Close each round when the first n of the sampled clients have answered.

    A value out of its range is a `SettingsError`.

    Parameters
    ----------
    strategy : Strategy
        What is done with the replies: any strategy, Flower's own included.
    initial_nodes : int, default 2
        n in the first stage.
    rounds_per_stage : int, sequence of int or str, default "auto"
        Rounds of each stage; several give the stages their own lengths, and the last
        one holds for all that follow. In a setting they have commas between them, or
        are ``theory`` (see `flwr_frl.strategies.server.stages`) or ``auto``: stages of
        equal lengths in the first half of the rounds, all sampled clients in the
        second.
    srpfl_base : str, default "fedrep"
        Name or import path of the wrapped strategy, where settings choose it.
    contraction : float, default 0.1
        a in (0, 1), by which a round brings linear FedRep nearer, for ``theory`` in
        settings; the smaller, the longer the stages.
    num_rounds : int, optional
        How many rounds there are, for ``auto``; settings and ``start`` say it, too.
    """

    # What is wrapped; the setting srpfl-base says it where this is empty.
    base: ClassVar[str] = ""
    waits_for_all = False
    # Nobody is slow by itself there, and all are compared by the same clock.
    simulation_defaults: ClassVar = {"speed-model": "fixed"}

    def __init__(
        self,
        strategy: Strategy,
        initial_nodes: Annotated[int, Range("[1, inf)")] = 2,
        rounds_per_stage: Annotated[
            int | str | Sequence[int],
            Free("numbers with commas between, theory or auto"),
        ] = "auto",
        srpfl_base: Annotated[str, Free("an algorithm")] = "fedrep",
        contraction: Annotated[float, Range("(0, 1)")] = 0.1,
        num_rounds: int | None = None,
    ) -> None:
        self.strategy = strategy
        self.initial_nodes = initial_nodes
        self.contraction = contraction
        self.num_rounds = num_rounds
        self._end_checked = self._waits_said = False
        # How many rounds the run that was resumed had, for the same stages.
        self._began_with = 0
        validate(self)
        noise = getattr(strategy, "server_dp_noise", 0.0)
        allowed = "0 with SRPFL: who is among the first depends on the data"
        require(noise == 0, "server-dp-noise", noise, allowed)
        allowed = "used with a speed-model other than 'none'"
        theory = rounds_per_stage == "theory"
        require(not theory, "rounds-per-stage", rounds_per_stage, allowed)
        # None where they follow from the number of rounds.
        automatic = rounds_per_stage == "auto"
        self.lengths = None if automatic else listed_stages(rounds_per_stage)

    @classmethod
    def _wrapped(cls, settings: Settings) -> Settings:
        """Return the settings of the strategy that is wrapped."""
        name = cls.base or str(settings["srpfl-base"])
        wrapped = {**settings, "algorithm": name}
        strategy = strategy_class(wrapped)
        if issubclass(strategy, SRPFL):
            raise SettingsError(
                f"srpfl-base is {name!r}; it must be an algorithm that is not SRPFL"
            )
        if strategy.srpfl_settings is None:
            raise SettingsError(
                f"srpfl-base is {name!r}; it must be an algorithm that samples clients"
            )
        return {**wrapped, **strategy.srpfl_settings}

    @classmethod
    def in_simulation(cls, settings: Settings) -> Mapping[str, Setting]:
        """Return fixed speeds, and what the wrapped strategy wants."""
        wrapped = cls._wrapped(settings)
        own = strategy_class(wrapped).in_simulation(wrapped)
        return {**cls.simulation_defaults, **own}

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """Return SRPFL around the strategy that the settings name."""
        wrapped = build_strategy(cls._wrapped(settings))
        initial_nodes = int(settings["initial-nodes"])
        stages: str | Sequence[int] = str(settings["rounds-per-stage"])
        trained = int(settings["num-clients"]) - int(settings["new-clients"])
        speeds = speed_model(settings, trained)
        if stages == "theory" and speeds is not None:
            sampled = len(wrapped.sample(1, list(range(speeds.num_clients))))
            arrivals = speeds.expected_arrivals(sampled)
            contraction = float(settings["contraction"])
            stages = theory_stages(initial_nodes, arrivals, contraction)
        rounds = int(settings["num-server-rounds"])
        return cls(wrapped, initial_nodes, stages, num_rounds=rounds)

    @classmethod
    def client_path(cls, settings: Settings) -> str:
        """Return that of the wrapped strategy."""
        return client_path(cls._wrapped(settings))

    @classmethod
    def settings_owners(cls, settings: Settings) -> list[type]:
        """Return this class and what it wraps."""
        return [cls, *settings_owners(cls._wrapped(settings))]

    @property
    def wrapped(self) -> RunHooks:
        """The wrapped strategy as one of ours, which has more than Flower's hooks."""
        return cast(RunHooks, self.strategy)

    def check_clients(self, num_clients: int) -> None:
        """Raise `SettingsError` unless so many clients make a first stage."""
        self.wrapped.check_clients(num_clients)
        sampled = len(self.wrapped.sample(1, list(range(num_clients))))
        allowed = f"at most {sampled}, the number of sampled clients"
        valid = self.initial_nodes <= sampled
        require(valid, "initial-nodes", self.initial_nodes, allowed)

    def adapt_grid(self, grid: Grid) -> Grid:
        """Return a grid that closes rounds by real arrival order."""
        # Flower's own strategies wrap none.
        wrap = getattr(self.strategy, "adapt_grid", None)
        grid = wrap(grid) if wrap else grid
        return (
            grid if isinstance(grid, ArrivalGrid) else RealArrivals(grid, self.name_of)
        )

    # What is not here is the wrapped strategy's.

    @property
    def evaluate_last_round_only(self) -> bool:  # type: ignore[override]
        """As the wrapped strategy."""
        return self.wrapped.evaluate_last_round_only

    @property
    def takes_newcomers(self) -> bool:  # type: ignore[override]
        """As the wrapped strategy."""
        return getattr(self.strategy, "takes_newcomers", False)

    def open_round(
        self,
        nodes: list[int],
        arrays: ArrayRecord,
        config: ConfigRecord,
        server_round: int,
        kind: str,
    ) -> list[Message]:
        """As the wrapped strategy."""
        return self.wrapped.open_round(nodes, arrays, config, server_round, kind)

    def name_of(self, node: int) -> str:
        """As the wrapped strategy; Flower's own know no names."""
        return getattr(self.strategy, "name_of", super().name_of)(node)

    def largest_reply(self, kind: str) -> float:
        """As the wrapped strategy; Flower's own expect nothing in particular."""
        return getattr(self.strategy, "largest_reply", super().largest_reply)(kind)

    def identify(self, grid: Grid) -> list[int]:
        """As the wrapped strategy."""
        return self.wrapped.identify(grid)

    def connected_nodes(self, grid: Grid) -> list[int]:
        """As the wrapped strategy."""
        return self.wrapped.connected_nodes(grid)

    def expected_clients(self) -> set[str]:
        """As the wrapped strategy."""
        return self.wrapped.expected_clients()

    def sample(self, server_round: int, nodes: list[int]) -> list[int]:
        """As the wrapped strategy."""
        return self.wrapped.sample(server_round, nodes)

    def initialize(self, grid: Grid) -> ArrayRecord:
        """As the wrapped strategy."""
        return self.wrapped.initialize(grid)

    def state_dict(self) -> tuple[Arrays, dict[str, Any]]:
        """As the wrapped strategy, and what the stages of ``auto`` follow from."""
        arrays, values = self.wrapped.state_dict()
        if self.lengths is None:
            values = {**values, STAGED: self._began_with or self.num_rounds}
        return arrays, values

    def load_state_dict(self, arrays: Arrays, values: dict[str, Any]) -> None:
        """As the wrapped strategy; with more rounds no stage begins again."""
        self._began_with = int(values.get(STAGED) or 0)
        self.wrapped.load_state_dict(arrays, values)

    def __getattr__(self, name: str) -> Any:
        if name == "strategy":
            raise AttributeError(name)
        return getattr(self.strategy, name)

    def nodes(self, server_round: int, sampled: int) -> int:
        """Return n, how many replies a round (from 1) waits for.

        It is min(N, 2^r n0) in stage r, with N sampled clients.
        """
        if sampled <= self.initial_nodes:
            return sampled
        lengths: Sequence[int] | None = self.lengths
        if lengths is None:
            rounds = self._began_with or self.num_rounds or 0
            allowed = "given for rounds-per-stage='auto'"
            require(rounds > 0, "num_rounds", self.num_rounds, allowed)
            lengths = automatic_stages(self.initial_nodes, sampled, rounds)
        return nodes_of(server_round, sampled, self.initial_nodes, lengths)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        *args: Any,
        **kwargs: Any,
    ) -> Result:
        """Run as Flower's ``Strategy.start``, by real arrival order on any grid."""
        self.num_rounds = num_rounds
        return super().start(grid, initial_arrays, num_rounds, *args, **kwargs)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the strategy sample; an `ArrivalGrid` then waits for n replies only."""
        messages = list(
            self.strategy.configure_train(server_round, arrays, config, grid)
        )
        if isinstance(grid, ArrivalGrid):
            self._check_end(len(messages))
            grid.wait_for(self.nodes(server_round, len(messages)), self._is_valid)
        elif not self._waits_said:
            self._waits_said = True
            log(WARNING, "SRPFL waits for all clients: this grid closes no round early")
        return messages

    def _check_end(self, sampled: int) -> None:
        """Say once, in the beginning, if the last stage will not be reached."""
        if self._end_checked or self.num_rounds is None:
            return
        self._end_checked = True
        count = self.nodes(self.num_rounds, sampled)
        if count < sampled:
            log(
                WARNING,
                "SRPFL ends before its last stage: round %d, the last one, waits for "
                "%d of %d sampled clients; rounds-per-stage='auto' comes to all",
                self.num_rounds,
                count,
                sampled,
            )

    def _is_valid(self, reply: Message) -> bool:
        check = getattr(self.strategy, "check_train_reply", None)
        if check is None:
            return True
        try:
            self.pending.check_content(reply)
            check(reply)
        except InvalidReplyError:
            return False
        return True

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Let the strategy aggregate the first replies."""
        return self.strategy.aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the strategy evaluate."""
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Let the strategy aggregate the evaluation."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Log what will run."""
        log(
            INFO,
            "\t├──> SRPFL: the first %d clients, doubled after %s rounds",
            self.initial_nodes,
            self.lengths or "auto",
        )
        self.strategy.summary()


class LGSRPFL(SRPFL):
    """SRPFL over LG-FedAvg."""

    base = "lg-fedavg"


class FLANP(SRPFL):
    """SRPFL over FedAvg: the same doubling (Reisizadeh et al., 2022)."""

    base = "fedavg"


class SRPFLFLUTE(SRPFL):
    """SRPFL over FLUTE."""

    base = "flute"
