"""FedPer (Arivazhagan et al., 2019)."""

from flwr_frl.strategies.base import BaseStrategy


class FedPer(BaseStrategy):
    """Average the representations; heads stay with the clients."""

    client = "flwr_frl.clients.fedper:FedPerClient"
