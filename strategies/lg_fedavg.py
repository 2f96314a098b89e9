"""LG-FedAvg (Liang et al., 2020)."""

from strategies.base import BaseStrategy


class LGFedAvg(BaseStrategy):
    """Average the heads (last two layers); representations stay with the clients."""

    client = "clients.lg_fedavg:LGFedAvgClient"
