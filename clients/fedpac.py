"""FedPAC (Xu et al., ICLR 2023): aligned features, and heads combined per client."""

from typing import Any

import torch
from torch import Tensor

from flwr_frl.clients.base import (
    Client,
    Update,
    linear_head,
    needs_classes,
    separate_head,
)
from flwr_frl.clients.device.groups import WHOLE, Tensors
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.clients.device.training import class_means, labelled_features, no_means
from flwr_frl.clients.fedproto import near_received, own_prototypes
from flwr_frl.common.settings import setting
from flwr_frl.task.base import Task

CENTROIDS, STATISTICS = "prototypes.", "statistics."
# The authors' learning rate of the head, 0.1, relative to the other one, 0.01.
HEAD_RATIO = 10


class FedPACClient(
    Client, requires=(needs_classes, linear_head("FedPAC"), separate_head)
):
    """Algorithm 1, client side: the server sends representation, centroids and head.

    The head trains first, then the representation under the trained head, with λ times
    the mean squared distance of a feature's entries to those of its class's centroid.
    As in the authors' code, that is a mean over the entries. A class without a centroid
    contributes nothing; the authors' code then uses the client's own centroid.

    Parameters
    ----------
    fedpac_lambda : float, default 1
        λ of the features' distance to the centroids (feature alignment); 0 omits it.
    fedpac_head_epochs : int, default 1
        Epochs of the head before those of the representation (algorithm 1).
    fedpac_head_learning_rate : float, default 0
        Learning rate of the head, which ``learning-rate-schedule`` changes in the same
        proportion; 0 means ten times ``learning-rate``, the ratio of the authors' code
        (0.1 and 0.01).
    """

    shared = (*WHOLE, CENTROIDS)
    sent = (*WHOLE, CENTROIDS, STATISTICS)
    fedpac_lambda: float = setting(1.0, ge=0)
    fedpac_head_epochs: int = setting(1, ge=0)
    fedpac_head_learning_rate: float = setting(0.0, ge=0)

    def __init__(
        self, task: Task, index: int, state: PersonalState, settings: Any
    ) -> None:
        super().__init__(task, index, state, settings)
        # A schedule changes both learning rates in the same proportion.
        ratio = settings.fedpac_head_learning_rate / settings.learning_rate
        self.head_ratio = ratio or HEAD_RATIO

    def initial_group(self, group: str) -> Tensors:
        """Return zeros, as there are neither centroids nor statistics yet."""
        empty = no_means(self.model.linear_head("FedPAC"))
        if group == STATISTICS:
            return {"features": empty["means"], "variance": torch.zeros(())}
        return empty

    def update(self) -> Update:
        """Measure the received features, and train the head, then the representation.

        Representation, head, new class means and the statistics are sent.
        """
        settings = self.settings
        statistics = self.statistics_of(*labelled_features(self))
        near = near_received(self, settings.fedpac_lambda)
        self._train_head(settings.fedpac_head_epochs)
        loss = self.train("representation", settings.representation_epochs, near)
        return loss, {**self.model.state_dict(), **own_prototypes(self), **statistics}

    def _train_head(self, epochs: int) -> None:
        rate = self.head_ratio * self.settings.learning_rate
        self.train("head", epochs, learning_rate=rate)

    def personalize(self) -> None:
        """Train the head for ``newcomer-epochs``, with its learning rate."""
        self._train_head(self.settings.newcomer_epochs)

    def statistics_of(self, features: Tensor, targets: Tensor) -> Tensors:
        """Return h_i and V_i of n examples.

        h_i is p_k times the mean feature of each class k, which has the share p_k of
        the examples; V_i = (mean ‖z‖² − Σ_k ‖h_ik‖²) / n.
        """
        n = max(1, len(targets))
        classes = self.model.linear_head("FedPAC").out_features
        means, counts = class_means(features, targets, classes)
        shares = means * (counts / n).unsqueeze(1)
        # Rounding may make the variance of equal features negative.
        spread = features.square().sum() / n - shares.square().sum()
        variance = spread.clamp(min=0) / n
        return {f"{STATISTICS}features": shares, f"{STATISTICS}variance": variance}
