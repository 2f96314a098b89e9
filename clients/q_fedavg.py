"""q-FedAvg (Li et al., ICLR 2020): steps that are reweighted by the client's loss."""

import torch

from flwr_frl.clients.base import Client, Update
from flwr_frl.clients.device.groups import WHOLE, Tensors, changes_of
from flwr_frl.clients.device.training import received_loss
from flwr_frl.common.errors import require
from flwr_frl.common.messages import BATCH_NORM, NORMALIZER
from flwr_frl.common.settings import setting

# Added to the loss, as in the authors' code, since F^(q - 1) may not exist at 0.
SMALLEST = 1e-10


class QFedAvgClient(Client, assumes_sgd=True):
    """Algorithm 2, client side, with L = 1/η.

    With F = F_k(w), the loss of the received model on all training examples, and
    Δw = L (w − w_k), the client sends Δ_k = F^q Δw and h_k = q F^(q−1) ‖Δw‖² + L F^q.
    Both are divided by L here, which cancels in Σ Δ_k / Σ h_k, and −Δ_k is sent.
    Integers and statistics of batch norms have no gradient; their plain changes are
    sent.

    Parameters
    ----------
    q_fedavg_q : float, default 1
        q of the objective Σ F_k^(q+1) / (q + 1). The larger it is, the more alike are
        the clients' losses; 0 is FedAvg. The paper tries values from 0.001 to 15.
    """

    shared = (*WHOLE, "normalizer")
    q_fedavg_q: float = setting(1.0, ge=0)

    def initial_group(self, group: str) -> Tensors:
        """Return the value of h_k in messages to clients."""
        return {"value": torch.zeros(1)}

    def update(self) -> Update:
        """Train for ``representation-epochs``, and send −Δ_k / L and h_k / L."""
        q, lipschitz = self.settings.q_fedavg_q, 1 / self.settings.learning_rate
        initial = received_loss(self)
        require(initial >= 0, "training-loss", initial, "at least 0 for q-FedAvg")
        weight, slope = (initial + SMALLEST) ** q, q * (initial + SMALLEST) ** (q - 1)
        loss = self.train("all", self.settings.representation_epochs)
        changes, square = changes_of(self), 0.0
        for name, change in changes.items():
            if change.is_floating_point() and not name.endswith(BATCH_NORM):
                square += change.double().square().sum().item()
                changes[name] = weight * change
        normalizer = torch.tensor([slope * lipschitz * square + weight])
        return loss, {**changes, NORMALIZER: normalizer}
