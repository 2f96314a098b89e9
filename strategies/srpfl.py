"""SRPFL (Tziotis et al., TMLR 2023): start with the fastest clients, then double.

Each round ends with the first n replies, and n doubles from stage to stage. A client
whose reply comes later keeps its previous personal part. FLANP's stopping rule
(Reisizadeh et al., 2022; SRPFL, remark 3.3) is an option: a stage ends once the mean
gradient is small.
"""

import math
from collections.abc import Callable, Sequence
from logging import INFO
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message
from flwr.common import log
from flwr.serverapp import Grid

from flwr_frl.common.arrays import values_of
from flwr_frl.common.settings import Setting, Settings, declared, require, setting
from flwr_frl.strategies.algorithms import build_strategy, strategy_class
from flwr_frl.strategies.base import Strategy
from flwr_frl.strategies.grids.inbox import Closing
from flwr_frl.strategies.grids.speeds import SpeedModel, Times, speed_model
from flwr_frl.strategies.server.round import Round
from flwr_frl.strategies.server.traits import Algorithm
from flwr_frl.strategies.wrapping import ClosesEarly, Wrapping

STAGES = "numbers with commas between, theory, gradient or auto"
# Keys in the strategy's state.
# Number of rounds that ``auto`` divides into stages.
STAGED = "staged-rounds"
# Stage, from 0, of ``gradient``, and the squared change of the first round.
STAGE, FIRST_CHANGE = "srpfl-stage", "first-change"


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


def listed_stages(lengths: int | str | Sequence[int]) -> list[int]:
    """Return the lengths of stages from a number, a list, or text with commas.

    Raises `SettingsError` if there are none, or one is not an integer of at least 1.
    """
    parts = lengths.split(",") if isinstance(lengths, str) else lengths
    parts = parts if isinstance(parts, Sequence) else [parts]
    texts = [text for part in parts if (text := str(part).strip())]
    listed = [int(text) for text in texts if text.isdecimal()]
    allowed = "a number of rounds, several with commas between them or in a list, each "
    allowed += "at least 1, 'theory', 'gradient' or 'auto'"
    valid = len(listed) == len(texts) and min(listed, default=0) >= 1
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
    lengths : sequence of int, optional
        Length of each stage in rounds; the last one also holds for all later stages.
        By default `automatic_stages`.
    threshold : float, default 0
        θ > 0 ends stages by FLANP's rule, and not by their lengths: stage r, with
        n = 2^r n0 clients, ends when ‖Δ‖² ≤ θ n0 / n ‖Δ_1‖². Δ is the change of the
        shared arrays in a round, and Δ_1 that of the first round. With one gradient
        step, Δ = −η ∇L_n, so this is FLANP's ‖∇L_n‖² ≤ 2 μ c / (n s) for s examples a
        client, with θ = 2 μ c / (n0 s ‖∇L_1‖²).
    """

    def __init__(
        self,
        strategy: Strategy,
        initial_nodes: int,
        lengths: Sequence[int] | None = None,
        threshold: float = 0.0,
    ) -> None:
        super().__init__(strategy)
        self.initial_nodes, self.lengths = initial_nodes, lengths
        self.threshold = threshold

    def check_clients(self, num_clients: int, sample: Callable[[], list[int]]) -> None:
        """Raise `SettingsError` unless there are enough clients for the first stage."""
        super().check_clients(num_clients, sample)
        sampled = len(sample())
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
        if self.threshold:
            stage: int = self.strategy.state.get(STAGE, 0)
            return stage
        lengths, count = self.lengths, number_of_stages(self.initial_nodes, sampled)
        if lengths is None and count:
            rounds = int(self.strategy.state.get(STAGED, 0))
            allowed = "given for rounds-per-stage='auto'"
            require(rounds > 0, "num_rounds", rounds, allowed)
            lengths = automatic_stages(self.initial_nodes, sampled, rounds)
        stage, end = 0, 0
        while lengths and stage < count:
            end += lengths[min(stage, len(lengths) - 1)]
            if server_round <= end:
                break
            stage += 1
        return stage

    def sample(self, server_round: int, nodes: list[int], others: int = 0) -> list[int]:
        """Return the nodes that train in a round."""
        # As many are sampled if none owes a reply.
        self.clients = self.target(len(nodes) + others)
        return super().sample(server_round, nodes, others)

    def open(self, round: Round, messages: list[Message], grid: Grid) -> None:
        """Have the grid close the round at n replies."""
        wanted = self.wanted(round.number, self.clients)
        missing = wanted if wanted < len(messages) else math.inf
        self.close_by(Closing(missing, round.is_valid), grid)

    def close(
        self, round: Round, arrays: ArrayRecord | None
    ) -> dict[str, float | list[int]]:
        """End the stage if the change is small."""
        is_last = self.wanted(round.number, self.clients) == self.clients
        if arrays is None or not self.threshold or is_last:
            return {}
        state, change = self.strategy.state, 0.0
        for name, array in arrays.items():
            new, old = values_of(array), round.arrays.get(name)
            if old is not None and new.dtype.kind == "f":
                moved = np.subtract(new, old, dtype=np.float64)
                change += float(np.sum(moved**2))
        first: float = state.setdefault(FIRST_CHANGE, change)
        stage = self._stage(round.number, self.clients)
        if change <= self.threshold / 2**stage * first:
            log(INFO, "SRPFL: stage %d ends with round %d", stage, round.number)
            state[STAGE] = stage + 1
        return {}


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
    rounds_per_stage : int, sequence of int or str, default "auto"
        Length of the stages in rounds: one number for all, or a list of numbers, of
        which the last also holds for all later stages. ``auto``: stages of equal
        lengths in the first half of the rounds, and all sampled clients in the second.
        ``theory`` (with a speed model): lengths by `theory_stages`. ``gradient``:
        FLANP's stopping rule, by ``stage-threshold``.
    srpfl_base : str, default "fedrep"
        Name or import path of the wrapped strategy, if settings choose it.
    contraction : float, default 0.1
        a in (0, 1), the contraction of linear FedRep in one round, for ``theory``;
        smaller values give longer stages.
    stage_threshold : float, default 0.1
        θ in (0, 1), for ``gradient``: a stage of n clients ends once the squared norm
        of a round's change of the shared arrays is at most θ n0 / n times that of the
        first round (`FirstReplies`).
    num_rounds : int, optional
        Number of rounds, for ``auto``; settings and ``start`` set it as well.
    speeds : SpeedModel, optional
        Speeds of the simulated clients, for ``theory``.
    """

    initial_nodes: int = setting(2, ge=1)
    rounds_per_stage: int | str | Sequence[int] = setting(
        "auto", form=STAGES, safe=True
    )
    srpfl_base: str = setting("fedrep", form="an algorithm", code=True)
    contraction: float = setting(0.1, gt=0, lt=1)
    stage_threshold: float = setting(0.1, gt=0, lt=1)

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
        lengths: Sequence[int] | None = None
        if stages == "theory":
            allowed = "another value without a speed-model"
            require(bool(speeds), "rounds-per-stage", stages, allowed)
            assert speeds
            sampled = len(strategy.sample(1, list(range(speeds.clients))))
            arrivals = speeds.expected_arrivals(sampled)
            lengths = theory_stages(n0, arrivals, settings.contraction)
        elif stages not in ("auto", "gradient"):
            lengths = listed_stages(stages)
        threshold = settings.stage_threshold if stages == "gradient" else 0.0
        participation = FirstReplies(strategy, n0, lengths, threshold)
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
        samples = all(
            getattr(strategy, name, None) is getattr(Strategy, name)
            for name in ("configure_train", "sample", "_adapt_grid")
        )
        return "" if samples else "an algorithm whose sampled clients train at once"

    @classmethod
    def _build(cls, settings: Settings) -> Strategy:
        """Return the wrapped strategy of the settings, with SRPFL's participation."""
        wrapped: Strategy = build_strategy(cls.wrapped_settings(settings))
        total, newcomers = int(settings["num-clients"]), int(settings["new-clients"])
        # The theory needs the speeds of at least one client.
        allowed = f"at most {total - 1}, so that one of {total} clients trains"
        require(newcomers < total, "new-clients", newcomers, allowed)
        super()._build(
            settings,
            wrapped,
            num_rounds=int(settings["num-server-rounds"]),
            speeds=speed_model(settings, total - newcomers),
        )
        return wrapped


class LGSRPFL(SRPFL):
    """SRPFL over LG-FedAvg."""

    base = "lg-fedavg"


class FLANP(SRPFL):
    """SRPFL over FedAvg: the same doubling (Reisizadeh et al., 2022).

    ``rounds-per-stage='gradient'`` is FLANP's own rule.
    """

    base = "fedavg"


class FLANPFT(FLANP):
    """FLANP; clients test the model with a fine-tuned head."""

    base = "fedavg-ft"


class SRPFLFLUTE(SRPFL):
    """SRPFL over FLUTE."""

    base = "flute"
