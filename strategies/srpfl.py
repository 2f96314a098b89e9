"""SRPFL (Tziotis et al., TMLR 2023): start with the fastest clients, then double.

Each round ends with the first n replies, and n doubles from stage to stage. A client
whose reply comes later keeps its previous personal part.
"""

from collections.abc import Sequence
from typing import Any, Literal

from flwr_frl.common.settings import (
    Setting,
    Settings,
    declared,
    require,
    setting,
)
from flwr_frl.strategies.algorithms import build_strategy, strategy_class
from flwr_frl.strategies.base import Strategy
from flwr_frl.strategies.first_replies import FirstReplies
from flwr_frl.strategies.grids.speeds import SpeedModel, speed_model
from flwr_frl.strategies.server.traits import Algorithm
from flwr_frl.strategies.stages import exact_stages, listed_stages, theory_stages
from flwr_frl.strategies.wrapping import Wrapping

# Values of ``rounds-per-stage`` that follow from the speeds.
THEORIES = ("theory", "theory-exact")
# Value of ``rounds-per-stage`` for FLANP's stopping rule.
BY_GRADIENT = "gradient"
STAGES = "numbers with commas between, theory, theory-exact, gradient or auto"


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
        ``theory`` (with a speed model): lengths by `theory_stages`; ``theory-exact``:
        by `exact_stages`, without the first stages that have no round. ``gradient``:
        FLANP's stopping rule, by ``stage-threshold``.
    srpfl_base : str, default "fedrep"
        Name or import path of the wrapped strategy, if settings choose it.
    contraction : float, default 0.1
        a in (0, 1), the contraction of linear FedRep in one round, for ``theory`` and
        ``theory-exact``; smaller values give longer stages.
    stage_threshold : float, default 0.1
        θ in (0, 1), for ``gradient``: a stage of n clients ends once the squared norm
        of a round's change of the shared arrays is at most θ n0 / n times that of the
        first round (`FirstReplies`).
    sample_for : {"round", "stage", "run"}, default "round"
        Sample the N clients in every round, once for a stage (remark 3.2), or once for
        the run. With ``run``, only the first n clients of a stage train until it ends,
        and they also take part in all later stages, as in FLANP (remark 3.3).
    doubles : {"clients", "examples"}, default "clients"
        Number that doubles from stage to stage: of the replies n, or of the training
        examples of the replies, beginning with the share n0 / N (appendix C).
    num_rounds : int, optional
        Number of rounds, for ``auto``; settings and ``start`` set it as well.
    speeds : SpeedModel, optional
        Speeds of the simulated clients, for ``theory`` and ``theory-exact``.
    communication_time : float, default 0
        Additional time of a round, for ``theory-exact``.
    """

    initial_nodes: int = setting(2, ge=1)
    rounds_per_stage: int | str | Sequence[int] = setting(
        "auto", form=STAGES, safe=True
    )
    srpfl_base: str = setting("fedrep", form="an algorithm", code=True)
    contraction: float = setting(0.1, gt=0, lt=1)
    stage_threshold: float = setting(0.1, gt=0, lt=1)
    sample_for: Literal["round", "stage", "run"] = setting("round")
    doubles: Literal["clients", "examples"] = setting("clients")

    base_setting = "srpfl-base"

    def __new__(  # type: ignore[misc]
        cls,
        strategy: Strategy,
        *,
        num_rounds: int | None = None,
        speeds: SpeedModel | None = None,
        communication_time: float = 0.0,
        **values: Any,
    ) -> Strategy:
        """Return the strategy with `FirstReplies`."""
        cls._check_base(type(strategy), "strategy", type(strategy).__name__)
        settings = cls._settings_type(**values)
        noise, rule = strategy.settings.server_dp_noise, strategy.settings.aggregation
        allowed = "0 with SRPFL: who is among the first depends on the data"
        require(noise == 0, "server-dp-noise", noise, allowed)
        allowed = f"clients with aggregation={rule!r}: a client that reports many "
        allowed += "examples would end rounds alone"
        valid = rule == "mean" or settings.doubles == "clients"
        require(valid, "doubles", settings.doubles, allowed)
        stages, n0 = settings.rounds_per_stage, settings.initial_nodes
        lengths: Sequence[int] | None = None
        if stages in THEORIES:
            allowed = "another value without a speed-model"
            require(bool(speeds), "rounds-per-stage", stages, allowed)
            assert speeds
            sampled = len(strategy.sample(1, list(range(speeds.num_clients))))
            arrivals = speeds.expected_arrivals(sampled)
            lengths = theory_stages(n0, arrivals, settings.contraction)
            if stages == "theory-exact":
                about = n0, arrivals, settings.contraction, communication_time
                lengths = exact_stages(*about)
                # The first stages may have no rounds.
                while len(lengths) > 1 and lengths[0] == 0:
                    lengths, n0 = lengths[1:], 2 * n0
                lengths = [max(1, length) for length in lengths]
        elif stages not in ("auto", BY_GRADIENT):
            lengths = listed_stages(stages)
        threshold = settings.stage_threshold if stages == BY_GRADIENT else 0.0
        rules = settings.sample_for, threshold, settings.doubles == "examples"
        participation = FirstReplies(strategy, n0, lengths, *rules)
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
        """Return "" if a strategy samples clients."""
        samples = all(
            getattr(strategy, name, None) is getattr(Strategy, name)
            for name in ("configure_train", "sample")
        )
        return "" if samples else "an algorithm that samples clients"

    @classmethod
    def from_settings(cls, settings: Settings) -> Strategy:
        """Return the wrapped strategy of the settings, with SRPFL's participation."""
        wrapped: Strategy = build_strategy(cls.wrapped_settings(settings))
        total, newcomers = int(settings["num-clients"]), int(settings["new-clients"])
        # The theory needs the speeds of at least one client.
        allowed = f"at most {total - 1}, so that one of {total} clients trains"
        require(newcomers < total, "new-clients", newcomers, allowed)
        cls._from(
            settings,
            wrapped,
            num_rounds=int(settings["num-server-rounds"]),
            speeds=speed_model(settings, total - newcomers),
            communication_time=float(settings["communication-time"]),
        )
        return wrapped


class LGSRPFL(SRPFL):
    """SRPFL over LG-FedAvg."""

    base = "lg-fedavg"


class FLANP(SRPFL):
    """SRPFL over FedAvg: the same doubling (Reisizadeh et al., 2022).

    ``rounds-per-stage='gradient' sample-for='run'`` are FLANP's own rules.
    """

    base = "fedavg"


class FLANPFT(FLANP):
    """FLANP; clients test the model with a fine-tuned head."""

    base = "fedavg-ft"


class SRPFLFLUTE(SRPFL):
    """SRPFL over FLUTE."""

    base = "flute"
