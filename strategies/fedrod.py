"""FedRoD (Chen & Chao, ICLR 2022)."""

from flwr_frl.strategies.base import BaseStrategy


class FedRoD(BaseStrategy, client="flwr_frl.clients.fedrod:FedRoDClient"):
    """Average the generic models; personalised heads stay with the clients."""
