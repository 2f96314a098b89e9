"""FedRoD (Chen & Chao, ICLR 2022): a generic head and a personalised one."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flwr_frl.clients.base import Client, linear_head, needs_classes
from flwr_frl.clients.device.groups import HEAD, Tensors, under, within
from flwr_frl.clients.device.training import class_counts, for_each_class
from flwr_frl.task.examples import Loss
from flwr_frl.task.models import SplitModel
from flwr_frl.task.training.local_training import train

PERSONAL_HEAD = "personal-head."


class TwoHeads(nn.Module):
    """Both heads' outputs in training, of shape (batch, 2, classes).

    The cross-entropy of the first, g(x) + log N, is the balanced softmax loss of the
    generic head g. The second is g(x) + p(x), with g and x detached.

    Parameters
    ----------
    generic, personal : nn.Linear
        The heads g and p.
    log_counts : Tensor of shape (classes,)
        log N_c, where N_c is the number of training examples of class c.
    """

    def __init__(
        self, generic: nn.Linear, personal: nn.Linear, log_counts: Tensor
    ) -> None:
        super().__init__()
        self.generic = generic
        self.personal = personal
        self.log_counts = nn.Buffer(log_counts)

    def forward(self, features: Tensor) -> Tensor:
        """Return both outputs."""
        generic = self.generic(features)
        personal = generic.detach() + self.personal(features.detach())
        counts = for_each_class(self.log_counts, generic)
        return torch.stack([generic + counts, personal], 1)


@dataclass(frozen=True)
class BothLosses:
    """The sum of the losses of both heads."""

    loss: Loss

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum."""
        return self.loss(outputs[:, 0], targets) + self.loss(outputs[:, 1], targets)


class FedRoDClient(Client, requires=(needs_classes, linear_head("FedRoD"))):
    """Algorithm 1, client side, with linear personalised heads.

    In each step, the representation and the generic head g minimise the balanced
    softmax loss −log (N_y exp g_y / Σ_c N_c exp g_c), and the personalised head p
    minimises the loss of the client's prediction g + p. p starts at 0; in PFLlib it
    starts as a copy of g.
    """

    personal = (PERSONAL_HEAD,)

    def initial_group(self, group: str) -> Tensors:
        """Return a personalised head whose parameters are 0."""
        head = under(HEAD, self.task.initial_state)
        return {name: torch.zeros_like(tensor) for name, tensor in head.items()}

    def update(self) -> float:
        """Train both heads for ``representation-epochs``.

        The training loss is the sum of the losses of both heads.
        """
        generic = self.model.linear_head("FedRoD")
        personal = copy.deepcopy(generic)
        personal.load_state_dict(under(PERSONAL_HEAD, self.saved))
        counts = class_counts(self, generic.out_features).to(generic.weight.dtype)
        # log N_c is −∞ for a class without examples.
        heads = TwoHeads(generic, personal, counts.log().to(self._device))
        model = SplitModel(self.model.representation, heads)
        how = BothLosses(self.task.loss), self.settings.representation_epochs
        loss = train(model, "all", self.train_examples, *how, self.settings)
        self.saved = within(PERSONAL_HEAD, personal.state_dict())
        return loss

    def deployed_model(self) -> SplitModel:
        """Return the model with the head g + p, which is also one linear layer."""
        # A copy, as g may share its weights with the representation.
        head = copy.deepcopy(self.model.linear_head("FedRoD"))
        for name, p in under(PERSONAL_HEAD, self.saved).items():
            head.get_parameter(name).detach().add_(p)
        return SplitModel(self.model.representation, head)
