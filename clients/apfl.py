"""APFL (Deng et al., 2020): a mixture of a personal and the global model."""

import torch
from flwr.common import NDArrays
from torch import Tensor

from flwr_frl.clients.base import Client, Config, Evaluation
from flwr_frl.clients.device.conversions import Tensors, under, within
from flwr_frl.clients.device.personal_model import PERSONAL_MODEL
from flwr_frl.common.settings import setting
from flwr_frl.task.models import SplitModel, called_with
from flwr_frl.task.models.frozen import copy_sharing_frozen
from flwr_frl.task.training.sgd import freeze, loop

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
        """Train v_i, starting from w, and α_i for ``newcomer-epochs`` with w fixed."""
        v = copy_sharing_frozen(self.model)
        self.mix(v, self.settings.newcomer_epochs, moves_global=False)

    def mix(self, v: SplitModel, epochs: int, moves_global: bool = True) -> float:
        """Train v_i and α_i, and with ``moves_global`` also w_i.

        Returns the mean loss of v̄_i over the last epoch.
        """
        w = self.model.requires_grad_(False)
        trained = (w, v) if moves_global else (v,)
        optimizers = [self.settings.optimizer(freeze(m, "all")) for m in trained]
        alpha = self.saved[ALPHA + "value"].clone()

        def step(inputs: Tensor, targets: Tensor) -> Tensor:
            for optimizer in optimizers:
                optimizer.zero_grad()
            with self.settings.autocast():
                loss = self.global_loss(inputs, targets) if moves_global else 0.0
                outputs = called_with(v, mixture(alpha, v, w), inputs)
                mixed_loss = self._loss(outputs, targets)
            (loss + mixed_loss).backward()  # type: ignore[no-untyped-call]
            for optimizer in optimizers:
                optimizer.step()
            if alpha.grad is not None:
                # Only the first step of a loop updates α.
                alpha.requires_grad_(False)
                alpha.sub_(alpha.grad, alpha=self.settings.learning_rate).clamp_(0, 1)
                alpha.grad = None
            return mixed_loss.detach()

        # A newcomer's v starts at w, where α has no gradient: update α every epoch.
        updates = 1 if moves_global else max(1, epochs)
        for _ in range(updates):
            alpha.requires_grad_(self.settings.apfl_adaptive)
            mean = loop(step, self.train_examples, epochs // updates, self.settings, v)
        self.saved = within(PERSONAL_MODEL, v.state_dict())
        self.saved[ALPHA + "value"] = alpha.detach()
        return mean

    def global_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return w's loss, plus the proximal term if the server sends μ."""
        loss = self._loss(self.model(inputs), targets)
        return loss + self._proximal(inputs, self.model)

    def personal_model(self) -> SplitModel:
        """Return v_i, or its initial values, as a separate model."""
        model = copy_sharing_frozen(self.model)
        model.load_state_dict(under(PERSONAL_MODEL, self.saved))
        return model

    def evaluate(self, parameters: NDArrays, config: Config) -> Evaluation:
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
