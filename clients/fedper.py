"""FedPer (Arivazhagan et al., 2019): representation and head train together."""

from flwr.common import NDArrays

from flwr_frl.clients.base import Client, Config, Reply, TrainingSettings
from flwr_frl.clients.device.parameter_groups import HEAD, REPRESENTATION, Groups


class FedPerClient(Client, supports_example_dp=True):
    """Train representation and head together; the head is personal."""

    shared: Groups = (REPRESENTATION,)
    personal: Groups = (HEAD,)
    settings: TrainingSettings

    def fit(self, parameters: NDArrays, config: Config) -> Reply:
        """Train both parts for ``representation-epochs``."""
        self.receive(parameters, config)
        loss = self.train("all", self.settings.representation_epochs)
        self.save(config)
        return self.send(loss)
