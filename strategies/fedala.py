"""FedALA (Zhang et al., AAAI 2023)."""

from flwr_frl.strategies.base import BaseStrategy


class FedALA(BaseStrategy, client="flwr_frl.clients.fedala:FedALAClient"):
    """Algorithm 1: average the models; the mixing weights stay with the clients."""
