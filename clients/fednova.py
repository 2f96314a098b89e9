"""FedNova (Wang et al., NeurIPS 2020)."""

from flwr_frl.clients.fedavg import FedAvgClient
from flwr_frl.common.messages import GRADIENT_WEIGHT


class FedNovaClient(FedAvgClient, assumes_sgd=True):
    """Train as with FedAvg, and report a_i, the total weight of the local gradients.

    It is the number of steps K; with ``momentum`` β it is Σ_t (1 − βᵗ)/(1 − β).
    """

    def update(self) -> float:
        """Train the global model for ``representation-epochs``, and add a_i."""
        loss = super().update()
        epochs = self.settings.representation_epochs
        # Without steps there is no change, which any number normalises.
        self.metrics[GRADIENT_WEIGHT] = self._gradient_weight(epochs) if epochs else 1.0
        return loss
