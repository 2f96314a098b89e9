"""Declarations of a strategy: its traits and its settings.

A subclass declares its traits in its class statement::

    class Mine(Strategy, client="package.module:MineClient", uses_mean="only"):
"""

import inspect
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from flwr.serverapp.strategy import Strategy as FlowerStrategy

from flwr_frl.common.errors import require
from flwr_frl.common.settings import (
    Checked,
    Settings,
    build,
    refuse_misspelt,
    setting,
    settings_of,
    with_traits,
)
from flwr_frl.strategies.server.aggregation import RULES, RuleName
from flwr_frl.strategies.server.optimizer import OptimizerName

# Rules that do not use `clip-norm`
UNCLIPPED = tuple(rule for rule in RULES if "clip" not in rule)
# Values of `server-optimizer` with which its other settings have no effect
NO_OPTIMIZER = {"server-optimizer": ("none",)}
NO_SECOND_MOMENT = {"server-optimizer": ("none", "momentum")}
NO_BETA2 = {"server-optimizer": ("none", "momentum", "adagrad")}
# Methods that algorithms override
STRATEGY_HOOKS = (
    *("aggregate", "begin", "check_reply", "for_evaluation", "initialize", "metrics"),
    *("per_client", "weights"),
)


@dataclass(frozen=True)
class StrategyTraits:
    """Requirements and capabilities of an algorithm, which subclasses inherit.

    Parameters
    ----------
    client : str
        Import path of the algorithm's client, ``package.module:Class``.
    uses_mean : {"only", "also", "never"}, default "only"
        How ``aggregate`` uses the shared arrays of replies. An override of it changes
        ``only`` to ``also``, unless its class declares otherwise.

        - ``only``: through `Round.mean`. Arrays that a client alone receives may return
          to this client. Client-level differential privacy, secure aggregation, a
          ``server-optimizer``, an ``upload-compressor`` and FedBuff need this. A
          simulation in one process without a speed model averages such replies as they
          arrive, so its memory does not grow with the number of clients.
        - ``also``: in other ways as well.
        - ``never``: not through `Round.mean`, so no rule of ``aggregation`` applies.
          The result may have other names and shapes than the arrays that were sent.
    replies_are_changes : bool, default False
        True if replies are differences from the arrays that were sent. The client then
        reports ``is-change``, and FedBuff cannot wrap the strategy.
    evaluate_last_round_only : bool, default False
        Evaluate the last round only, regardless of the settings.
    takes_newcomers : bool, default True
        True if training leaves a model for clients that join afterwards.
    """

    client: str = ""
    uses_mean: Literal["only", "also", "never"] = "only"
    replies_are_changes: bool = False
    evaluate_last_round_only: bool = False
    takes_newcomers: bool = True

    def __post_init__(self) -> None:
        """Check `uses_mean`."""
        known = self.uses_mean in ("only", "also", "never")
        require(known, "uses_mean", self.uses_mean, "only, also or never")

    @property
    def averages_models(self) -> bool:
        """True if replies are models, of which only the mean is used."""
        return self.uses_mean == "only" and not self.replies_are_changes


@dataclass(frozen=True)
class StrategySettings(Checked):
    """Settings of every strategy, which are its keyword arguments.

    Parameters
    ----------
    fraction_train : float, default 0.5
        Fraction of the connected clients that train in a round, rounded down.
    fraction_evaluate : float, default 1
        Fraction of the connected clients in an evaluation, rounded down but at least
        one client; 0 evaluates none. The results of a client are those of its last
        evaluation.
    min_train_nodes : int, default 1
        Minimum number of clients that train in a round.
    min_available_nodes : int, default 1
        Number of clients to wait for before the run begins.
    weighting : {"uniform", "examples"}, default "uniform"
        Weights of the mean: equal, or the number of training examples, limited to the
        number that the client reported at first. The server cannot verify this number,
        so only the mean uses it.
    aggregation : str, default "mean"
        Aggregation rule (`flwr_frl.strategies.server.aggregation`). A single Byzantine
        client can ruin the ``mean``. ``median``, ``trimmed-mean`` and ``multi-krum``
        give every client the same influence; they and ``geometric-median`` hold one
        array of all clients in memory at a time. ``centered-clip`` clips the
        differences from the last round's change.
    byzantine_fraction : float, default 0.2
        Fraction of a round's replies that ``trimmed-mean`` (at either end of each
        entry) and ``multi-krum`` assume to be Byzantine. With FedBuff and SRPFL it
        also determines the smallest ``buffer-size`` and ``initial-nodes``.
    clip_norm : float, default 0
        Largest norm of one client's change with ``clip``, or of its distance from the
        last round's change with ``centered-clip``; 0 is the median norm of the round.
    server_optimizer : str, default "none"
        Optimizer whose step along the change of the mean gives the new arrays
        (`flwr_frl.strategies.server.optimizer`): ``momentum`` (FedAvgM), ``adam``,
        ``yogi`` or ``adagrad``. Integers and statistics of batch norms become the mean.
        Algorithms that use replies in other ways than through a mean of models, such
        as SCAFFOLD, refuse it.
    server_optimizer_rate : float, default 0
        Step size η; 0 is 1 with ``momentum``, and 0.03 otherwise.
    server_optimizer_beta1 : float, default 0.9
        β1 of the momentum. The paper uses 0 with ``adagrad``.
    server_optimizer_beta2 : float, default 0.99
        β2 of the second moments of ``adam`` and ``yogi``.
    server_optimizer_tau : float, default 0.001
        τ, added to the root of the second moment.
    server_dp_noise : float, default 0
        Noise multiplier z of client-level differential privacy
        (`flwr_frl.strategies.server.privacy`): the mean of n clients' changes gets
        noise with the standard deviation z C/n; 0 (none) or at least 0.001.
    server_dp_clip : float, default 0
        Clipping norm C of one client's change of the shared arrays.
    server_dp_delta : float, default 0
        δ at which ε is computed; well below one over the number of clients.
    seed : int, default 0
        Seed of the sampling, which depends on the seed, the round and the clients'
        names only. In a run it is also the seed of partition, initial model and
        training.

    Raises
    ------
    SettingsError
        If a value is out of its range.
    """

    fraction_train: float = setting(0.5, gt=0, le=1)
    fraction_evaluate: float = setting(1.0, ge=0, le=1)
    min_train_nodes: int = setting(1, ge=1)
    min_available_nodes: int = setting(1, ge=1, may_differ="always")
    weighting: Literal["uniform", "examples"] = setting("uniform")
    aggregation: RuleName = setting("mean")
    byzantine_fraction: float = setting(
        0.2, ge=0, lt=0.5, unused_if={"aggregation": ("mean",)}
    )
    clip_norm: float = setting(0.0, ge=0, unused_if={"aggregation": UNCLIPPED})
    server_optimizer: OptimizerName = setting("none")
    server_optimizer_rate: float = setting(0.0, ge=0, unused_if=NO_OPTIMIZER)
    server_optimizer_beta1: float = setting(0.9, ge=0, lt=1, unused_if=NO_OPTIMIZER)
    server_optimizer_beta2: float = setting(0.99, ge=0, lt=1, unused_if=NO_BETA2)
    server_optimizer_tau: float = setting(0.001, gt=0, unused_if=NO_SECOND_MOMENT)
    server_dp_noise: float = setting(0.0, ge=0, le=1_000_000)
    server_dp_clip: float = setting(0.0, ge=0)
    server_dp_delta: float = setting(0.0, ge=0, lt=1)
    seed: int = setting(0, ge=0)


def check_settings(
    settings: StrategySettings, traits: StrategyTraits, name: str
) -> None:
    """Raise `SettingsError` if the class of an algorithm cannot use settings."""
    rule, noise = settings.aggregation, settings.server_dp_noise
    never = traits.uses_mean == "never" and rule != "mean"
    require(not never, "aggregation", rule, "mean: this algorithm averages no models")
    allowed = f"uniform with aggregation={rule!r}, which gives each one vote"
    valid = settings.weighting == "uniform" or rule == "mean"
    require(valid, "weighting", settings.weighting, allowed)
    steps, valid = settings.server_optimizer, traits.averages_models
    allowed = f"none for {name}: only methods that average models allow it"
    require(valid or steps == "none", "server-optimizer", steps, allowed)
    if not noise:
        return
    allowed = "0 for this algorithm: more is told of a client than a share of means"
    require(traits.uses_mean == "only", "server-dp-noise", noise, allowed)
    uniform, allowed = settings.weighting == "uniform", "uniform with server-dp-noise"
    require(uniform, "weighting", settings.weighting, allowed)
    require(rule == "mean", "aggregation", rule, "mean with server-dp-noise")


class Algorithm(FlowerStrategy):
    """A strategy that declares traits in its class statement and settings as fields."""

    _traits: ClassVar[StrategyTraits] = StrategyTraits()
    _settings_type: ClassVar[type[Any]] = Checked

    def __init_subclass__(cls, **traits: Any) -> None:
        """Derive the subclass's traits from the inherited ones.

        Raises
        ------
        SettingsError
            If a trait is unknown.
        """
        super().__init_subclass__()
        refuse_misspelt(cls, STRATEGY_HOOKS)
        # A class, which a strategy beside it names, or its import path.
        if isinstance(client := traits.get("client"), type):
            traits["client"] = f"{client.__module__}:{client.__qualname__}"
        cls._settings_type = settings_of(cls)
        parent = next(kind for kind in cls.__mro__[1:] if issubclass(kind, Algorithm))
        # An overriding method may use more than the mean. It may also be that of a base
        # that is no strategy.
        aggregates = inspect.getattr_static(cls, "aggregate", None)
        overrides = aggregates is not inspect.getattr_static(parent, "aggregate", None)
        if overrides and cls._traits.uses_mean == "only":
            traits = {"uses_mean": "also", **traits}
        cls._traits = with_traits(cls._traits, traits)

    @classmethod
    def _build(cls, settings: Settings, *positional: Any, **others: Any) -> Any:
        """Return the strategy with its declared arguments taken from settings.

        Raises `SettingsError` if a setting is out of its range.
        """
        return cls(*positional, **others, **vars(build(cls._settings_type, settings)))
