"""CCVR (Luo et al., NeurIPS 2021): describe the features in the last round."""

import torch

from flwr_frl.clients.base import Client, Update, linear_head, needs_classes
from flwr_frl.clients.device.groups import WHOLE, Groups, Tensors, within
from flwr_frl.clients.device.training import (
    class_means,
    labelled_features,
    received_loss,
)
from flwr_frl.common.messages import CALIBRATE

STATISTICS = "statistics."


class CCVRClient(Client, requires=(needs_classes, linear_head("CCVR", bias=True))):
    """Algorithm 1, client side: train as with FedAvg, and describe the features.

    In the last round, the client sends the number n_c, the mean and the covariance
    (over n_c − 1; 0 for one example) of the received representation's features of each
    class, over its training examples without augmentation, and trains nothing.
    """

    sent: Groups = WHOLE

    def initial_group(self, group: str) -> Tensors:
        """Return the statistics of no examples."""
        classes, width = self.model.linear_head("CCVR").weight.shape
        return {
            "counts": torch.zeros(classes, dtype=torch.int64),
            "means": torch.zeros(classes, width),
            "covariances": torch.zeros(classes, width, width),
        }

    def update(self) -> Update:
        """Train for ``representation-epochs``, or return the statistics."""
        if not self.config.get(CALIBRATE):
            return self.train("all", self.settings.representation_epochs)
        self.sent = (STATISTICS,)
        loss, (features, targets) = received_loss(self), labelled_features(self)
        z, head = features.double(), self.model.linear_head("CCVR")
        means, counts = class_means(z, targets, head.out_features)
        covariances = []
        for c, count in enumerate(counts.tolist()):
            centred = z[targets == c] - means[c]
            covariances.append(centred.T @ centred / max(count - 1, 1))
        moments = {"means": means, "covariances": torch.stack(covariances)}
        statistics = {name: value.float() for name, value in moments.items()}
        return loss, within(STATISTICS, {"counts": counts, **statistics})
