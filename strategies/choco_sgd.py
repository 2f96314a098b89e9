"""CHOCO-SGD (Koloskova et al., ICML 2019): compressed gossip."""

from flwr_frl.strategies.gossip.base import Gossip


class ChocoSGD(Gossip, client="flwr_frl.clients.choco_sgd:ChocoSGDClient"):
    """Relay compressed differences after each step; the client does the rest."""
