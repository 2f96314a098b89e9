"""FedPer (Arivazhagan et al., 2019)."""

from flwr_frl.strategies.base import BaseStrategy


class FedPer(BaseStrategy, client="flwr_frl.clients.fedper:FedPerClient"):
    """Average the representations; heads stay with the clients."""
