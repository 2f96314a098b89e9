"""FedLC (Zhang et al., ICML 2022): logits calibrated by the client's class counts."""

from torch import Tensor, nn

from flwr_frl.clients.base import Client, needs_classes
from flwr_frl.clients.device.training import class_counts, for_each_class
from flwr_frl.common.settings import setting
from flwr_frl.task.models import SplitModel
from flwr_frl.task.training.local_training import train


class CalibratedHead(nn.Module):
    """A head whose outputs are lowered by a margin for each class.

    Parameters
    ----------
    head : nn.Module
        The head.
    margins : Tensor of shape (classes,)
        The margins.
    """

    def __init__(self, head: nn.Module, margins: Tensor) -> None:
        super().__init__()
        self.head = head
        self.margins = nn.Buffer(margins)

    def forward(self, features: Tensor) -> Tensor:
        """Return the calibrated outputs."""
        outputs: Tensor = self.head(features)
        return outputs - for_each_class(self.margins, outputs)


class FedLCClient(Client, requires=(needs_classes,)):
    """Minimise the cross-entropy of the calibrated logits f_c(x) − τ n_c^(−1/4).

    n_c is the client's number of training examples of class c (section 4). Classes
    without examples have the margin ∞: they take no part in the loss, and their logits
    are not trained down. Equal counts of all classes give FedAvg. Clients are tested
    without margins.

    In the paper's equation the denominator lacks the target's own term, so that the
    loss has no lower bound, and is −∞ if a client has one class. Here, as in the
    paper's text and in PFLlib, it is the softmax cross-entropy. PFLlib's n_c are the
    counts of all clients together, so that all have the same margins.

    Parameters
    ----------
    fedlc_tau : float, default 1
        τ of the margins.
    """

    fedlc_tau: float = setting(1.0, gt=0)

    def update(self) -> float:
        """Train for ``representation-epochs``; return the calibrated loss."""
        counts = class_counts(self, len(self.task.classes or ()))
        margins = self.settings.fedlc_tau * counts.float().pow(-1 / 4)
        head = CalibratedHead(self.model.head, margins.to(self._device))
        model = SplitModel(self.model.representation, head)
        how = self.task.loss, self.settings.representation_epochs, self.settings
        return train(model, "all", self.train_examples, *how)
