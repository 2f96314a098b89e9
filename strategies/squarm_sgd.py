"""SQuARM-SGD (Singh, UCLA 2024, chapter 3): event-triggered compressed gossip."""

from flwr_frl.strategies.gossip.base import Gossip


class SQuARMSGD(Gossip, client="flwr_frl.clients.squarm_sgd:SQuARMSGDClient"):
    """Relay compressed differences every H steps; the client does the rest."""
