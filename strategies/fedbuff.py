"""FedBuff (Nguyen et al., AISTATS 2022): asynchronous rounds with a buffer.

No client waits for another: C clients are at work at any time, and the server makes a
new version as soon as B changes have arrived, regardless of the versions from which
they started. The base algorithm, with its personal parts, is unchanged.
"""

from logging import INFO
from typing import Annotated, Any

from flwr.app import ArrayRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from flwr_frl.common.settings import Settings, build, require, setting, validate
from flwr_frl.strategies.algorithms import build_strategy
from flwr_frl.strategies.asynchronous import Asynchronous
from flwr_frl.strategies.base import Strategy
from flwr_frl.strategies.server.traits import Algorithm
from flwr_frl.strategies.wrapping import Wrapping

NEEDED = "averages and does not need all replies of a round"


class FedBuff(Wrapping):
    """Algorithm 1: x ← x + η_g/B Σ s(τ_i) Δ_i as soon as B changes have arrived.

    Δ_i is the difference of client i's arrays from the version that it was sent, τ_i
    the number of versions since then, and s(τ) = (1 + τ)^−a (section 5). With
    ``weighting`` or ``aggregation`` the base combines the same changes by its rule.
    Personal parts stay with their clients and change in their own training only. Client
    i is asked again, with the newest version, once its change has been used.

    Parameters
    ----------
    strategy : Strategy
        The base, with ``Traits.uses_mean="only"``; its replies must not be changes.
    async_base : str, default "fedavg"
        Name or import path of the base, if settings choose it.
    concurrency : int, default 10
        Number of clients C at work at any time.
    buffer_size : int, default 5
        Number of changes B that make a version (K in the paper, where it is 10 in most
        experiments); at most C. A client counts once in a version. An ``aggregation``
        other than the mean needs at least 2f + 1 changes, ``multi-krum`` 2f + 3, where
        f is ``byzantine-fraction`` times the number of clients, rounded up: all f may
        be so fast that they are in every version.
    staleness_exponent : float, default 0.5
        a in s(τ), the authors' value.
    max_staleness : int, default -1
        Largest τ of a change that counts; older ones are dropped. −1 sets no limit.
    global_learning_rate : float, default 1
        The server's step size η_g.
    """

    base_setting = "async-base"
    strategy: Strategy
    participation: Asynchronous
    # Changes are measured from the version that a client was sent.
    _from_sent = True

    def __init__(
        self,
        strategy: Strategy,
        async_base: Annotated[str, setting(form="an algorithm", code=True)] = "fedavg",
        concurrency: Annotated[int, setting(ge=1)] = 10,
        buffer_size: Annotated[int, setting(ge=1)] = 5,
        staleness_exponent: Annotated[float, setting(ge=0)] = 0.5,
        max_staleness: Annotated[int, setting(ge=-1)] = -1,
        global_learning_rate: Annotated[float, setting(gt=0)] = 1.0,
    ) -> None:
        allowed = "a strategy object, such as FedAvg()"
        require(not isinstance(strategy, type), "strategy", strategy, allowed)
        allowed = "one of this package's that " + NEEDED
        ours = isinstance(strategy, Strategy) and not self.allowed_base(type(strategy))
        require(ours, "strategy", type(strategy).__name__, allowed)
        self.strategy = strategy
        self.concurrency, self.buffer_size = concurrency, buffer_size
        self.staleness_exponent, self.max_staleness = staleness_exponent, max_staleness
        self.global_learning_rate = global_learning_rate
        validate(self)
        allowed = f"at most {concurrency}, the number of clients at work (concurrency)"
        require(buffer_size <= concurrency, "buffer-size", buffer_size, allowed)
        useless = max_staleness == 0 and concurrency > buffer_size
        allowed = "at least 1 with a concurrency above buffer-size: changes of clients "
        allowed += "that are still at work at the end of a version would never count"
        require(not useless, "max-staleness", max_staleness, allowed)
        noise = strategy.settings.server_dp_noise
        allowed = "0 with asynchronous rounds: the privacy account assumes rounds"
        require(noise == 0, "server-dp-noise", noise, allowed)
        self.participation = Asynchronous(
            strategy,
            concurrency,
            buffer_size,
            staleness_exponent,
            max_staleness,
            global_learning_rate,
            self._from_sent,
        )
        self.install()

    @classmethod
    def allowed_base(cls, strategy: type[Algorithm]) -> str:
        """Return "" if a strategy can average changes of different versions."""
        traits = strategy.traits
        valid = traits.uses_mean == "only" and not traits.replies_are_changes
        return "" if valid else f"an algorithm that {NEEDED}"

    @classmethod
    def from_settings(cls, settings: Settings) -> Strategy:
        """Return the base that the settings name, with asynchronous participation."""
        wrapped = build_strategy(cls.wrapped_settings(settings))
        wrapper = build(cls, settings, strategy=wrapped)
        wrapper.participation.last_version = int(settings["num-server-rounds"])
        return wrapped

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        *args: Any,
        **kwargs: Any,
    ) -> Result:
        """Run as Flower's ``Strategy.start``; ``num_rounds`` counts versions."""
        self.participation.last_version = num_rounds
        return self.strategy.start(grid, initial_arrays, num_rounds, *args, **kwargs)

    def summary(self) -> None:
        """Log the configuration."""
        text = "\t├──> Asynchronous: %d clients at work, %d changes make a version"
        log(INFO, text, self.concurrency, self.buffer_size)
        self.strategy.summary()
