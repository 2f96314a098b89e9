"""SQuARM-SGD (Singh, UCLA 2024, chapter 3): neighbours exchange changes when due."""

from flwr_frl.strategies.gossip.base import Gossip


class SQuARMSGD(Gossip):
    """Relay compressed differences every H steps; all else is in the client."""

    client = "flwr_frl.clients.squarm_sgd:SQuARMSGDClient"
