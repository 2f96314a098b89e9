"""FedProx (Li et al., MLSys 2020)."""

from flwr.common import NDArrays

from flwr_frl.clients.base import Client, Config, Reply, TrainingSettings


class FedProxClient(Client, supports_example_dp=True):
    """Algorithm 2: minimise F_i(w) + μ/2 ‖w − wᵗ‖², inexactly, from wᵗ."""

    settings: TrainingSettings

    def fit(self, parameters: NDArrays, config: Config) -> Reply:
        """Train the model for ``representation-epochs``.

        `Client.train` adds the proximal term if the server sends μ.
        """
        self.receive(parameters, config)
        return self.send(self.train("all", self.settings.representation_epochs))
