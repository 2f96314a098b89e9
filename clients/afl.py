"""AFL (Mohri et al., ICML 2019)."""

from flwr_frl.clients.device.training import received_loss
from flwr_frl.clients.fedavg import FedAvgClient
from flwr_frl.common.messages import RECEIVED_LOSS


class AFLClient(FedAvgClient):
    """Train as with FedAvg, and report the loss of the received model.

    It is the mean over all training examples.
    """

    def update(self) -> float:
        """Train the global model for ``representation-epochs``, and add the loss."""
        self.metrics[RECEIVED_LOSS] = received_loss(self)
        return super().update()
