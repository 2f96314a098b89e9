"""FedALA (Zhang et al., AAAI 2023): adaptive local aggregation of the global model."""

import torch
from torch import Tensor

from flwr_frl.clients.base import Client, on_copy
from flwr_frl.clients.device.groups import HEAD, Tensors, under, within
from flwr_frl.common.settings import setting
from flwr_frl.task.models import SplitModel, called_with
from flwr_frl.task.training.local_training import features_of
from flwr_frl.task.training.sgd import loop

OLD_MODEL, WEIGHTS, STARTED = "model.", "weights.", "started."


class FedALAClient(Client):
    """Algorithm 1, client side: the old model Θ_i and the weights W_i are personal.

    Local training starts from Θ_i + (Θ − Θ_i) ⊙ W_i in the head, the paper's p higher
    layers, and from the global model Θ below. Before that, for each batch,
    W_i ← clip(W_i − η ∇_W f) to [0, 1] (equation 5) with all else frozen.

    The deployed model is the same mixture, with W_i trained for Θ_i and the current
    global model, as in the authors' code. W_i trained for a test is discarded. Before
    its first local training, a client deploys the global model.

    In the authors' code, clients that are not sampled also continue from the mixture;
    here Θ_i is the model of the last local training, as in algorithm 1.

    Parameters
    ----------
    ala_learning_rate : float, default 1
        Learning rate η of the weights W (equation 5); 0 keeps them at 1 (FedAvg).
    ala_share : float, default 0.8
        Fraction s of the training examples on which W is trained, drawn again in each
        round.
    ala_start_epochs : int, default 10
        Epochs of the first training of W, which the paper continues until convergence.
        Later trainings take one epoch.
    """

    personal = (OLD_MODEL, WEIGHTS, STARTED)
    ala_learning_rate: float = setting(1.0, ge=0)
    ala_share: float = setting(0.8, gt=0, le=1)
    ala_start_epochs: int = setting(10, ge=1)

    def initial_group(self, group: str) -> Tensors:
        """Return the initial model for Θ_i, weights of 1, and 0 for "not started"."""
        if group == STARTED:
            return {"value": torch.zeros(1)}
        if group == WEIGHTS:
            named = self.model.head.named_parameters()
            ones = {name: torch.ones(p.shape, dtype=p.dtype) for name, p in named}
            return within(HEAD, ones)
        return super().initial_group(group)

    def update(self) -> float:
        """Learn W_i, aggregate locally, and train for ``representation-epochs``."""
        self.learn_weights()
        self.aggregate_locally()
        loss = self.train("all", self.settings.representation_epochs)
        self.saved |= within(OLD_MODEL, self.model.state_dict())
        return loss

    def learn_weights(self) -> None:
        """Train W_i if this client has trained before and has training examples."""
        weights, rate = under(WEIGHTS, self.saved), self.settings.ala_learning_rate
        has_examples = len(self.task.train_examples(self._index)) > 0
        if not (rate and has_examples and self.has_trained()):
            return
        head = self.model.head
        some = self.train_examples.sample(self.settings.ala_share)
        started = self.saved[STARTED + "value"]
        epochs = 1 if started.item() else self.settings.ala_start_epochs
        started.fill_(1)

        def step(features: Tensor, targets: Tensor) -> Tensor:
            w = {n: weight.detach().requires_grad_() for n, weight in weights.items()}
            with self.settings.autocast():
                mixed = under(HEAD, self.mixture(w))
                loss = self.task.loss(called_with(head, mixed, features), targets)
            slopes = torch.autograd.grad(loss, [*w.values()], materialize_grads=True)
            for weight, slope in zip(weights.values(), slopes, strict=True):
                weight.sub_(slope, alpha=rate).clamp_(0, 1)
            return loss.detach()

        self.model.requires_grad_(False).eval()
        loop(step, features_of(self.model, some, self.settings), epochs, self.settings)

    def has_trained(self) -> bool:
        """Return whether Θ_i, perhaps of an earlier run, is not the initial model."""
        old, initial = under(OLD_MODEL, self.saved), self.task.initial_state
        return any(not torch.equal(old[n].cpu(), initial[n].cpu()) for n in initial)

    def mixture(self, weights: Tensors) -> Tensors:
        """Return Θ_i + (Θ − Θ_i) ⊙ W_i for the parameters of the head."""
        old, new = under(OLD_MODEL, self.saved), self.received
        # `lerp` returns exactly Θ for a weight of 1.
        return {n: torch.lerp(old[n], new[n], weight) for n, weight in weights.items()}

    def aggregate_locally(self) -> None:
        """Load the mixture into the model."""
        head = self.mixture(under(WEIGHTS, self.saved))
        self.model.load({**self.model.tensors, **head})

    def deployed_model(self) -> SplitModel:
        """Return the mixture of old and global model with newly trained W_i.

        Without training examples, W_i is unchanged.
        """
        with on_copy(self) as client:
            client.learn_weights()
            client.aggregate_locally()
        return client.model
