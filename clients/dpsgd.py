"""D-PSGD (Lian et al., NeurIPS 2017): decentralised SGD, uncompressed."""

from clients.gossip.base import GossipClient, randomness
from clients.gossip.relayed import Config, Relayed
from task.compression.per_tensor import Compressor, Identity


class DPSGDClient(GossipClient):
    """x_i ← Σ_j w_ij (x_j − η g_j): a step, then the mean with the neighbours.

    The step has the settings' momentum and weight decay; the paper has neither.
    """

    def make_compressor(self) -> Compressor:
        """Return the identity, whatever ``compressor`` says."""
        return Identity()

    def mix(self, round_: int, messages: list[Relayed], config: Config) -> None:
        """x_i ← x_i + Σ_j w_ij (x_j − x_i), with those who took part in that round.

        What a neighbour sent while this node was away mixes with nothing: that
        neighbour has put this node's weight on itself, so the mean is kept.

        Parameters
        ----------
        round_ : int
            The round in which the messages were sent.
        messages : list of Relayed
            The neighbours' models x_j.
        config : dict
            Ignored.
        """
        if round_ != self.state.round:
            return
        own = self.x.clone()
        for message in messages:
            model = self.received(message)
            if model is not None:
                self.x.add_(model - own, alpha=message.weight)

    def message(self, server_round: int) -> bytes:
        """Return the own model.

        Parameters
        ----------
        server_round : int
            Ignored.

        Returns
        -------
        bytes
            x, d float32 numbers.
        """
        return self.compressor.compress(self.x, randomness())
