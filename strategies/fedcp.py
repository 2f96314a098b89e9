"""FedCP (Zhang et al., KDD 2023)."""

from flwr_frl.strategies.base import BaseStrategy


class FedCP(BaseStrategy):
    """Average representations, policies, and means of own and shared heads.

    From such a mean the server, who knows the shared head, gets the client's own.
    """

    client = "flwr_frl.clients.fedcp:FedCPClient"
