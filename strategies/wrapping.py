"""The base of strategies that change who takes part in another strategy's rounds."""

from typing import ClassVar

from flwr.serverapp.strategy import Strategy as FlowerStrategy

from flwr_frl.common.settings import Setting, Settings, require
from flwr_frl.strategies.algorithms import strategy_class
from flwr_frl.strategies.base import Strategy
from flwr_frl.strategies.grids.closing import delegate
from flwr_frl.strategies.server.participation import Participation
from flwr_frl.strategies.server.traits import Algorithm


class Wrapping(Algorithm):
    """Run another strategy with a different participation.

    Attributes
    ----------
    strategy : FlowerStrategy
        The wrapped strategy.
    participation : Participation
        Its new participation.
    """

    # Name of the wrapped algorithm; if empty, the setting `base_setting` names it.
    base: ClassVar[str] = ""
    base_setting: ClassVar[str]

    strategy: FlowerStrategy
    participation: Participation

    @classmethod
    def wrapped_settings(cls, settings: Settings) -> dict[str, Setting]:
        """Return the settings of the wrapped strategy.

        Raises `SettingsError` if that strategy cannot be wrapped.
        """
        name = cls.base or str(settings[cls.base_setting])
        wrapped = {**settings, "algorithm": name}
        strategy = strategy_class(wrapped)
        allowed = "an algorithm that wraps no other one"
        require(issubclass(strategy, Strategy), cls.base_setting, name, allowed)
        allowed = cls.allowed_base(strategy)
        require(not allowed, cls.base_setting, name, allowed)
        return wrapped

    @classmethod
    def allowed_base(cls, strategy: type[Algorithm]) -> str:
        """Return "" if a strategy can be wrapped, or else which strategies can be."""
        raise NotImplementedError

    def install(self) -> None:
        """Set the new participation, if the strategy is a `Strategy`."""
        if isinstance(self.strategy, Strategy):
            self.strategy.participation = self.participation
            if self.strategy.settings.aggregation != "mean":
                # It limits how few replies may close a round.
                self.participation.uses = frozenset({"byzantine-fraction"})

    # Abstract methods of Flower's `Strategy`, delegated to the wrapped strategy.
    configure_train = delegate("strategy", "configure_train")
    aggregate_train = delegate("strategy", "aggregate_train")
    configure_evaluate = delegate("strategy", "configure_evaluate")
    aggregate_evaluate = delegate("strategy", "aggregate_evaluate")
    summary = delegate("strategy", "summary")
