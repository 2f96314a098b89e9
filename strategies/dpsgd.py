"""D-PSGD (Lian et al., NeurIPS 2017): neighbours exchange whole models."""

from strategies.gossip.base import Gossip


class DPSGD(Gossip):
    """Relay models, uncompressed, between neighbours that both took part in a round."""

    uses_consensus_step = False

    def relays(self, receiver_took_part: bool) -> bool:
        """Return whether a message of this round goes to a neighbour.

        Parameters
        ----------
        receiver_took_part : bool
            Whether the neighbour's own reply counted in this round.

        Returns
        -------
        bool
            Only then: an edge is used from both ends or not at all, so the nodes' mean
            is kept.
        """
        return receiver_took_part
