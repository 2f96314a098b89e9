"""SRPFL (Tziotis et al., TMLR 2023): start with the fastest clients, then double.

Each round ends with the first n replies, and n doubles from stage to stage. A client
whose reply comes later keeps its previous personal part.
"""

import math
from itertools import accumulate
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from flwr_frl.common.errors import require
from flwr_frl.common.settings import Setting, Settings, declared, setting
from flwr_frl.strategies.algorithms import strategy_class
from flwr_frl.strategies.base import Strategy, inherits
from flwr_frl.strategies.grids.inbox import Closing
from flwr_frl.strategies.grids.speeds import SpeedModel, Times, speed_model
from flwr_frl.strategies.server.round import Round
from flwr_frl.strategies.server.traits import Algorithm
from flwr_frl.strategies.wrapping import ClosesEarly, Wrapping

STAGES = "numbers with commas between, theory or auto"
# Key in the strategy's state: number of rounds that ``auto`` divides into stages.
STAGED = "staged-rounds"


def number_of_stages(initial_nodes: int, sampled: int) -> int:
    """Return the number of stages with fewer than all N sampled clients."""
    return max(0, math.ceil(math.log2(sampled / initial_nodes))) if sampled else 0


def automatic_stages(initial_nodes: int, sampled: int, rounds: int) -> list[int]:
    """Return the lengths of all stages but the last, which has all N sampled clients.

    These stages divide the first half of the rounds, rounded down, equally. If there is
    a remainder, the first stages are one round longer. If there are more stages than
    rounds in that half, the later ones have no rounds.
    """
    stages = number_of_stages(initial_nodes, sampled)
    each, left = divmod(rounds // 2, stages) if stages else (0, 0)
    return [each + (stage < left) for stage in range(stages)]


def listed_stages(lengths: int | str) -> list[int]:
    """Return the lengths of stages from a number, or numbers with commas between them.

    Raises `SettingsError` if one is not an integer of at least 1.
    """
    texts = [text.strip() for text in str(lengths).split(",")]
    listed = [int(text) for text in texts if text.isdecimal()]
    allowed = "a number of rounds, at least 1, several with commas between them, "
    allowed += "'theory' or 'auto'"
    valid = len(listed) == len(texts) and min(listed) >= 1
    require(valid, "rounds-per-stage", lengths, allowed)
    return listed


def theory_stages(
    initial_nodes: int, expected_arrivals: Times, contraction: float
) -> list[int]:
    """Return the lengths of all stages but the last by the theory (section 4).

    Stage r, with n = 2^r n0 replies, has
    2 log(2 (E[T_(2n)] − E[T_(n)]) / (E[T_(n)] − E[T_(n/2)])) / log(1/(1 − a)) rounds,
    rounded up and at least 1, where a is the contraction. ``expected_arrivals`` are
    E[T_(n)], the expected time of the n-th reply, for n = 1 … N.
    """
    total = len(expected_arrivals)

    def arrival(n: int) -> float:
        return float(expected_arrivals[min(n, total) - 1]) if n else 0.0

    lengths, n = [], initial_nodes
    while n < total:
        later, earlier = arrival(2 * n) - arrival(n), arrival(n) - arrival(n // 2)
        ratio = 2 * later / earlier if earlier > 0 else 1.0
        rounds = 2 * math.log(max(ratio, 1.0)) / -math.log1p(-contraction)
        lengths.append(max(1, math.ceil(rounds)))
        n *= 2
    return lengths or [1]


class FirstReplies(ClosesEarly):
    """Close each round at the first n valid replies of the sampled clients.

    Parameters
    ----------
    strategy : Strategy
        The strategy, whose sampling does not change. Its state saves the stage and the
        number of rounds, so that a run that is resumed with more rounds keeps its
        stages.
    initial_nodes : int
        The number of replies n0 in the first stage.
    lengths : list of int, optional
        Length of each stage in rounds; the last one also holds for all later stages.
        By default `automatic_stages`.
    """

    def __init__(
        self, strategy: Strategy, initial_nodes: int, lengths: list[int] | None = None
    ) -> None:
        super().__init__(strategy)
        self.initial_nodes, self.lengths = initial_nodes, lengths

    def check_clients(self, num_clients: int) -> None:
        """Raise `SettingsError` unless there are enough clients for the first stage."""
        super().check_clients(num_clients)
        sampled = len(self.strategy.sample(1, list(range(num_clients))))
        allowed = f"at most {sampled}, the number of sampled clients"
        valid = self.initial_nodes <= sampled
        require(valid, "initial-nodes", self.initial_nodes, allowed)
        self.check_replies("initial-nodes", self.initial_nodes, sampled)

    def fewest_replies(self, sampled: int) -> int:
        """Return n0, or all if these are fewer."""
        return min(self.initial_nodes, sampled)

    def set_rounds(self, num_rounds: int) -> None:
        """Set the number of rounds that ``auto`` divides into stages."""
        if self.lengths is None:
            self.strategy.state[STAGED] = num_rounds

    def wanted(self, server_round: int, sampled: int) -> int:
        """Return the number of replies that close a round: n = min(N, 2^r n0).

        The round is counted from 1 and belongs to stage r, counted from 0; N clients
        are sampled.
        """
        replies: int = self.initial_nodes * 2 ** self._stage(server_round, sampled)
        return min(sampled, replies)

    def _stage(self, server_round: int, sampled: int) -> int:
        """Return a round's stage, from 0."""
        lengths, count = self.lengths, number_of_stages(self.initial_nodes, sampled)
        if lengths is None:
            rounds = int(self.strategy.state.get(STAGED, 0))
            allowed = "given for rounds-per-stage='auto'"
            require(rounds > 0 or not count, "num_rounds", rounds, allowed)
            lengths = automatic_stages(self.initial_nodes, sampled, rounds)
        # The last length also holds for all later stages.
        ends = accumulate([*lengths, *lengths[-1:] * count][:count])
        return sum(server_round > end for end in ends)

    def open(self, round: Round, messages: list[Message], grid: Grid) -> None:
        """Have the grid close the round at n replies."""
        wanted = self.wanted(round.number, self.clients)
        missing = wanted if wanted < len(messages) else math.inf
        self.close_by(Closing(missing, round.is_valid), grid)


class SRPFL(Wrapping):
    """Use the first n replies of each round in any strategy.

    Values out of their range raise `SettingsError`.

    Parameters
    ----------
    strategy : Strategy
        The strategy that aggregates the replies.
    initial_nodes : int, default 2
        The number of replies n in the first stage; it doubles with each stage. An
        ``aggregation`` other than the mean needs at least 2f + 1 replies,
        ``multi-krum`` 2f + 3, where f is ``byzantine-fraction`` times the number of
        sampled clients, rounded up.
    rounds_per_stage : int or str, default "auto"
        Length of the stages in rounds: one number for all, or several with commas
        between them, of which the last also holds for all later stages. ``auto``:
        stages of equal lengths in the first half of the rounds, and all sampled clients
        in the second. ``theory`` (with a speed model): lengths by `theory_stages`.
    srpfl_base : str, default "fedrep"
        Name or import path of the wrapped strategy, if settings choose it.
    contraction : float, default 0.1
        a in (0, 1), the contraction of linear FedRep in one round, for ``theory``;
        smaller values give longer stages.
    num_rounds : int, optional
        Number of rounds, for ``auto``; settings and ``start`` set it as well.
    speeds : SpeedModel, optional
        Speeds of the simulated clients, for ``theory``.
    """

    initial_nodes: int = setting(2, ge=1)
    rounds_per_stage: int | str = setting("auto", form=STAGES, safe=True)
    srpfl_base: str = setting("fedrep", form="an algorithm", code=True)
    contraction: float = setting(0.1, gt=0, lt=1)

    base_setting = "srpfl-base"

    def __new__(  # type: ignore[misc]
        cls,
        strategy: Strategy,
        *,
        num_rounds: int | None = None,
        speeds: SpeedModel | None = None,
        **values: Any,
    ) -> Strategy:
        """Return the strategy with `FirstReplies`."""
        cls._check_base(type(strategy), "strategy", type(strategy).__name__)
        settings = cls._settings_type(**values)
        noise = strategy.settings.server_dp_noise
        allowed = "0 with SRPFL: who is among the first depends on the data"
        require(noise == 0, "server-dp-noise", noise, allowed)
        stages, n0 = settings.rounds_per_stage, settings.initial_nodes
        lengths: list[int] | None = None
        if stages == "theory":
            allowed = "another value without a speed-model"
            require(bool(speeds), "rounds-per-stage", stages, allowed)
            assert speeds
            sampled = len(strategy.sample(1, list(range(speeds.clients))))
            arrivals = speeds.expected_arrivals(sampled)
            lengths = theory_stages(n0, arrivals, settings.contraction)
        elif stages != "auto":
            lengths = listed_stages(stages)
        participation = FirstReplies(strategy, n0, lengths)
        strategy._run.participation = participation
        if num_rounds:
            participation.set_rounds(num_rounds)
        return strategy

    @classmethod
    def wrapped_settings(cls, settings: Settings) -> dict[str, Setting]:
        """Return the settings of the wrapped strategy."""
        wrapped = super().wrapped_settings(settings)
        # The linear case in the paper always has the QR step (its algorithm 2).
        if "orthonormalize" in declared(strategy_class(wrapped)):
            wrapped["orthonormalize"] = True
        return wrapped

    @classmethod
    def allowed_base(cls, strategy: type[Algorithm]) -> str:
        """Return "" if a strategy samples clients that train at once."""
        samples = inherits(strategy, "configure_train", "sample", "_adapt_grid")
        return "" if samples else "an algorithm whose sampled clients train at once"

    @classmethod
    def _build(cls, settings: Settings, *positional: Any, **others: Any) -> Strategy:
        """Return the wrapped strategy of the settings, with SRPFL's participation."""
        # The theory needs the speeds of at least one client.
        clients = max(1, int(settings["num-clients"]) - int(settings["new-clients"]))
        return super()._build(settings, speeds=speed_model(settings, clients))


class LGSRPFL(SRPFL):
    """SRPFL over LG-FedAvg."""

    base = "lg-fedavg"


class FLANP(SRPFL):
    """SRPFL over FedAvg: the same doubling (Reisizadeh et al., 2022).

    As in SRPFL's comparison, stages end by their lengths; in FLANP's paper they end
    once the gradient is small.
    """

    base = "fedavg"


class FLANPFT(FLANP):
    """FLANP; clients test the model with a fine-tuned head."""

    base = "fedavg-ft"


class SRPFLFLUTE(SRPFL):
    """SRPFL over FLUTE."""

    base = "flute"
