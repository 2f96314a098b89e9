"""FedAvg (McMahan et al., AISTATS 2017)."""

from flwr_frl.strategies.algorithms import fine_tuned
from flwr_frl.strategies.base import BaseStrategy


class FedAvg(BaseStrategy, client="flwr_frl.clients.fedavg:FedAvgClient"):
    """Average the whole model."""


FedAvgFT = fine_tuned(FedAvg)
