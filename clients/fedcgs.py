"""FedCGS (Guan et al., 2025) and Fed3R (Fanì et al., ICML 2024): heads in one round."""

from typing import Literal

import torch

from flwr_frl.clients.base import Client, Update, linear_head, needs_classes, on_copy
from flwr_frl.clients.device.groups import WHOLE, Tensors, within
from flwr_frl.clients.device.training import (
    class_counts,
    class_means,
    labelled_features,
)
from flwr_frl.common.messages import IS_CHANGE
from flwr_frl.common.settings import setting
from flwr_frl.task.models import SplitModel

PRIOR, STATISTICS = "prior.", "statistics."


class Fed3RClient(Client, requires=(needs_classes, linear_head("Fed3R", bias=True))):
    """Send statistics of the features, from which the server computes the head.

    For the features z and classes y of the training examples these are the number of
    examples and Σ z of each class, and Σ z zᵀ. The representation is the initial one,
    for example with pretrained ``weights``, and is not trained.
    """

    shared: tuple[str, ...] = WHOLE
    sent = (STATISTICS,)

    def initial_group(self, group: str) -> Tensors:
        """Return the statistics of no examples."""
        classes, width = self.model.linear_head("Fed3R").weight.shape
        counts, sums = torch.zeros(classes), torch.zeros(classes, width)
        return {"counts": counts, "sums": sums, "moments": torch.zeros(width, width)}

    def update(self) -> Update:
        """Return the loss of the received model, and the statistics."""
        features, targets = labelled_features(self)
        with torch.no_grad():
            loss = self.task.loss(self.model.head(features), targets)
        z, head = features.double(), self.model.linear_head("Fed3R")
        means, counts = class_means(z, targets, head.out_features)
        sums = means * counts.unsqueeze(1)
        statistics = {"counts": counts, "sums": sums, "moments": z.T @ z}
        self.metrics[IS_CHANGE] = 1
        sent = {name: value.float() for name, value in statistics.items()}
        return float(loss) if len(z) else 0.0, within(STATISTICS, sent)


class FedCGSClient(Fed3RClient):
    """Fed3R's client; the deployed head has the client's class frequencies.

    The server's head is a Gaussian classifier, whose bias contains the logarithm of the
    prior probability of the class. The paper has the same prior for all clients.

    Parameters
    ----------
    class_prior : {"client", "global"}, default "client"
        Prior of the deployed head: (n_c + 1) / (n + C) for n_c of the n training
        examples of the client, or of all clients of the round, and C classes.
    """

    shared = (*WHOLE, PRIOR)
    class_prior: Literal["client", "global"] = setting("client")

    def initial_group(self, group: str) -> Tensors:
        """Return the statistics of no examples, and the same prior of all classes."""
        statistics = super().initial_group(group)
        return {"log": statistics["counts"]} if group == PRIOR else statistics

    def deployed_model(self) -> SplitModel:
        """Return the model whose head has the client's prior."""
        received = self.received[f"{PRIOR}log"]
        counts = class_counts(self, len(received)).to(received) + 1
        if self.settings.class_prior == "global":
            return self.model
        with on_copy(self) as client, torch.no_grad():
            bias = client.model.linear_head("FedCGS").bias
            bias.add_((counts / counts.sum()).log() - received)
        return client.model
