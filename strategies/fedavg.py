"""FedAvg (McMahan et al., AISTATS 2017)."""

from flwr_frl.strategies.algorithms import fine_tuned
from flwr_frl.strategies.base import BaseStrategy


class FedAvg(BaseStrategy):
    """Average the whole model."""

    client = "flwr_frl.clients.fedavg:FedAvgClient"


FedAvgFT = fine_tuned(FedAvg)
