"""FedNova (Wang et al., NeurIPS 2020): averaging normalised by local steps."""

import numpy as np

from flwr_frl.common.arrays import is_parameter
from flwr_frl.common.messages import GRADIENT_WEIGHT
from flwr_frl.strategies.base import Arrays, Reply, Round, Strategy


class FedNova(Strategy, client="flwr_frl.clients.fednova:FedNovaClient"):
    """x ← x + τ Σ p_i (x_i − x) / a_i with τ = Σ p_i a_i.

    p_i is a client's share of the weights, and a_i = ‖a_i‖₁ is the total weight of its
    local gradients: its number of steps without momentum. Clients that make more steps
    hence do not count more. The paper uses ``weighting="examples"``. If all a_i are
    equal, this is FedAvg. Integers and statistics of batch norms become the mean with
    the weights p_i / a_i.

    The server cannot verify a_i, so the plain mean is the only ``aggregation``.
    """

    _only = (("aggregation", "mean"),)
    _because = "clients report their steps"

    def check_reply(self, reply: Reply) -> None:
        """Reject replies without a_i, or with one below 1."""
        reply.metric(GRADIENT_WEIGHT, least=1)

    def weights(self, replies: list[Reply]) -> list[float]:
        """Return p_i / a_i, up to a factor."""
        plain = super().weights(replies)
        steps = [reply.metrics[GRADIENT_WEIGHT] for reply in replies]
        return [weight / a for weight, a in zip(plain, steps, strict=True)]

    def aggregate(self, round: Round) -> Arrays:
        """Scale the change of the mean by Σ p_i a_i Σ p_i / a_i."""
        mean, before = round.mean(), round.centre()
        plain = np.array(super().weights(round.replies))
        steps = np.array([reply.metrics[GRADIENT_WEIGHT] for reply in round.replies])
        scale = (plain @ steps) * (plain @ (1 / steps)) / plain.sum() ** 2
        for name in filter(lambda name: is_parameter(name, mean[name]), mean):
            change = np.subtract(mean[name], before[name], dtype=np.float64)
            mean[name] = mean[name] + (scale - 1) * change
        return mean
