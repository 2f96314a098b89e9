"""APPLE (Luo & Wu, IJCAI 2022): each client learns how much others' models help it."""

from math import cos, pi

import torch
from torch import Tensor, nn

from flwr_frl.clients.base import Update
from flwr_frl.clients.device.groups import WHOLE, Tensors, under, within
from flwr_frl.clients.device.personal_model import PERSONAL_MODEL, PersonalModelClient
from flwr_frl.clients.device.training import minimise
from flwr_frl.common import messages as keys
from flwr_frl.common.errors import require
from flwr_frl.common.settings import setting
from flwr_frl.task.models import called_with
from flwr_frl.task.training.sgd import freeze

CORE = "core."
WEIGHTS = keys.MODEL_WEIGHTS.partition(".")[0] + "."
GROUP = keys.RELATIONS.partition(".")[0] + "."


class APPLEClient(PersonalModelClient):
    """Client side: core model w_i and personal model Σ_j p_ij w_j are personal.

    In each step, w_i and p_i descend on F_i(Σ_j p_ij w_j) + λ(r) μ/2 ‖p_i − p_0‖², by
    SGD, so that the gradient of w_i is p_ii ∇F_i. Other core models w_j are constant,
    and so are the p_ij of those that are not received: the server sends their sum. p_0
    has the clients' shares of the examples. λ(r) is (cos(π r/L) + 1)/2 in the rounds
    r < L (from 0), and 0 afterwards.

    w_i and the p_ij are sent. Statistics of batch norms are not mixed: they are those
    of the client's own training. The deployed model is Σ_j p_ij w_j at the end of the
    last training; before it, with p_0 and current core models. A client that joins
    later learns p_i and w_i for ``newcomer-epochs``, from p_0 and the initial model.

    The authors' code is without the factor 1/2, has momentum for p_i, and by default
    an exponential λ(r). PFLlib replaces ⟨∇F_i, w_j⟩ in the gradient of p_ij by a mean
    over arrays of means over entries, starts from p_ij = 1/N, changes w_i before the
    p_ij, multiplies the learning rate of w_i by the number N of clients, and has λ of
    the round before.

    Parameters
    ----------
    apple_models : int, default 5
        Largest number M of other clients' core models, as for the strategy.
    apple_learning_rate : float, default 0.001
        Learning rate of p_i (the authors' code).
    apple_mu : float, default 0.1
        Weight μ of the distance to p_0 (the authors' code).
    apple_rounds : float, default 0.1
        L as a share of ``num-server-rounds`` (the authors' code).
    num_server_rounds
        For L.
    """

    shared = (keys.CANDIDATES, keys.REST, GROUP)
    sent = (*WHOLE, WEIGHTS)
    personal = (PERSONAL_MODEL, CORE)
    apple_models: int = setting(5, ge=0)
    apple_learning_rate: float = setting(0.001, ge=0)
    apple_mu: float = setting(0.1, ge=0)
    apple_rounds: float = setting(0.1, ge=0, le=1)
    num_server_rounds: int = setting(30, ge=1)

    def initial_group(self, group: str) -> Tensors:
        """Return no other models, and initial ones; the received sum as personal."""
        initial = self.task.initial_state
        if group == keys.CANDIDATES:
            return {n: v.new_zeros((0, *v.shape)) for n, v in initial.items()}
        if group == GROUP:
            return {"values": torch.zeros(0, 2)}
        if group == WEIGHTS:
            return {"values": torch.zeros(self.settings.apple_models + 1)}
        if group == PERSONAL_MODEL and self.received:
            return under(keys.REST, self.received)
        return initial

    def update(self) -> Update:
        """Learn w_i and p_i for ``representation-epochs``, and send them."""
        return self.learn(self.settings.representation_epochs)

    def personalize(self) -> None:
        """Learn w_i and p_i for ``newcomer-epochs``."""
        # `flwr_frl.predict` has a checkpoint, but no message of the server.
        is_served = len(self.received[keys.RELATIONS]) > 0
        allowed = "one that personalises without a server; resume the run with this one"
        require(is_served, "algorithm", "apple", allowed)
        self.learn(self.settings.newcomer_epochs)

    def learn(self, epochs: int) -> Update:
        """Train, keep the personal model, and return the loss and what is sent."""
        model, settings = self.model, self.settings
        model.load_state_dict(under(CORE, self.saved))
        values, start = self.received[keys.RELATIONS].unbind(1)
        relations = nn.Parameter(values.clone())
        weight = self.schedule() * settings.apple_mu / 2

        def objective(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            outputs = called_with(model, self.mixture(relations), inputs)
            loss = self.task.loss(outputs, targets)
            return loss, loss + weight * (relations - start).square().sum()

        core = settings.optimizer(freeze(model, "all"))
        descent = torch.optim.SGD([relations], settings.apple_learning_rate)
        loss = minimise(self, objective, epochs, [core, descent])
        trained = {name: value.clone() for name, value in model.state_dict().items()}
        with torch.no_grad():
            model.load({**trained, **self.mixture(relations)})
        self.keep_personal_model()
        self.saved |= within(CORE, trained)
        padded = torch.zeros(settings.apple_models + 1)
        padded[: len(relations)] = relations.detach()
        return loss, {**trained, keys.MODEL_WEIGHTS: padded}

    def mixture(self, relations: Tensor) -> Tensors:
        """Return the parameters of Σ_j p_ij w_j; the first p is that of ``model``."""
        mixed = {}
        for name, core in self.model.named_parameters():
            others = self.received[keys.CANDIDATES + name]
            weighted = zip(relations, [core, *others], strict=True)
            # Without a matrix product, which autocast would compute in half precision.
            total = sum(p * w for p, w in weighted)
            mixed[name] = self.received[keys.REST + name] + total
        return mixed

    def schedule(self) -> float:
        """Return λ(r)."""
        turn, settings = int(self.config[keys.SERVER_ROUND]) - 1, self.settings
        last = int(settings.apple_rounds * settings.num_server_rounds)
        return (cos(pi * turn / last) + 1) / 2 if turn < last else 0.0
