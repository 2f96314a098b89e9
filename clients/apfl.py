"""APFL (Deng et al., 2020): a mixture of a personal and the global model."""

import torch
from flwr.common import NDArrays
from torch import Tensor, nn

from flwr_frl.clients.base import Client, Config, EvaluateResult
from flwr_frl.clients.device.groups import Tensors, under, within
from flwr_frl.clients.device.personal_model import PERSONAL_MODEL
from flwr_frl.clients.device.training import minimise
from flwr_frl.common.settings import setting
from flwr_frl.task.models import SplitModel, called_with
from flwr_frl.task.models.frozen import copy_sharing_frozen
from flwr_frl.task.training.sgd import SGD, freeze

ALPHA = "alpha."


class APFLClient(Client):
    """Algorithm 1, client side: w_i is sent, v_i is personal.

    Each step uses one batch for both models: w ← w − η ∇f(w) and v ← v − η ∇_v f(v̄),
    where v̄ = α v + (1 − α) w is the deployed model. In the first step of a round,
    α ← α − η ⟨v − w, ∇f(v̄)⟩, clipped to [0, 1].

    Parameters
    ----------
    apfl_alpha : float, default 0.5
        Initial weight α_i of the personal model: 0 is the global model, 1 the personal
        one.
    apfl_adaptive : bool, default True
        Whether each client updates its α_i once a round.
    """

    personal = (PERSONAL_MODEL, ALPHA)
    apfl_alpha: float = setting(0.5, ge=0, le=1)
    apfl_adaptive: bool = setting(True)

    def initial_group(self, group: str) -> Tensors:
        """Return the initial model for v_i, and ``apfl-alpha`` for α_i."""
        if group == ALPHA:
            return {"value": torch.tensor([self.settings.apfl_alpha])}
        return super().initial_group(group)

    def update(self) -> float:
        """Train w_i and v_i for ``representation-epochs``."""
        return self.mix(self.personal_model(), self.settings.representation_epochs)

    def personalize(self) -> None:
        """Train v_i, starting from w, for ``newcomer-epochs`` with w and α_i fixed."""
        v = copy_sharing_frozen(self.model)
        self.mix(v, self.settings.newcomer_epochs, only_personal=True)

    def mix(self, v: SplitModel, epochs: int, only_personal: bool = False) -> float:
        """Train v_i and, unless ``only_personal``, w_i and α_i.

        Returns the mean loss of v̄_i over the last epoch.
        """
        settings, w = self.settings, self.model.requires_grad_(False)
        adapts = settings.apfl_adaptive and not only_personal
        alpha = nn.Parameter(self.saved[ALPHA + "value"].clone(), adapts)
        # Only the first step of a round updates α.
        if adapts:
            hook = alpha.register_post_accumulate_grad_hook
            hook(lambda a: a.requires_grad_(False))  # type: ignore[no-untyped-call]
        plain = SGD(settings.learning_rate, momentum=0.0, weight_decay=0.0)
        optimizers = [
            settings.optimizer(freeze(v, "all")),
            plain.optimizer(nn.ParameterDict({"alpha": alpha})),
        ]
        if not only_personal:
            optimizers.append(settings.optimizer(freeze(w, "all")))

        def objective(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            alpha.data.clamp_(0, 1)
            loss = 0.0 if only_personal else self.task.loss(w(inputs), targets)
            outputs = called_with(v, mixture(alpha, v, w), inputs)
            mixed_loss = self.task.loss(outputs, targets)
            return mixed_loss, loss + mixed_loss

        mean = minimise(self, objective, epochs, optimizers, v)
        self.saved = within(PERSONAL_MODEL, v.state_dict())
        self.saved[ALPHA + "value"] = alpha.detach().clamp(0, 1)
        return mean

    def personal_model(self) -> SplitModel:
        """Return v_i, or its initial values, as a separate model."""
        model = copy_sharing_frozen(self.model)
        model.load_state_dict(under(PERSONAL_MODEL, self.saved))
        return model

    def evaluate(self, parameters: NDArrays, config: Config) -> EvaluateResult:
        """Test v̄_i; ``accuracy-global`` is the global model's, ``alpha`` is α_i."""
        loss, num_examples, metrics = super().evaluate(parameters, config)
        metrics["alpha"] = self.saved[ALPHA + "value"].item()
        return loss, num_examples, metrics

    def deployed_model(self) -> SplitModel:
        """Return v̄_i = α_i v_i + (1 − α_i) w."""
        v = self.personal_model()
        mixed = mixture(self.saved[ALPHA + "value"], v, self.model)
        v.load_state_dict({**v.state_dict(), **mixed})
        return v


def mixture(alpha: Tensor, v: SplitModel, w: SplitModel) -> Tensors:
    """Return the parameters α v + (1 − α) w; w is a constant, α of shape (1,)."""
    others = dict(w.named_parameters())
    return {
        name: alpha * parameter + (1 - alpha) * others[name].detach()
        for name, parameter in v.named_parameters()
    }
