"""D-PSGD (Lian et al., NeurIPS 2017): decentralised SGD, uncompressed."""

import numpy as np

from flwr_frl.clients.base import Config
from flwr_frl.clients.gossip.base import GossipClient, GossipSettings
from flwr_frl.clients.gossip.relayed import Relayed
from flwr_frl.task.compression.per_tensor import Compressor, Identity

# The identity draws nothing.
NO_RANDOMNESS = np.random.default_rng(0)


class DPSGDClient(GossipClient):
    """x_i ← Σ_j w_ij (x_j − η g_j): a step, then the mean with the neighbours.

    The step has the settings' momentum and weight decay; the paper has neither.
    """

    settings_type = GossipSettings

    def make_compressor(self) -> Compressor:
        """Return the identity: models are sent as they are."""
        return Identity()

    def mix(self, round_: int, messages: list[Relayed], config: Config) -> None:
        """x_i ← x_i + Σ_j w_ij (x_j − x_i), with those who took part in that round.

        What a neighbour sent while this node was away mixes with nothing: that
        neighbour has put this node's weight on itself, so the mean is kept.
        """
        if round_ != self.state.round:
            return
        own = self.x.clone()
        for message in messages:
            model = self.decoded(message)
            if model is not None:
                self.x.add_(model - own, alpha=message.weight)

    def message(self, server_round: int) -> bytes:
        """Return the own model x, d float32 numbers."""
        return self.compressor.compress(self.x, NO_RANDOMNESS)
