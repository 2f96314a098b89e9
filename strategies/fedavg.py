"""FedAvg (McMahan et al., AISTATS 2017)."""

from strategies.base import BaseStrategy


class FedAvg(BaseStrategy):
    """Average the whole model."""

    client = "clients.fedavg:FedAvgClient"
