"""FedPer (Arivazhagan et al., 2019)."""

from strategies.base import BaseStrategy


class FedPer(BaseStrategy):
    """Average the representations; heads stay with the clients."""

    client = "clients.fedper:FedPerClient"
