"""The base of strategies that change who takes part in another strategy's rounds."""

from collections.abc import Iterable
from typing import ClassVar, Self

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_frl.strategies.algorithms import strategy_class
from flwr_frl.strategies.base import BaseStrategy
from flwr_frl.strategies.server.participation import Participation
from flwr_frl.strategies.traits import Algorithm
from flwr_frl.task.settings import Settings, SettingsError


class Wrapping(Algorithm):
    """Run another strategy with a different participation.

    Attributes
    ----------
    strategy : Strategy
        The wrapped strategy.
    participation : Participation
        Its new participation.
    """

    # Name of the wrapped algorithm; the setting `base_setting` if empty.
    base: ClassVar[str] = ""
    base_setting: ClassVar[str]

    strategy: Strategy
    participation: Participation

    @classmethod
    def wrapped_settings(cls, settings: Settings) -> Settings:
        """Return the settings of the strategy that is wrapped.

        Raises `SettingsError` if that strategy cannot be wrapped.
        """
        name = cls.base or str(settings[cls.base_setting])
        wrapped = {**settings, "algorithm": name}
        strategy = strategy_class(wrapped)
        wraps = not issubclass(strategy, BaseStrategy)
        if reason := "wraps another one itself" if wraps else cls.refusal(strategy):
            raise SettingsError(
                f"{cls.base_setting} is {name!r}, which {reason}; expected an "
                "algorithm such as 'fedavg' or 'fedrep'",
                cls.base_setting,
            )
        return wrapped

    @classmethod
    def refusal(cls, strategy: type[Algorithm]) -> str:
        """Return why a strategy cannot be wrapped, after "which"; empty if it can."""
        raise NotImplementedError

    def install(self) -> Self:
        """Give the wrapped strategy its new participation."""
        if isinstance(self.strategy, BaseStrategy):
            self.strategy.participation = self.participation
        return self

    # The hooks are those of the wrapped strategy; Flower requires methods.

    def configure_train(  # noqa: D102
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self.strategy.configure_train(server_round, arrays, config, grid)

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
        self.strategy.summary()
