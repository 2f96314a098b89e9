"""FedCP (Zhang et al., KDD 2023)."""

from flwr_frl.strategies.base import BaseStrategy


class FedCP(BaseStrategy, client="flwr_frl.clients.fedcp:FedCPClient"):
    """Average representations, policies, and means of personal and shared heads.

    The server knows the shared head, so it could derive a client's personal head.
    """
