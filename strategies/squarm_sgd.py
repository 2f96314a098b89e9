"""SQuARM-SGD (Singh, UCLA 2024, chapter 3): event-triggered compressed gossip."""

from flwr_frl.strategies.gossip.base import Gossip


class SQuARMSGD(Gossip):
    """Relay compressed differences every H local steps; see the client."""

    client = "flwr_frl.clients.squarm_sgd:SQuARMSGDClient"
