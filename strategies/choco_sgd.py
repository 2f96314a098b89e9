"""CHOCO-SGD (Koloskova et al., ICML 2019): neighbours exchange compressed changes."""

from flwr_frl.strategies.gossip.base import Gossip


class ChocoSGD(Gossip):
    """Relay compressed differences after each step; all else is in the client."""

    client = "flwr_frl.clients.choco_sgd:ChocoSGDClient"
