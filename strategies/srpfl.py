"""SRPFL (Tziotis et al., TMLR 2023): begin with the fastest clients, then double.

Each round uses the first n replies only, and n doubles from stage to stage. Clients
outside the n keep their personal parts. SRPFL wraps any strategy, as Flower's
differential-privacy strategies do.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from logging import INFO, WARNING
from typing import Annotated, Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flwr_frl.strategies.algorithms import build_strategy, strategy_class
from flwr_frl.strategies.base import BaseStrategy
from flwr_frl.strategies.grids.arrivals import ArrivalGrid, RealArrivals, with_retries
from flwr_frl.strategies.grids.speeds import Times, speed_model
from flwr_frl.strategies.server.participation import Participation
from flwr_frl.strategies.traits import Algorithm
from flwr_frl.task.settings import (
    Free,
    Range,
    Settings,
    SettingsError,
    require,
    validate,
)

# Key of the number of rounds from which the stages of ``auto`` follow, in the state of
# the wrapped strategy.
STAGED = "staged-rounds"


class FirstReplies(Participation):
    """Close each round at the first n valid replies of the sampled clients.

    Parameters
    ----------
    sampling : Participation
        Rule that samples the clients.
    initial_nodes : int
        Number n of replies in the first stage.
    lengths : sequence of int, optional
        Rounds of each stage; by default they follow from the number of rounds.
    num_rounds : int, optional
        Number of rounds of the run.
    state : dict, optional
        State of the strategy. It stores the number of rounds, so that a resumed run
        with more rounds repeats no stage.
    """

    def __init__(
        self,
        sampling: Participation,
        initial_nodes: int,
        lengths: Sequence[int] | None = None,
        num_rounds: int | None = None,
        state: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(sampling.fraction, sampling.least, sampling.seed, False)
        self.initial_nodes, self.lengths = initial_nodes, lengths
        self.num_rounds = num_rounds
        self._state: dict[str, Any] = {} if state is None else state
        self._end_checked = self._warned = False
        if num_rounds:
            self.set_rounds(num_rounds)

    def set_rounds(self, num_rounds: int) -> None:
        """Set the number of rounds, from which stages of ``auto`` follow."""
        self.num_rounds = num_rounds
        if self.lengths is None:
            self._state[STAGED] = num_rounds

    def check(self, num_clients: int, sample: Callable[[], list[int]]) -> None:
        """Raise `SettingsError` unless these clients suffice for the first stage."""
        super().check(num_clients, sample)
        sampled = len(sample())
        allowed = f"at most {sampled}, the number of sampled clients"
        valid = self.initial_nodes <= sampled
        require(valid, "initial-nodes", self.initial_nodes, allowed)

    def adapt_grid(self, grid: Grid, name_of: Callable[[int], str]) -> Grid:
        """Return a grid that closes rounds by the real order of arrival."""
        return grid if isinstance(grid, ArrivalGrid) else RealArrivals(grid, name_of)

    def nodes(self, server_round: int, sampled: int) -> int:
        """Return n, the number of replies that close a round (from 1).

        It is min(N, 2^r n0) in stage r, with N sampled clients.
        """
        if sampled <= self.initial_nodes:
            return sampled
        lengths = self.lengths
        if lengths is None:
            rounds = self._state.get(STAGED) or self.num_rounds or 0
            allowed = "given for rounds-per-stage='auto'"
            require(rounds > 0, "num_rounds", self.num_rounds, allowed)
            lengths = automatic_stages(self.initial_nodes, sampled, rounds)
        return nodes_of(server_round, sampled, self.initial_nodes, lengths)

    def open(
        self,
        server_round: int,
        messages: list[Message],
        grid: Grid,
        is_valid: Callable[[Message], bool],
    ) -> None:
        """Let an `ArrivalGrid` wait for n replies only."""
        if isinstance(grid, ArrivalGrid):
            self._check_end(len(messages))
            grid.wait_for(self.nodes(server_round, len(messages)), is_valid)
        elif not self._warned:
            self._warned = True
            log(WARNING, "SRPFL waits for all clients: this grid closes no round early")

    def _check_end(self, sampled: int) -> None:
        """Warn once, at the beginning, if the last stage will not be reached."""
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


class SRPFL(
    Algorithm,
    # Simulated clients have no speed of their own, and all are compared by one clock.
    simulation_defaults={"speed-model": "fixed"},
):
    """Use the first n replies of each round, whatever the wrapped strategy does.

    Values out of their range raise `SettingsError`.

    Parameters
    ----------
    strategy : Strategy
        Any strategy, including Flower's own; it aggregates the replies.
    initial_nodes : int, default 2
        Number n of replies in the first stage.
    rounds_per_stage : int, sequence of int or str, default "auto"
        Rounds of each stage. A sequence sets the length of each stage, and its last
        entry applies to all later stages. As a setting, a comma-separated list,
        ``theory`` (see `theory_stages`) or ``auto``: stages of equal lengths in the
        first half of the rounds, and all sampled clients in the second half.
    srpfl_base : str, default "fedrep"
        Name or import path of the wrapped strategy, if settings choose it.
    contraction : float, default 0.1
        Contraction a of linear FedRep in a round, in (0, 1), for ``theory``; smaller
        values give longer stages.
    num_rounds : int, optional
        Number of rounds, for ``auto``; settings and ``start`` set it as well.
    """

    # Name of the wrapped algorithm; the setting srpfl-base if empty.
    base: ClassVar[str] = ""

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
        validate(self)
        ours = strategy if isinstance(strategy, BaseStrategy) else None
        noise = ours.settings.server_dp_noise if ours else 0.0
        allowed = "0 with SRPFL: who is among the first depends on the data"
        require(noise == 0, "server-dp-noise", noise, allowed)
        allowed = "used with a speed-model other than 'none'"
        theory = rounds_per_stage == "theory"
        require(not theory, "rounds-per-stage", rounds_per_stage, allowed)
        automatic = rounds_per_stage == "auto"
        self.participation = FirstReplies(
            ours.participation if ours else Participation(1.0, 1, 0),
            initial_nodes,
            None if automatic else listed_stages(rounds_per_stage),
            num_rounds,
            ours.state if ours else None,
        )

    @classmethod
    def wrapped_settings(cls, settings: Settings) -> Settings:
        """Return the settings of the strategy that is wrapped."""
        name = cls.base or str(settings["srpfl-base"])
        wrapped = {**settings, "algorithm": name}
        strategy = strategy_class(wrapped)
        if issubclass(strategy, SRPFL):
            raise SettingsError(
                f"srpfl-base is {name!r}; expected an algorithm that is not SRPFL"
            )
        if strategy.traits.srpfl_settings is None:
            raise SettingsError(
                f"srpfl-base is {name!r}; expected an algorithm that samples clients"
            )
        return {**wrapped, **strategy.traits.srpfl_settings}

    @classmethod
    def from_settings(cls, settings: Settings) -> BaseStrategy:
        """Return the strategy that the settings name, with SRPFL's participation."""
        wrapped = build_strategy(cls.wrapped_settings(settings))
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
        return cls(wrapped, initial_nodes, stages, num_rounds=rounds).install(wrapped)

    def install(self, strategy: BaseStrategy) -> BaseStrategy:
        """Give a strategy SRPFL's participation, and return it."""
        strategy.participation = self.participation
        return strategy

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        *args: Any,
        **kwargs: Any,
    ) -> Result:
        """Run as Flower's ``Strategy.start``, by real order of arrival on any grid."""
        self.participation.set_rounds(num_rounds)
        if isinstance(self.strategy, BaseStrategy):
            ours = self.install(self.strategy)
            return ours.start(grid, initial_arrays, num_rounds, *args, **kwargs)
        longest = float(kwargs.get("timeout", math.inf))
        grid = self.participation.adapt_grid(with_retries(grid, str, longest), str)
        return super().start(grid, initial_arrays, num_rounds, *args, **kwargs)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the strategy sample; an `ArrivalGrid` then waits for n replies only."""
        wrapped = self.strategy
        messages = list(wrapped.configure_train(server_round, arrays, config, grid))
        is_valid = getattr(wrapped, "_is_valid", lambda reply: True)
        self.participation.open(server_round, messages, grid, is_valid)
        return messages

    # The other hooks are those of the wrapped strategy; Flower requires methods.

    def aggregate_train(  # noqa: D102
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        return self.strategy.aggregate_train(server_round, replies)

    def configure_evaluate(  # noqa: D102
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(  # noqa: D102
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Log the configuration."""
        text = "\t├──> SRPFL: the first %d clients, doubled after %s rounds"
        log(INFO, text, self.initial_nodes, self.participation.lengths or "auto")
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


# Stages (Tziotis et al., section 4).


def nodes_of(
    server_round: int, sampled: int, initial_nodes: int, lengths: Sequence[int]
) -> int:
    """Return min(N, 2^r n0), how many replies a round (from 1) waits for.

    N clients are sampled, and r is the round's stage: the stages have these lengths,
    and those that follow have the last one's.
    """
    count, begins, stage = initial_nodes, 1, 0
    while count < sampled:
        begins += lengths[min(stage, len(lengths) - 1)]
        if server_round < begins:
            return count
        count, stage = 2 * count, stage + 1
    return sampled


def automatic_stages(initial_nodes: int, sampled: int, rounds: int) -> list[int]:
    """Return the lengths of all stages but the last, with all N sampled clients.

    They share the first half of the rounds, rounded down; what is left over goes to
    the first ones. With fewer rounds than stages there the later ones are left out.
    """
    stages = 0
    while initial_nodes * 2**stages < sampled:
        stages += 1
    each, left = divmod(rounds // 2, stages) if stages else (0, 0)
    return [each + (stage < left) for stage in range(stages)]


def listed_stages(lengths: int | str | Sequence[int]) -> tuple[int, ...]:
    """Return the stages' lengths: a number, several, or a text of them with commas.

    Raises `SettingsError` for none, and for one that is no number of at least 1.
    """
    if isinstance(lengths, str):
        parts = [part.strip() for part in lengths.split(",") if part.strip()]
        if not parts or not all(part.isdecimal() and int(part) >= 1 for part in parts):
            raise SettingsError(
                f"rounds-per-stage is {lengths!r}; expected a number of rounds, "
                "several with commas between them, each at least 1, 'theory' or 'auto'"
            )
        return tuple(map(int, parts))
    found = (lengths,) if isinstance(lengths, int) else tuple(lengths)
    valid = bool(found) and min(found) >= 1
    allowed = "a list of at least one number, each at least 1"
    require(valid, "rounds-per-stage", lengths, allowed)
    return found


def theory_stages(
    initial_nodes: int, expected_arrivals: Times, contraction: float
) -> list[int]:
    """Return the lengths of all stages but the last by the theory.

    τ_r is 2 log(2 (E[T_(2n)] − E[T_(n)]) / (E[T_(n)] − E[T_(n/2)])) / log(1/(1 − a)),
    rounded up and at least 1 (SRPFL, section 4), for n = 2^r n0 and the contraction a.
    ``expected_arrivals`` are E[T_(n)] for n = 1 … N.
    """
    total = len(expected_arrivals)

    def arrival(n: int) -> float:
        return float(expected_arrivals[min(n, total) - 1]) if n else 0.0

    lengths, n = [], initial_nodes
    while n < total:
        later, earlier = arrival(2 * n) - arrival(n), arrival(n) - arrival(n // 2)
        ratio = 2 * later / earlier if earlier > 0 else 1.0
        rounds = 2 * math.log(max(ratio, 1.0)) / -math.log(1 - contraction)
        lengths.append(max(1, math.ceil(rounds)))
        n *= 2
    return lengths or [1]
