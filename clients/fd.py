"""FD (Jeong et al., 2018): federated distillation with mean outputs of each class."""

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, softmax

from flwr_frl.clients.base import Update, needs_classes
from flwr_frl.clients.device.architectures import OwnArchitectureClient
from flwr_frl.clients.device.groups import WHOLE, Tensors
from flwr_frl.clients.device.training import minimise
from flwr_frl.common.messages import PROTOTYPE_COUNTS, PROTOTYPES
from flwr_frl.common.settings import setting


class FDClient(OwnArchitectureClient, requires=(needs_classes,)):
    """FD, client side: the model is personal, and the mean outputs are sent.

    Each step minimises L + γ H(F̂_y, F), where F are the model's probabilities, H is the
    cross-entropy, and F̂_y is the received mean for the example's class y. The F of all
    steps of a round, before each step, are averaged by class and sent. Classes without
    a received mean contribute no second term. HtFLlib averages outputs before the
    softmax, and uses them as the target of the cross-entropy; the paper, which is
    followed, normalises them first.

    Parameters
    ----------
    fd_gamma : float, default 1
        Weight γ of the distillation; 0 is local training.
    """

    shared = "prototypes"
    personal = WHOLE
    fd_gamma: float = setting(1.0, ge=0)

    def initial_group(self, group: str) -> Tensors:
        """Return zeros, as there are no means yet."""
        classes = len(self.task.classes)
        counts = torch.zeros(classes, dtype=torch.int64)
        return {"means": torch.zeros(classes, classes), "counts": counts}

    def update(self) -> Update:
        """Train towards the received means F̂, and send the client's."""
        means, known = self.received[PROTOTYPES], self.received[PROTOTYPE_COUNTS] > 0
        sums = torch.zeros_like(means)
        counts = torch.zeros_like(self.received[PROTOTYPE_COUNTS])

        def objective(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            outputs, y = self.model(inputs), targets.flatten()
            loss = self.task.loss(outputs, targets)
            scores = outputs.movedim(1, -1).flatten(0, -2)
            # Cross-entropy ignores negative targets.
            place, counted = y.clamp(min=0), y >= 0
            probabilities = softmax(scores.detach().float(), 1) * counted[:, None]
            sums.index_add_(0, place, probabilities)
            counts.index_add_(0, place, counted.to(counts.dtype))
            near = -(means[place] * log_softmax(scores, 1)).sum(1)
            near = near * (known[place] & counted)
            return loss, loss + self.settings.fd_gamma * near.mean()

        loss = minimise(self, objective, self.settings.representation_epochs)
        averages = sums / counts.clamp(min=1)[:, None]
        return loss, {PROTOTYPES: averages, PROTOTYPE_COUNTS: counts}
