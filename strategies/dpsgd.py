"""D-PSGD (Lian et al., NeurIPS 2017): neighbours exchange uncompressed models."""

from flwr_frl.strategies.gossip.base import Gossip


class DPSGD(Gossip, client="flwr_frl.clients.dpsgd:DPSGDClient"):
    """Relay uncompressed models between neighbours that both took part in a round."""

    uses_consensus_step = False

    def relays(self, receiver_took_part: bool) -> bool:
        """Return whether the neighbour took part, which preserves the nodes' mean."""
        return receiver_took_part
