"""FedPAC (Xu et al., ICLR 2023): aligned features, and heads combined per client."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from flwr_frl.clients.base import Client, TrainingSettings, Update
from flwr_frl.clients.device.conversions import Tensors
from flwr_frl.clients.device.parameter_groups import WHOLE
from flwr_frl.clients.device.training import class_means, labelled_features
from flwr_frl.clients.device.traits import linear_head, needs_classes, separate_head
from flwr_frl.clients.fedproto import NearPrototypes
from flwr_frl.common.messages import PROTOTYPE_COUNTS, PROTOTYPES
from flwr_frl.common.settings import setting

CENTROIDS, STATISTICS = "prototypes.", "statistics."
# The authors' learning rate of the head, 0.1, relative to the other one, 0.01.
HEAD_RATIO = 10


@dataclass(frozen=True)
class FedPACSettings(TrainingSettings):
    """Settings of FedPAC's clients.

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

    fedpac_lambda: float = setting(1.0, ge=0)
    fedpac_head_epochs: int = setting(1, ge=0)
    fedpac_head_learning_rate: float = setting(0.0, ge=0)

    @property
    def head_rate(self) -> float:
        """Learning rate of the head."""
        return self.fedpac_head_learning_rate or HEAD_RATIO * self.learning_rate

    def in_round(self, server_round: int, rounds: int) -> Self:
        """Return the settings with both learning rates of one of the rounds."""
        scheduled = super().in_round(server_round, rounds)
        factor = scheduled.learning_rate / self.learning_rate
        rate = factor * self.fedpac_head_learning_rate
        return replace(scheduled, fedpac_head_learning_rate=rate)


class FedPACClient(
    Client, requires=(needs_classes, linear_head("FedPAC"), separate_head)
):
    """Algorithm 1, client side: the server sends representation, centroids and head.

    The head trains first, then the representation under the trained head, with λ times
    the mean squared distance of a feature's entries to those of its class's centroid.
    As in the authors' code, that is a mean over the entries. A class without a centroid
    contributes nothing; the authors' code then uses the client's own centroid.
    """

    shared = (*WHOLE, CENTROIDS)
    sent = (*WHOLE, CENTROIDS, STATISTICS)
    _settings_type = FedPACSettings

    def initial_group(self, group: str) -> Tensors:
        """Return zeros, as there are neither centroids nor statistics yet."""
        classes, width = self.model.linear_head("FedPAC").weight.shape
        if group == STATISTICS:
            return {
                "features": torch.zeros(classes, width),
                "variance": torch.zeros(()),
            }
        counts = torch.zeros(classes, dtype=torch.int64)
        return {"means": torch.zeros(classes, width), "counts": counts}

    def update(self) -> Update:
        """Measure the received features, and train the head, then the representation.

        Representation, head, new class means and the statistics are sent.
        """
        settings, near = self.settings, None
        statistics = self.statistics_of(*labelled_features(self))
        if settings.fedpac_lambda:
            means, counts = self.received[PROTOTYPES], self.received[PROTOTYPE_COUNTS]
            near = NearPrototypes(settings.fedpac_lambda, means, counts > 0)
        self._train_head(settings.fedpac_head_epochs)
        loss = self.train("representation", settings.representation_epochs, near)
        means, counts = class_means(*labelled_features(self), self.num_classes)
        centroids = {PROTOTYPES: means, PROTOTYPE_COUNTS: counts}
        return loss, {**self.model.state_dict(), **centroids, **statistics}

    def _train_head(self, epochs: int) -> None:
        self.train("head", epochs, learning_rate=self.settings.head_rate)

    def personalize(self) -> None:
        """Train the head for ``newcomer-epochs``, with its learning rate."""
        self._train_head(self.settings.newcomer_epochs)

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return self.model.linear_head("FedPAC").out_features

    def statistics_of(self, features: Tensor, targets: Tensor) -> Tensors:
        """Return h_i and V_i of n examples.

        h_i is p_k times the mean feature of each class k, which has the share p_k of
        the examples; V_i = (mean ‖z‖² − Σ_k ‖h_ik‖²) / n.
        """
        n = max(1, len(targets))
        means, counts = class_means(features, targets, self.num_classes)
        shares = means * (counts / n).unsqueeze(1)
        # Rounding may make the variance of equal features negative.
        spread = features.square().sum() / n - shares.square().sum()
        variance = spread.clamp(min=0) / n
        return {f"{STATISTICS}features": shares, f"{STATISTICS}variance": variance}
