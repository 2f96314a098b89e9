"""The base of strategies that change who takes part in another strategy's rounds."""

from typing import Any, ClassVar

from flwr.serverapp import Grid

from flwr_frl.common.errors import SettingsError, require
from flwr_frl.common.settings import Setting, Settings
from flwr_frl.strategies.algorithms import build_strategy, strategy_class
from flwr_frl.strategies.base import Strategy
from flwr_frl.strategies.grids.inbox import Closing
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

    def fewest_replies(self, sampled: int) -> int:
        """Return 1, unless a subclass waits for more."""
        return 1

    def check_replies(self, setting: str, count: int, clients: int) -> None:
        """Raise `SettingsError` if the first replies may be too few for the rule.

        All Byzantine ones of the clients may be the fastest.
        """
        settings = self.strategy.settings
        rule, share = settings.aggregation, settings.byzantine_fraction
        needed = least_replies(rule, clients, share)
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
    """Give another strategy a different participation.

    A call returns the other strategy: ``SRPFL(FedRep())`` is a FedRep.
    """

    # Name of the wrapped algorithm; if empty, the setting `base_setting` names it.
    base: ClassVar[str] = ""
    base_setting: ClassVar[str]

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
    def _build(cls, settings: Settings, *positional: Any, **others: Any) -> Strategy:
        """Return the wrapped strategy of the settings, with another participation."""
        wrapped: Strategy = build_strategy(cls.wrapped_settings(settings))
        super()._build(settings, wrapped, **others)
        wrapped._run.participation.set_rounds(int(settings["num-server-rounds"]))
        return wrapped

    @classmethod
    def _check_base(cls, strategy: type[Any], setting: str, value: Any) -> None:
        allowed = "a strategy of this package that wraps no other one, such as FedRep"
        require(issubclass(strategy, Strategy), setting, value, allowed)
        allowed = cls.allowed_base(strategy)
        require(not allowed, setting, value, allowed)

    @classmethod
    def allowed_base(cls, strategy: type[Algorithm]) -> str:
        """Return "" if a strategy can be wrapped, or else which strategies can be."""
        raise NotImplementedError
