"""D-PSGD (Lian et al., NeurIPS 2017): decentralised SGD without compression."""

from torch import Tensor

from flwr_frl.clients.gossip.base import ALWAYS, Exchange, Node
from flwr_frl.clients.gossip.settings import GossipSettings


class DPSGDClient(Node):
    """x_i ← Σ_j w_ij (x_j − η g_j): a local step, then averaging with the neighbours.

    Models are sent uncompressed. Momentum and weight decay follow the settings; the
    paper uses neither.
    """

    _settings_type = GossipSettings

    def mix(self, exchange: Exchange) -> None:
        """x_i ← x_i + Σ_j w_ij (x_j − x_i), over the neighbours that took part.

        The server relays no messages of rounds that this node missed, which therefore
        change nothing.
        """
        self.x.add_(exchange.weighted_sum - exchange.weight * self.x)

    def outgoing(self, server_round: int) -> tuple[Tensor, float]:
        """Return the model x_i, which is always sent."""
        return self.x, ALWAYS
