"""FedAvg (McMahan et al., AISTATS 2017)."""

from flwr_frl.clients.base import Client
from flwr_frl.clients.fine_tuning import FineTuned


class FedAvgClient(Client, supports_example_dp=True):
    """Train the shared model; there is no personal part."""

    def update(self) -> float:
        """Train the global model for ``representation-epochs``."""
        return self.train("all", self.settings.representation_epochs)


class FedAvgFTClient(FineTuned, FedAvgClient, supports_example_dp=True):
    """Train as with FedAvg, and fine-tune the head before each test."""
