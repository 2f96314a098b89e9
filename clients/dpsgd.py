"""D-PSGD (Lian et al., NeurIPS 2017): decentralised SGD without compression."""

import numpy as np

from flwr_frl.clients.base import Config
from flwr_frl.clients.gossip.base import GossipClient, GossipSettings
from flwr_frl.clients.gossip.relayed import Relayed

# The identity operator uses no randomness.
NO_RANDOMNESS = np.random.default_rng(0)


class DPSGDClient(GossipClient):
    """x_i ← Σ_j w_ij (x_j − η g_j): a local step, then averaging with the neighbours.

    Models are sent uncompressed. Momentum and weight decay follow the settings; the
    paper uses neither.
    """

    settings_type = GossipSettings

    def mix(self, round_: int, messages: list[Relayed], config: Config) -> None:
        """x_i ← x_i + Σ_j w_ij (x_j − x_i), over the neighbours that took part.

        Messages from rounds that this node missed are ignored. In those rounds the
        sender adds this node's weight to its own, which preserves the mean.
        """
        if round_ != self.state.round:
            return
        x_i = self.x.clone()
        for message in messages:
            model = self.decoded(message)
            if model is not None:
                self.x.add_(model - x_i, alpha=message.weight)

    def message(self, server_round: int) -> bytes:
        """Return the model x_i as d float32 numbers."""
        return self.compressor.compress(self.x, NO_RANDOMNESS)
