"""FedKD (Wu et al., Nature Communications 2022): a local mentor, a shared mentee."""

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from flwr_frl.clients.base import Update, linear_head, needs_classes
from flwr_frl.clients.device.architectures import LINK, SmallModelClient, divergence
from flwr_frl.clients.device.groups import difference, within
from flwr_frl.common.low_rank import low_rank
from flwr_frl.common.messages import ENERGY, IS_CHANGE


class FedKDClient(SmallModelClient, requires=(needs_classes, linear_head("FedKD"))):
    """FedKD, client side: the mentor is personal, the mentee is shared.

    With the losses L of the mentor and L' of the mentee, each step minimises
    L + L' + (KL(p' ‖ p) + KL(p ‖ p') + 2 ‖z − W z'‖² / d) / (L + L') over both models
    and W, the personal matrix that maps the mentee's features z' to the d features z of
    the mentor. This is adaptive mutual distillation with the hidden loss of the last
    layer; the paper has one for all layers and attention maps of transformers. As in
    the authors' code and HtFLlib, one objective is differentiated by all parameters;
    there, KL is divided by the number of classes as well. The widths of the features
    may differ. The mentor is deployed.

    The client sends the change of the mentee, with matrices of lower rank (`low_rank`);
    HtFLlib reduces the mentee itself. The product of the factors is sent, so messages
    are not smaller.
    """

    personal = (*SmallModelClient.personal, LINK)

    def link(self) -> nn.Linear:
        """Return W."""
        return self.layer(*self.widths("FedKD"), bias=False)

    def update(self) -> Update:
        """Train both models for ``representation-epochs``, and send the change."""
        mentor, mentee = self.model, self.small_model()
        transform = self.link()

        def objective(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            z, of_mentee = mentor.representation(inputs), mentee.representation(inputs)
            outputs, others = mentor.head(z), mentee.head(of_mentee)
            loss = self.task.loss(outputs, targets)
            both = loss + self.task.loss(others, targets)
            mutual = divergence(outputs, others) + divergence(others, outputs)
            hidden = 2 * mse_loss(transform(of_mentee), z)
            return loss, both + (mutual + hidden) / both

        loss, trained = self.train_both(objective, mentee, transform)
        self.saved |= within(LINK, transform.state_dict())
        energy = float(self.config.get(ENERGY, 1))
        changes = difference(trained, self.received)
        self.metrics[IS_CHANGE] = 1
        parts = {n: low_rank(c.cpu().numpy(), energy) for n, c in changes.items()}
        return loss, {name: torch.from_numpy(part) for name, part in parts.items()}
