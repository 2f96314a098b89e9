"""Gossip algorithms whose server only relays messages between neighbours."""

from flwr_frl.strategies.gossip.base import Gossip


# D-PSGD (Lian et al., NeurIPS 2017)
class DPSGD(Gossip, client="flwr_frl.clients.dpsgd:DPSGDClient"):
    """Relay uncompressed models between neighbours that both took part in a round."""

    uses_consensus_step = False

    # A neighbour that missed a round mixes nothing, which preserves the nodes' mean.
    relays_missed_rounds = False


# CHOCO-SGD (Koloskova et al., ICML 2019)
class ChocoSGD(Gossip, client="flwr_frl.clients.choco_sgd:ChocoSGDClient"):
    """Relay compressed differences after each step; the client does the rest."""


# SQuARM-SGD (Singh, UCLA 2024, chapter 3)
class SQuARMSGD(Gossip, client="flwr_frl.clients.squarm_sgd:SQuARMSGDClient"):
    """Relay compressed differences every H steps; the client does the rest."""
