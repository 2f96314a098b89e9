"""The base of strategies that change who takes part in another strategy's rounds."""

from collections.abc import Mapping
from typing import Any, ClassVar

from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from flwr_frl.common.settings import Setting, Settings, SettingsError, require
from flwr_frl.strategies.algorithms import strategy_class
from flwr_frl.strategies.base import Strategy
from flwr_frl.strategies.grids.closing import Closing, delegate
from flwr_frl.strategies.server.aggregation import assumed_byzantine, least_replies
from flwr_frl.strategies.server.round import Participation
from flwr_frl.strategies.server.traits import Algorithm


class ClosesEarly(Participation):
    """Participation in which a round closes before all clients have replied.

    Parameters
    ----------
    strategy : Strategy
        The strategy whose participation this will be.
    """

    waits_for_all = False

    def __init__(self, strategy: Strategy) -> None:
        base = strategy._run.participation
        super().__init__(base.fraction, base.least, base.seed)
        self.strategy = strategy
        # Number of clients of which the first ones reply.
        self.clients = 0
        if strategy.settings.aggregation != "mean":
            # It limits how few replies may close a round.
            self.uses = frozenset({"byzantine-fraction"})

    def check_replies(self, setting: str, count: int, clients: int) -> None:
        """Raise `SettingsError` if the first replies may be too few for the rule.

        All Byzantine ones of the clients may be the fastest.
        """
        settings = self.strategy.settings
        rule, share = settings.aggregation, settings.byzantine_fraction
        needed = least_replies(rule, clients, share, settings.bucket_size)
        allowed = f"at least {needed} with aggregation={rule!r} and byzantine-fraction="
        allowed += f"{share}: Byzantine clients may be the fastest of {clients}"
        require(count >= needed, setting, count, allowed)

    def byzantine_share(self, fraction: float, count: int) -> float:
        """Return the share of all Byzantine clients, who may all be among the first."""
        return assumed_byzantine(max(count, self.clients), fraction) / count

    def close_by(self, closing: Closing, grid: Grid) -> None:
        """Let a grid close the next round by a policy."""
        wait_for = getattr(grid, "wait_for", None)
        if wait_for is None:
            raise SettingsError(
                "speed-model is 'none'; expected fixed, dynamic, groups, correlated or "
                "a file: in simulation it determines which reply arrives first. On "
                "real nodes, pass flwr_frl.strategies.grids.inbox.Inbox(grid)",
                "speed-model",
            )
        wait_for(closing)


class Wrapping(Algorithm):
    """Run another strategy with a different participation.

    Attributes
    ----------
    strategy : Strategy
        The wrapped strategy.
    participation : Participation
        Its new participation.
    """

    # Name of the wrapped algorithm; if empty, the setting `base_setting` names it.
    base: ClassVar[str] = ""
    base_setting: ClassVar[str]

    strategy: Strategy
    participation: Participation

    @classmethod
    def wrapped_settings(cls, settings: Settings) -> dict[str, Setting]:
        """Return the settings of the wrapped strategy.

        Raises `SettingsError` if that strategy cannot be wrapped.
        """
        name = cls.base or str(settings[cls.base_setting])
        wrapped = {**settings, "algorithm": name}
        cls._check_base(strategy_class(wrapped), cls.base_setting, name)
        return wrapped

    @classmethod
    def _check_base(cls, strategy: type[Algorithm], setting: str, value: Any) -> None:
        allowed = "an algorithm that wraps no other one"
        require(issubclass(strategy, Strategy), setting, value, allowed)
        allowed = cls.allowed_base(strategy)
        require(not allowed, setting, value, allowed)

    @classmethod
    def allowed_base(cls, strategy: type[Algorithm]) -> str:
        """Return "" if a strategy can be wrapped, or else which strategies can be."""
        raise NotImplementedError

    def wrap(self, strategy: Strategy, values: Mapping[str, Any]) -> None:
        """Store the arguments; raise `SettingsError` if they are not allowed."""
        self._set_settings(values)
        allowed = "a strategy object of this package, such as FedRep()"
        require(isinstance(strategy, Strategy), "strategy", strategy, allowed)
        self._check_base(type(strategy), "strategy", type(strategy).__name__)
        self.strategy = strategy

    def set_rounds(self, num_rounds: int) -> None:
        """Set the number of rounds of the run."""
        raise NotImplementedError

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        *args: Any,
        **kwargs: Any,
    ) -> Result:
        """Run the wrapped strategy, as Flower's ``Strategy.start``."""
        self.set_rounds(num_rounds)
        return self.strategy.start(grid, initial_arrays, num_rounds, *args, **kwargs)

    # Abstract methods of Flower's `Strategy`, delegated to the wrapped strategy.
    configure_train = delegate("strategy", "configure_train")
    aggregate_train = delegate("strategy", "aggregate_train")
    configure_evaluate = delegate("strategy", "configure_evaluate")
    aggregate_evaluate = delegate("strategy", "aggregate_evaluate")
    summary = delegate("strategy", "summary")
