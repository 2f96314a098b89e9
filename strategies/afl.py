"""AFL (Mohri et al., ICML 2019): agnostic federated learning."""

import numpy as np

from flwr_frl.common.messages import RECEIVED_LOSS
from flwr_frl.common.settings import setting
from flwr_frl.common.simplex import nearest_in_simplex
from flwr_frl.strategies.base import Arrays, Reply, Round, Strategy, stored


class AFL(Strategy, client="flwr_frl.clients.afl:AFLClient", uses_mean="only"):
    """Stochastic-AFL for min_w max_λ Σ λ_k F_k(w), over λ in the simplex of clients.

    w becomes the mean of the models of a round, weighted by λ, and then λ ← Π(λ + γ g),
    where Π is the projection onto the simplex. The estimate g of the gradient
    (F_1(w), …, F_m(w)) has the entries m/n F_k(w) for the n clients of the round, and
    0 for others. λ starts at 1/m; if a client joins, it gets 1/m of the new m.

    The paper makes one gradient step on w in a round, and returns the means of all w
    and λ. Here clients make local steps, as in FedAvg, and the last w is used. With
    γ = 0 this is FedAvg. If λ is 0 for all clients of a round, w stays. The server
    cannot verify the reported losses.

    Parameters
    ----------
    afl_rate : float, default 0.01
        Step size γ of λ.
    **base
        Arguments of `Strategy`.
    """

    afl_rate: float = setting(0.01, ge=0)
    _only = ("weighting", "uniform"), ("aggregation", "mean")
    _because = "AFL learns the weights of the mean"
    # λ, by client
    mixture: dict[str, float] = stored("mixture")

    def begin(self, round: Round) -> None:
        """Admit new clients to λ."""
        clients, former = self._run.clients, self.mixture
        trains = {
            row.name: 0.0
            for node, row in clients.known.items()
            if not row.is_newcomer and node not in clients.untrained
        }
        m = len(trains | former)
        kept = {name: value * len(former) / m for name, value in former.items()}
        self.mixture = {**dict.fromkeys(trains, 1 / m), **kept}

    def check_reply(self, reply: Reply) -> None:
        """Reject replies without a loss."""
        reply.metric(RECEIVED_LOSS)

    def weights(self, replies: list[Reply]) -> list[float]:
        """Return λ_k."""
        return [self.mixture[reply.client] for reply in replies]

    def aggregate(self, round: Round) -> Arrays:
        """Average the models, and make a step of λ."""
        # Without weights, w stays, but λ moves.
        mean = round.mean() if any(self.weights(round.replies)) else round.arrays
        share = len(self.mixture) / len(round.replies)
        g = {r.client: share * r.metrics[RECEIVED_LOSS] for r in round.replies}
        rate, mixture = self.afl_rate, self.mixture
        moved = [value + rate * g.get(n, 0) for n, value in mixture.items()]
        projected = nearest_in_simplex(np.array([moved]))[0].tolist()
        self.mixture = dict(zip(mixture, projected, strict=True))
        return mean
