"""LG-FedAvg (Liang et al., 2020)."""

from flwr_frl.strategies.base import BaseStrategy


class LGFedAvg(BaseStrategy, client="flwr_frl.clients.lg_fedavg:LGFedAvgClient"):
    """Average the heads (last two layers); representations stay with the clients."""
