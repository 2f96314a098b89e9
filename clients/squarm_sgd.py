"""SQuARM-SGD (Singh, UCLA 2024, chapter 3): event-triggered compression, momentum."""

from typing import Annotated

from torch import Tensor

from flwr_frl.clients.gossip.base import Exchange, Node
from flwr_frl.clients.gossip.settings import threshold
from flwr_frl.common.settings import checked_by, setting


class SQuARMSGDClient(Node):
    """Algorithm 1, in its memory-efficient form.

    Besides its model x_i, a node stores its momentum v_i, its public estimate x̂_i and
    the weighted sum Σ_j w_ij x̂_j of its neighbours' estimates.

    Parameters
    ----------
    local_steps : int, default 5
        Number of iterations H between two exchanges.
    trigger : str, default "0"
        Threshold c_t, ``START``, ``START:INCREMENT:EVERY`` or
        ``START:INCREMENT:EVERY:UNTIL``, without an upper bound (`threshold`).
    """

    vectors = ("momentum", "estimate", "neighbours")
    local_steps: int = setting(5, ge=1)
    trigger: Annotated[str, checked_by(threshold)] = setting(
        "0",
        form="START, START:INCREMENT:EVERY or START:INCREMENT:EVERY:UNTIL",
        safe=True,
    )

    def mix(self, exchange: Exchange) -> None:
        """Line 16: x ← x + γ Σ_j w_ij (x̂_j − x̂_i), after x̂_j ← x̂_j + q_j.

        The estimate of a neighbour that sent no q_j is unchanged.
        """
        neighbours, estimate = self.vector("neighbours"), self.vector("estimate")
        neighbours.add_(exchange.weighted_sum)
        difference = neighbours - exchange.neighbour_weight * estimate
        self.x.add_(difference, alpha=exchange.consensus_step)

    def outgoing(self, server_round: int) -> tuple[Tensor, float]:
        """Return x − x̂ and the threshold c_t η_t² of its squared norm (lines 8 to 13).

        If it is above, the node sends q = C(x − x̂), and x̂ ← x̂ + q. The condition is
        also checked in the first round, as in the algorithm's listing; in the section's
        text, all nodes send in the first round.
        """
        t = self.iterations(server_round)[-1]
        difference = self.x - self.vector("estimate")
        return difference, threshold(self.settings.trigger)(t) * self.rate(t) ** 2

    def apply_sent(self, q: Tensor) -> None:
        """x̂ ← x̂ + q."""
        self.vector("estimate").add_(q)
