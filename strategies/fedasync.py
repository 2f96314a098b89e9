"""FedAsync (Xie, Koyejo and Gupta, 2019): a new version with every reply."""

from typing import Any

from flwr_frl.common.errors import require
from flwr_frl.common.settings import setting
from flwr_frl.strategies.base import Strategy
from flwr_frl.strategies.fedbuff import AsynchronousRounds


class FedAsync(AsynchronousRounds):
    """Algorithm 1: x ← (1 − α s(τ)) x + α s(τ) y_i with every model y_i that arrives.

    τ is the number of versions since the one that the client was sent, and
    s(τ) = (1 + τ)^−a the polynomial function of section 5.2. The clients of the
    paper train with a proximal term, as with ``async-base="fedprox"``. In the paper
    clients request work at any time; here the server keeps C of them at work.

    Parameters
    ----------
    fedasync_alpha : float, default 0.6
        The mixing weight α, one of the authors' values; it does not change over time.
    """

    fedasync_alpha: float = setting(0.6, gt=0, le=1)

    # Models that arrive are averaged with the newest version.
    from_sent = False

    @classmethod
    def buffer(cls, strategy: Strategy, settings: Any) -> tuple[int, float]:
        """Return 1 and α."""
        rule = strategy.settings.aggregation
        allowed = "mean with fedasync, where a version takes the model of one client, "
        allowed += "which no other can outvote; fedbuff supports the other rules"
        require(rule == "mean", "aggregation", rule, allowed)
        return 1, settings.fedasync_alpha
