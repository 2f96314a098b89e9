"""q-FedAvg (Li et al., ICLR 2020): fair resource allocation."""

import numpy as np

from flwr_frl.common.arrays import is_parameter
from flwr_frl.common.messages import NORMALIZER
from flwr_frl.strategies.base import Arrays, Round, Strategy


class QFedAvg(
    Strategy,
    client="flwr_frl.clients.q_fedavg:QFedAvgClient",
    replies_are_changes=True,
    uses_mean="only",
):
    """Algorithm 2: w ← w − Σ p_k Δ_k / Σ p_k h_k.

    The paper samples client k with probability p_k; here sampling is uniform, and p_k
    is the weight of ``weighting``. With q = 0 this is FedAvg with the same weighting.
    Both sums are sums over clients, so secure aggregation applies. h_k is an array of
    the model's messages, with the value 0 to clients. Integers and statistics of batch
    norms become the mean.

    A client can report any h_k, and noise may turn their sum negative, so the plain
    mean is the only ``aggregation``, without ``server-dp-noise``.
    """

    _only = ("aggregation", "mean"), ("server_dp_noise", 0)
    _because = "steps are quotients of two means"

    def aggregate(self, round: Round) -> Arrays | None:
        """Divide the mean of the −Δ_k by that of the h_k, and keep no h_k."""
        round.need(NORMALIZER)
        changes = round.mean()
        if (normalizer := changes[NORMALIZER].item()) <= 0:
            return None
        new = dict(round.arrays)
        for name in new.keys() - {NORMALIZER}:
            divisor = normalizer if is_parameter(name, new[name]) else 1.0
            new[name] = new[name] + np.divide(changes[name], divisor)
        return new
