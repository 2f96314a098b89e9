"""FedDPA (Yang et al., NeurIPS 2024): a global and a personal adapter."""

import torch

from flwr_frl.clients.device.groups import under, within
from flwr_frl.clients.device.personal_model import PERSONAL_MODEL, PersonalModelClient
from flwr_frl.common.settings import setting
from flwr_frl.task.models import SplitModel
from flwr_frl.task.models.adapters import is_lora, lora_layers, needs_lora
from flwr_frl.task.models.frozen import copy_sharing_frozen


class FedDPAClient(
    PersonalModelClient, requires=(needs_lora,), supports_example_dp=True
):
    """FedDPA-T, which trains both adapters in every round.

    The deployed model computes h = W x + (1 − α) ΔW_g x + α ΔW_p x, where ΔW = B A
    times LoRA's factor. First, the personal adapter ΔW_p is trained in this formula,
    with the received global adapter ΔW_g constant. Then the global adapter is trained
    alone, from the received values, and sent. Each adapter has its own head; the
    deployed model has that of the personal adapter.

    The weight α is constant. The paper also proposes one that depends on an example's
    similarity to training examples (instance-wise dynamic weighting). In the authors'
    code, personal adapters train from the second round on, here from the first.
    ``representation-epochs`` are those of the global adapter.

    Parameters
    ----------
    feddpa_alpha : float, default 0.5
        Weight α of the personal adapter; 1 − α is that of the global one.
    personal_epochs : int, default 1
        Epochs of the personal adapter.
    """

    feddpa_alpha: float = setting(0.5, ge=0, le=1)
    personal_epochs: int = setting(1, ge=0)

    def update(self) -> float:
        """Train the personal adapter, and then the global one."""
        self.train_personal(self.settings.personal_epochs)
        return self.train("all", self.settings.representation_epochs)

    def personalize(self) -> None:
        """Train the personal adapter for ``newcomer-epochs``."""
        self.train_personal(self.settings.newcomer_epochs)

    def train_personal(self, epochs: int) -> None:
        """Train the personal adapter and its head with the global adapter fixed."""
        shared, self.model = self.model, self.personal_model()
        for layer in lora_layers(self.model):
            for adapter in layer.scaling:
                layer.scaling[adapter] *= self.settings.feddpa_alpha
        self.train("all", epochs)
        self.saved |= within(PERSONAL_MODEL, self.model.state_dict())
        self.model = shared

    def deployed_model(self) -> SplitModel:
        """Return the model with both adapters."""
        model = self.personal_model()
        for name, parameter in model.named_parameters():
            if is_lora(name, "B"):
                parameter.data.mul_(self.settings.feddpa_alpha)
        return model

    @torch.no_grad()
    def personal_model(self) -> SplitModel:
        """Return a model with the personal adapter and W + (1 − α) ΔW_g in place of W.

        The adapter's factor is LoRA's, without α.
        """
        model = copy_sharing_frozen(self.model)
        for layer in lora_layers(model):
            base, alpha = layer.get_base_layer(), self.settings.feddpa_alpha
            deltas = map(layer.get_delta_weight, layer.active_adapters)
            base.weight = base.weight + (1 - alpha) * sum(deltas)
        model.load_state_dict(under(PERSONAL_MODEL, self.saved))
        return model
