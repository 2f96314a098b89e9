"""FedDBE (Zhang et al., NeurIPS 2023): FedAvg with a domain bias eliminator."""

import torch
from torch import Tensor, nn

from flwr_frl.clients.base import Arrays, Client, Config, on_copy
from flwr_frl.clients.device.groups import WHOLE, Tensors
from flwr_frl.clients.device.training import minimise
from flwr_frl.common.errors import SettingsError
from flwr_frl.common.messages import CONSENSUS
from flwr_frl.common.settings import setting
from flwr_frl.task.base import Task
from flwr_frl.task.models import SplitModel
from flwr_frl.task.training.sgd import freeze

MEMORY = "memory."


def biased_first_layer(task: Task) -> None:
    """Refuse heads that do not begin with a linear layer with a bias."""
    layer = task.scratch_model.first_linear
    if layer is None or layer.bias is None:
        raise SettingsError(
            "it needs a head that begins with a linear layer with a bias", "no-bias"
        )


class FedDBEClient(Client, requires=(biased_first_layer,)):
    """Algorithm 1, client side: the model is shared, the memory z̄_i^p is personal.

    The model is head(representation(x) + z̄_i^p). Both parts and the memory train with
    the same step size; the mean features z̄_i are regularised towards z̄.

    Parameters
    ----------
    dbe_kappa : float, default 50
        κ of the mean regularisation κ/2 mean (z̄_i − z̄)² over the features' entries
        (the ½ is from the authors' code); 0 omits it.
    dbe_momentum : float, default 1
        μ of z̄_i ← (1 − μ) z̄_i + μ (mean features of a batch), from 0 in each round. A
        last batch of n examples has weight μ n / b if the other batches have b.
    """

    shared = (*WHOLE, CONSENSUS)
    sent = WHOLE
    personal = (MEMORY,)
    dbe_kappa: float = setting(50.0, ge=0)
    dbe_momentum: float = setting(1.0, gt=0, le=1)

    @property
    def layer(self) -> nn.Linear:
        """The first layer of the head."""
        layer = self.model.first_linear
        assert layer is not None
        return layer

    def initial_group(self, group: str) -> Tensors:
        """Return zeros for the memory and for the initial z̄."""
        name = "mean" if group == CONSENSUS else "value"
        dtype = self.layer.weight.dtype
        return {name: torch.zeros(self.layer.in_features, dtype=dtype)}

    def statistics(self, config: Config) -> Arrays:
        """Return ``mean``: z̄_i after local training of the initial model."""
        self.model.load(self.task.initial_state)
        mean, _ = self.learn(None, None)
        return {"mean": mean.numpy(force=True)}

    def update(self) -> float:
        """Train the model and the memory for ``representation-epochs``."""
        consensus = self.received[f"{CONSENSUS}mean"]
        return self.learn(self.saved[f"{MEMORY}value"], consensus)[1]

    def learn(
        self, memory: Tensor | None, consensus: Tensor | None
    ) -> tuple[Tensor, float]:
        """Train with the given terms; return z̄_i and the loss.

        Parameters
        ----------
        memory : Tensor, optional
            z̄_i^p, which is trained in place.
        consensus : Tensor, optional
            z̄.
        """
        settings, model = self.settings, self.model
        # The parameter shares the memory's storage. Named as a bias, it does not decay.
        bias = nn.ParameterDict({} if memory is None else {"bias": memory})
        optimizer = settings.optimizer(nn.ModuleList([freeze(model, "all"), bias]))
        mean = torch.zeros_like(self.layer.weight[0]).detach()
        # With fewer examples, the only batch is a full one.
        batch = min(settings.batch_size, len(self.train_examples))

        def objective(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal mean
            features = model.representation(inputs)
            moved = features if memory is None else features + bias["bias"]
            loss = self.task.loss(model.head(moved), targets)
            now = features.flatten(0, -2).mean(0)
            # A last batch of one example must not replace the mean.
            momentum = settings.dbe_momentum * len(targets) / batch
            mean = (1 - momentum) * mean.detach() + momentum * now
            if consensus is None:
                return loss, loss
            distance = (mean - consensus).square().mean()
            return loss, loss + settings.dbe_kappa / 2 * distance

        loss = minimise(self, objective, settings.representation_epochs, [optimizer])
        return mean.detach().to(self.layer.weight.dtype), loss

    @torch.no_grad()
    def deployed_model(self) -> SplitModel:
        """Return the model with the memory in its head: W (z + p) + b."""
        with on_copy(self) as client:
            layer = client.layer
            layer.bias.add_(layer.weight @ self.saved[f"{MEMORY}value"])
        return client.model
