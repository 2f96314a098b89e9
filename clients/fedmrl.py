"""FedMRL (Yi et al., NeurIPS 2024): Matryoshka representations with a small model."""

import torch
from torch import Tensor, nn

from flwr_frl.clients.base import Config, Update, linear_head, needs_classes
from flwr_frl.clients.device.architectures import LINK, SmallModelClient
from flwr_frl.clients.device.groups import within
from flwr_frl.common.errors import require
from flwr_frl.task.models import SplitModel


class Beside(nn.ModuleList):
    """Representations whose features are concatenated."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of all, side by side."""
        return torch.cat([each(x) for each in self], -1)


class FedMRLClient(SmallModelClient, requires=(needs_classes, linear_head("FedMRL"))):
    """Algorithm 1, client side: the model and the projection P are personal.

    With the features z' of the small model and z of the client's, each step minimises
    L(h(r)) + L(h'(r')) for r = P [z'; z], of which r' is the first part, as long as z'.
    h and h' are the heads of the two models. Both losses have weight 1, as in HtFLlib.
    The deployed model is h(r) with the received small model.
    """

    personal = (*SmallModelClient.personal, LINK)

    def get_properties(self, config: Config) -> Config:
        """Refuse a small model with more features than the client's."""
        small, own = self.widths("FedMRL")
        allowed = f"a model with at most {own} features, not {small}"
        require(small <= own, "shared-model", self.settings.shared_model, allowed)
        return super().get_properties(config)

    def link(self) -> nn.Linear:
        """Return P."""
        small, own = self.widths("FedMRL")
        return self.layer(small + own, own)

    def fused(self, small: SplitModel) -> nn.Sequential:
        """Return both representations, followed by P."""
        both = Beside([small.representation, self.model.representation])
        return nn.Sequential(both, self.link())

    def update(self) -> Update:
        """Train all parts for ``representation-epochs``, and send the small model."""
        small, width = self.small_model(), self.widths("FedMRL")[0]
        fused = self.fused(small)

        def objective(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            features = fused(inputs)
            loss = self.task.loss(self.model.head(features), targets)
            coarse = self.task.loss(small.head(features[..., :width]), targets)
            return loss, loss + coarse

        result = self.train_both(objective, small, fused[1])
        self.saved |= within(LINK, fused[1].state_dict())
        return result

    def deployed_model(self) -> SplitModel:
        """Return the model on the projected features."""
        return SplitModel(self.fused(self.small_model()), self.model.head)
