"""CHOCO-SGD (Koloskova et al., ICML 2019): compressed gossip."""

from flwr_frl.strategies.gossip.base import Gossip


class ChocoSGD(Gossip):
    """Relay compressed differences after each local step; see the client."""

    client = "flwr_frl.clients.choco_sgd:ChocoSGDClient"
