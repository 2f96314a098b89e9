"""FLUTE for regression: the features are balanced with the heads of all clients."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_frl.clients.base import Client, Update
from flwr_frl.clients.device.groups import WHOLE, Tensors
from flwr_frl.clients.device.traits import linear_head, separate_head
from flwr_frl.common.messages import COUPLING
from flwr_frl.task.models import SplitModel
from flwr_frl.task.training.local_training import features_of

COUPLING_GROUP = "coupling."


@dataclass(frozen=True)
class QuadraticPenalty:
    """The mean of ψ(x)ᵀ A ψ(x) over the features ψ(x) of a batch.

    Parameters
    ----------
    matrix : Tensor, shape (k, k)
        A, symmetric.
    """

    matrix: Tensor

    def __call__(self, features: Tensor, targets: Tensor, model: SplitModel) -> Tensor:
        """Return the penalty, a scalar."""
        flat = features.flatten(0, -2)
        return ((flat @ self.matrix.to(flat.dtype)) * flat).sum(-1).mean()


class FLUTERegressionClient(
    Client, requires=(linear_head("FLUTE for regression"), separate_head)
):
    """Train representation and head with the quadratic penalty of the matrix A.

    The server sends representation, head and A. The client returns both parts and, in
    place of A, the second moment of its features. The loss is the task's plus
    mean_x ψ(x)ᵀ A ψ(x).
    """

    shared = (*WHOLE, COUPLING_GROUP)

    def initial_group(self, group: str) -> Tensors:
        """Return zeros for A."""
        weight = self.model.linear_head("FLUTE for regression").weight
        width = weight.shape[1]
        return {"matrix": torch.zeros(width, width, dtype=weight.dtype)}

    def update(self) -> Update:
        """Train head and representation together for ``representation-epochs``."""
        penalty = QuadraticPenalty(self.received[COUPLING])
        loss = self.train("all", self.settings.representation_epochs, penalty)
        return loss, {**self.model.state_dict(), COUPLING: self.moment()}

    def personalize(self) -> None:
        """Train the head for ``newcomer-epochs``."""
        self.train("head", self.settings.newcomer_epochs)

    def moment(self) -> Tensor:
        """Return mean ψ(x) ψ(x)ᵀ, of shape (k, k), over the training examples."""
        examples = self.train_examples.without_augmentation()
        pairs = features_of(self.model.eval(), examples, self.settings)
        features = pairs.inputs.flatten(0, -2)
        dtype = self.received[COUPLING].dtype
        return (features.T @ features / len(features)).to(dtype)
