"""SRPFL (Tziotis et al., TMLR 2023): start with the fastest clients, then double.

Each round ends with the first n replies, and n doubles from stage to stage. A client
whose reply comes later keeps its personal part as it was. SRPFL wraps any strategy, as
Flower's differential-privacy strategies do.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from logging import INFO, WARNING
from typing import Annotated, Any

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flwr_frl.strategies.algorithms import build_strategy, strategy_class
from flwr_frl.strategies.base import BaseStrategy
from flwr_frl.strategies.grids.arrivals import ArrivalGrid, RealArrivals, with_retries
from flwr_frl.strategies.grids.speeds import speed_model
from flwr_frl.strategies.grids.stages import (
    automatic_stages,
    exact_stages,
    listed_stages,
    theory_stages,
)
from flwr_frl.strategies.server.participation import Participation
from flwr_frl.strategies.traits import Algorithm
from flwr_frl.strategies.wrapping import Wrapping
from flwr_frl.task.settings import (
    Choice,
    Free,
    Range,
    Settings,
    require,
    validate,
)

# Key, in the wrapped strategy's state, of the number of rounds that ``auto`` divides
# into stages.
STAGED = "staged-rounds"
# Values of ``rounds-per-stage`` that follow from the speeds.
THEORIES = ("theory", "theory-exact")


class FirstReplies(Participation):
    """Close each round at the first n valid replies of the sampled clients.

    Parameters
    ----------
    sampling : Participation
        How clients are sampled, which SRPFL does not change.
    initial_nodes : int
        The number of replies n in the first stage.
    lengths : sequence of int, optional
        Length of each stage in rounds; the last one also holds for all later stages.
        By default `automatic_stages`.
    num_rounds : int, optional
        Number of rounds of the run.
    state : dict, optional
        The strategy's state. It saves the number of rounds, so that a run that is
        resumed with more rounds keeps its stages.
    sample_for : {"round", "stage"}, default "round"
        How long a sample of clients is kept.
    examples_of : callable, optional
        Returns a node's number of training examples. A round then closes when the
        examples of the replies reach the share n / N of those of all sampled clients,
        so that they double from stage to stage (appendix C).
    """

    def __init__(
        self,
        sampling: Participation,
        initial_nodes: int,
        lengths: Sequence[int] | None = None,
        num_rounds: int | None = None,
        state: dict[str, Any] | None = None,
        sample_for: str = "round",
        examples_of: Callable[[int], int] | None = None,
    ) -> None:
        super().__init__(sampling.fraction, sampling.least, sampling.seed, False)
        self.initial_nodes, self.lengths = initial_nodes, lengths
        self.num_rounds = num_rounds
        self.sample_for = sample_for
        self.examples_of = examples_of
        self._state: dict[str, Any] = {} if state is None else state
        self._end_checked = self._warned = False
        if num_rounds:
            self.set_rounds(num_rounds)

    def set_rounds(self, num_rounds: int) -> None:
        """Set the number of rounds that ``auto`` divides into stages."""
        self.num_rounds = num_rounds
        if self.lengths is None:
            self._state[STAGED] = num_rounds

    def check(self, num_clients: int, sample: Callable[[], list[int]]) -> None:
        """Raise `SettingsError` unless there are enough clients for the first stage."""
        super().check(num_clients, sample)
        sampled = len(sample())
        allowed = f"at most {sampled}, the number of sampled clients"
        valid = self.initial_nodes <= sampled
        require(valid, "initial-nodes", self.initial_nodes, allowed)

    def adapt_grid(self, grid: Grid, name_of: Callable[[int], str]) -> Grid:
        """Return a grid that can close a round at the first replies."""
        return grid if isinstance(grid, ArrivalGrid) else RealArrivals(grid, name_of)

    def nodes(self, server_round: int, sampled: int) -> int:
        """Return the number of replies that close a round: min(N, 2^r n0).

        The round is counted from 1 and belongs to stage r, counted from 0; N clients
        are sampled.
        """
        return self._stage(server_round, sampled)[0]

    def sample(self, server_round: int, nodes: list[int], others: int = 0) -> list[int]:
        """Return the nodes that train in a round; for ``stage``, of its stage's first.

        The sample of a stage stays the same while the same nodes are connected.
        """
        chosen = super().sample(server_round, nodes, others)
        if self.sample_for == "round":
            return chosen
        first = self._stage(server_round, len(chosen))[1]
        return super().sample(first, nodes, others)

    def _stage(self, server_round: int, sampled: int) -> tuple[int, int]:
        """Return a round's number of replies and the first round of its stage."""
        lengths = self.lengths
        if lengths is None and sampled > self.initial_nodes:
            rounds = self._state.get(STAGED) or self.num_rounds or 0
            allowed = "given for rounds-per-stage='auto'"
            require(rounds > 0, "num_rounds", self.num_rounds, allowed)
            lengths = automatic_stages(self.initial_nodes, sampled, rounds)
        count, end, stage = self.initial_nodes, 0, 0
        while lengths and count < sampled:
            start, end = end, end + lengths[min(stage, len(lengths) - 1)]
            if server_round <= end:
                return count, start + 1
            count, stage = 2 * count, stage + 1
        return sampled, end + 1

    def open(
        self,
        server_round: int,
        messages: list[Message],
        grid: Grid,
        is_valid: Callable[[Message], bool],
    ) -> None:
        """Have the grid close the round at n replies, if it is an `ArrivalGrid`."""
        if isinstance(grid, ArrivalGrid):
            self._check_end(len(messages))
            sampled = len(messages)
            count, weight_of = self.nodes(server_round, sampled), self.examples_of
            if weight_of is not None and count < sampled:
                nodes = [message.metadata.dst_node_id for message in messages]
                count = max(1, count * sum(map(weight_of, nodes)) // sampled)
                grid.wait_for(count, is_valid, weight_of)
            else:
                grid.wait_for(count, is_valid)
        elif not self._warned:
            self._warned = True
            log(WARNING, "SRPFL waits for all clients: this grid closes no round early")

    def _check_end(self, sampled: int) -> None:
        """Warn in the first round if the run will not reach the last stage."""
        if self._end_checked or self.num_rounds is None:
            return
        self._end_checked = True
        count = self.nodes(self.num_rounds, sampled)
        if count < sampled:
            text = "SRPFL ends before its last stage: round %d, the last one, waits "
            text += "for %d of %d sampled clients; rounds-per-stage='auto' comes to all"
            log(WARNING, text, self.num_rounds, count, sampled)


class SRPFL(
    Wrapping,
    # In simulation a speed model decides whose replies come first.
    simulation_defaults={"speed-model": "fixed"},
):
    """Use the first n replies of each round in any strategy.

    Values out of their range raise `SettingsError`.

    Parameters
    ----------
    strategy : Strategy
        The strategy that aggregates the replies: one of ours, or Flower's.
    initial_nodes : int, default 2
        The number of replies n in the first stage; it doubles with each stage.
    rounds_per_stage : int, sequence of int or str, default "auto"
        Length of the stages in rounds: one number for all, or a list of numbers, of
        which the last also holds for all later stages. ``auto``: stages of equal
        lengths in the first half of the rounds, and all sampled clients in the second.
        ``theory`` (only as a setting): lengths by `theory_stages`; ``theory-exact``: by
        `exact_stages`, without the first stages that have no round. As a setting, a
        list has commas between the numbers.
    srpfl_base : str, default "fedrep"
        Name or import path of the wrapped strategy, if settings choose it.
    contraction : float, default 0.1
        a in (0, 1), the contraction of linear FedRep in one round, for ``theory`` and
        ``theory-exact``; smaller values give longer stages.
    sample_for : {"round", "stage"}, default "round"
        Sample the N clients in every round, or once for a stage (remark 3.2).
    doubles : {"clients", "examples"}, default "clients"
        What doubles from stage to stage: the number of replies n, or the training
        examples of the replies, beginning with the share n0 / N (appendix C).
    num_rounds : int, optional
        Number of rounds, for ``auto``; settings and ``start`` set it as well.
    """

    base_setting = "srpfl-base"
    participation: FirstReplies

    def __init__(
        self,
        strategy: Strategy,
        initial_nodes: Annotated[int, Range("[1, inf)")] = 2,
        rounds_per_stage: Annotated[
            int | str | Sequence[int],
            Free("numbers with commas between, theory, theory-exact or auto"),
        ] = "auto",
        srpfl_base: Annotated[str, Free("an algorithm")] = "fedrep",
        contraction: Annotated[float, Range("(0, 1)")] = 0.1,
        sample_for: Annotated[str, Choice("round", "stage")] = "round",
        doubles: Annotated[str, Choice("clients", "examples")] = "clients",
        num_rounds: int | None = None,
    ) -> None:
        self.strategy = strategy
        self.initial_nodes = initial_nodes
        self.contraction = contraction
        self.sample_for = sample_for
        self.doubles = doubles
        validate(self)
        ours = strategy if isinstance(strategy, BaseStrategy) else None
        noise = ours.settings.server_dp_noise if ours else 0.0
        allowed = "0 with SRPFL: who is among the first depends on the data"
        require(noise == 0, "server-dp-noise", noise, allowed)
        allowed = "used with a speed-model other than 'none'"
        theory = rounds_per_stage in THEORIES
        require(not theory, "rounds-per-stage", rounds_per_stage, allowed)
        automatic = rounds_per_stage == "auto"
        self.participation = FirstReplies(
            ours.participation if ours else Participation(1.0, 1, 0),
            initial_nodes,
            None if automatic else listed_stages(rounds_per_stage),
            num_rounds,
            ours.state if ours else None,
            sample_for,
            examples_in(ours) if ours and doubles == "examples" else None,
        )

    @classmethod
    def wrapped_settings(cls, settings: Settings) -> Settings:
        """Return the settings of the strategy that is wrapped."""
        wrapped = super().wrapped_settings(settings)
        return {**wrapped, **(strategy_class(wrapped).traits.srpfl_settings or {})}

    @classmethod
    def allowed_base(cls, strategy: type[Algorithm]) -> str:
        """Return "" if a strategy samples clients."""
        samples = strategy.traits.srpfl_settings is not None
        return "" if samples else "an algorithm that samples clients"

    @classmethod
    def from_settings(cls, settings: Settings) -> BaseStrategy:
        """Return the wrapped strategy of the settings, with SRPFL's participation."""
        wrapped = build_strategy(cls.wrapped_settings(settings))
        initial_nodes = int(settings["initial-nodes"])
        stages: str | Sequence[int] = str(settings["rounds-per-stage"])
        trained = int(settings["num-clients"]) - int(settings["new-clients"])
        speeds = speed_model(settings, trained)
        contraction = float(settings["contraction"])
        if stages in THEORIES and speeds is not None:
            sampled = len(wrapped.sample(1, list(range(speeds.num_clients))))
            arrivals = speeds.expected_arrivals(sampled)
            if stages == "theory":
                stages = theory_stages(initial_nodes, arrivals, contraction)
            else:
                added = float(settings["communication-time"])
                lengths = exact_stages(initial_nodes, arrivals, contraction, added)
                while len(lengths) > 1 and lengths[0] == 0:
                    lengths = lengths[1:]
                    initial_nodes *= 2
                stages = [max(1, length) for length in lengths]
        cls(
            wrapped,
            initial_nodes,
            stages,
            sample_for=str(settings["sample-for"]),
            doubles=str(settings["doubles"]),
            num_rounds=int(settings["num-server-rounds"]),
        ).install()
        return wrapped

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        *args: Any,
        **kwargs: Any,
    ) -> Result:
        """Run as Flower's ``Strategy.start``, with rounds of n replies on any grid."""
        self.participation.set_rounds(num_rounds)
        if isinstance(self.strategy, BaseStrategy):
            self.install()
            arguments = grid, initial_arrays, num_rounds, *args
            return self.strategy.start(*arguments, **kwargs)
        longest = float(kwargs.get("timeout", math.inf))
        grid = self.participation.adapt_grid(with_retries(grid, str, longest), str)
        return super().start(grid, initial_arrays, num_rounds, *args, **kwargs)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the wrapped strategy's messages; the round closes at n replies."""
        wrapped = self.strategy
        messages = list(wrapped.configure_train(server_round, arrays, config, grid))
        is_valid = getattr(wrapped, "_is_valid", lambda reply: True)
        self.participation.open(server_round, messages, grid, is_valid)
        return messages

    def summary(self) -> None:
        """Log the configuration."""
        text = "\t├──> SRPFL: the first %d clients, doubled after %s rounds"
        log(INFO, text, self.initial_nodes, self.participation.lengths or "auto")
        self.strategy.summary()


def examples_in(strategy: BaseStrategy) -> Callable[[int], int]:
    """Return a function that returns a node's declared number of training examples.

    It is at least 1, so that every reply counts.
    """

    def examples_of(node: int) -> int:
        client = strategy.clients.known.get(node)
        declared = client.properties.get("num-examples", 1) if client else 1
        return max(1, declared) if isinstance(declared, int) else 1

    return examples_of


class LGSRPFL(SRPFL):
    """SRPFL over LG-FedAvg."""

    base = "lg-fedavg"


class FLANP(SRPFL):
    """SRPFL over FedAvg: the same doubling (Reisizadeh et al., 2022)."""

    base = "fedavg"


class SRPFLFLUTE(SRPFL):
    """SRPFL over FLUTE."""

    base = "flute"
