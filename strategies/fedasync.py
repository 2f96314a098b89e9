"""FedAsync (Xie, Koyejo and Gupta, 2019): a new version with every reply."""

from typing import Annotated

from flwr_frl.common.settings import require, setting, validate
from flwr_frl.strategies.base import Strategy
from flwr_frl.strategies.fedbuff import FedBuff


class FedAsync(FedBuff):
    """Algorithm 1: x ← (1 − α s(τ)) x + α s(τ) y_i with every model y_i that arrives.

    τ is the number of versions since the one that the client was sent, and
    s(τ) = (1 + τ)^−a the polynomial function of section 5.2. The clients of the
    paper train with a proximal term, as with ``async-base="fedprox"``. In the paper
    clients request work at any time; here the server keeps C of them at work.

    Parameters
    ----------
    strategy : Strategy
        The base, with ``Traits.uses_mean="only"``; its replies must not be changes.
    async_base : str, default "fedavg"
        Name or import path of the base, if settings choose it.
    concurrency : int, default 10
        Number of clients C at work at any time.
    staleness_exponent : float, default 0.5
        a in s(τ), the authors' value.
    max_staleness : int, default -1
        Largest τ of a model that counts; older ones are dropped. −1 sets no limit.
    fedasync_alpha : float, default 0.6
        The mixing weight α, one of the authors' values; it does not change over time.
    """

    # Models that arrive are averaged with the newest version.
    from_sent = False

    def __init__(
        self,
        strategy: Strategy,
        async_base: Annotated[str, setting(form="an algorithm", code=True)] = "fedavg",
        concurrency: Annotated[int, setting(ge=1)] = 10,
        staleness_exponent: Annotated[float, setting(ge=0)] = 0.5,
        max_staleness: Annotated[int, setting(ge=-1)] = -1,
        fedasync_alpha: Annotated[float, setting(gt=0, le=1)] = 0.6,
    ) -> None:
        self.fedasync_alpha = fedasync_alpha
        validate(self)
        super().__init__(
            strategy,
            concurrency=concurrency,
            buffer_size=1,
            staleness_exponent=staleness_exponent,
            max_staleness=max_staleness,
            global_learning_rate=fedasync_alpha,
        )
        rule = strategy.settings.aggregation
        allowed = "mean with fedasync, where a version takes the model of one client, "
        allowed += "which no other can outvote; fedbuff supports the other rules"
        require(rule == "mean", "aggregation", rule, allowed)
