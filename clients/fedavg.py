"""FedAvg (McMahan et al., AISTATS 2017)."""

from flwr.common import NDArrays

from flwr_frl.clients.base import Client, Config, Reply, TrainingSettings
from flwr_frl.clients.fine_tuning import fine_tuned


class FedAvgClient(Client, supports_example_dp=True):
    """Train the shared model; there is no personal part."""

    settings: TrainingSettings

    def fit(self, parameters: NDArrays, config: Config) -> Reply:
        """Train the global model for ``representation-epochs``."""
        self.receive(parameters, config)
        return self.send(self.train("all", self.settings.representation_epochs))


FedAvgFTClient = fine_tuned(FedAvgClient)
