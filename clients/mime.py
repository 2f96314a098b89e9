"""Mime and MimeLite (Karimireddy et al., NeurIPS 2021): steps with global momentum."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flwr_frl.clients.base import Client, Update
from flwr_frl.clients.device.groups import (
    WHOLE,
    Arrays,
    Config,
    Tensors,
    parameter_zeros,
    under,
    within,
    zeros_like,
)
from flwr_frl.clients.device.training import minimise
from flwr_frl.common.messages import CONTROL
from flwr_frl.task.devices import differentiable
from flwr_frl.task.examples import EVALUATION_BATCH, count_targets
from flwr_frl.task.models.frozen import copy_sharing_frozen
from flwr_frl.task.training.local_training import train
from flwr_frl.task.training.sgd import freeze

MOMENTUM = "momentum."
# Name of c in its group, and of ∇f_i(x) in the answer to a query.
GRADIENT = "gradient"


class MimeLiteClient(Client, assumes_sgd=True):
    """Algorithm 1, client side, with SGD and momentum β as the base optimiser.

    From y = x, local steps are y ← y − η U(g, m) with U = (1 − β) g + β m, where g is
    the gradient of a batch. The server's momentum m does not change during the steps.
    Then the client sends y and V(∇f_i(x), m) = (1 − β) ∇f_i(x) + β m. Their means are
    the server's new x and m, because V is linear in the gradient.

    β is ``momentum``. As in the paper, the gradient is multiplied by 1 − β. In other
    algorithms it is not; their steps tend to be 1 / (1 − β) times as long with the same
    learning rate. ∇f_i(x) is that of all examples, in evaluation mode; weight decay is
    part of the objective.
    """

    shared: Any = (*WHOLE, MOMENTUM)

    def initial_group(self, group: str) -> Tensors:
        """Return m = 0."""
        return parameter_zeros(self.model)

    def update(self) -> Update:
        """Make local steps with m, and send y and V."""
        beta, m = self.settings.momentum, under(MOMENTUM, self.received)
        direction = self.direction()
        rate = (1 - beta) * self.settings.learning_rate
        sgd = replace(self.settings, learning_rate=rate, momentum=0.0)
        # SGD multiplies these terms by (1 − β) η, too.
        loss = self.descend(sgd, {n: beta / (1 - beta) * v for n, v in m.items()})
        moved = {}
        for name, v in m.items():
            decay = 0.0 if sgd.is_bias(name) else sgd.weight_decay
            gradient = direction[name] + decay * self.received[name]
            moved[name] = (1 - beta) * gradient + beta * v
        return loss, {**self.model.tensors, **within(MOMENTUM, moved)}

    def direction(self) -> Tensors:
        """Return the gradient in V, without weight decay."""
        return self.full_gradient()

    def descend(self, sgd: Any, terms: Mapping[str, Tensor]) -> float:
        """Make SGD's steps, with terms that are added to the gradients."""
        how = self.task.loss, self.settings.representation_epochs, sgd
        return train(self.model, "all", self.train_examples, *how, correction=terms)

    def full_gradient(self) -> Tensors:
        """Return ∇f_i of the current model, by parameter name."""
        freeze(self.model, "all")
        model, total = self.model.eval(), 0
        named = dict(model.named_parameters(remove_duplicate=False))
        sums = zeros_like(named)
        examples = self.train_examples.without_augmentation()
        for inputs, targets in examples.batches(EVALUATION_BATCH):
            if not (count := count_targets(targets)):
                continue
            with differentiable(model):
                with self.settings.autocast():
                    loss = self.task.loss(model(inputs), targets)
                found = torch.autograd.grad(loss, [*named.values()], allow_unused=True)
            for name, gradient in zip(named, found, strict=True):
                if gradient is not None:
                    sums[name] += count * gradient
            total += count
        return {name: each / max(1, total) for name, each in sums.items()}


class MimeClient(MimeLiteClient):
    """Algorithm 1, client side, with g = ∇f_i(y; ζ) − ∇f_i(x; ζ) + c for batches ζ.

    c is the mean of ∇f_i(x) over the clients of the round, which the server queries
    before the local steps. V is that of c.
    """

    shared = (*WHOLE, MOMENTUM, CONTROL)
    sent = (*WHOLE, MOMENTUM)

    def initial_group(self, group: str) -> Tensors:
        """Return m = 0 by parameter, or c = 0 as a vector."""
        zeros = super().initial_group(group)
        return zeros if group == MOMENTUM else {GRADIENT: flat(zeros)}

    def statistics(self, config: Config) -> Arrays:
        """Return ∇f_i(x) as a vector."""
        return {GRADIENT: flat(self.full_gradient()).numpy(force=True)}

    def direction(self) -> Tensors:
        """Return c."""
        c, like = self.received[CONTROL + GRADIENT], under(MOMENTUM, self.received)
        parts = c.split_with_sizes([value.numel() for value in like.values()])
        pairs = zip(like.items(), parts, strict=True)
        return {name: part.view_as(value) for (name, value), part in pairs}

    def descend(self, sgd: Any, terms: Mapping[str, Tensor]) -> float:
        """Make the corrected steps."""
        c, model, at_x = self.direction(), self.model, copy_sharing_frozen(self.model)
        optimizer = sgd.optimizer(freeze(model, "all"))
        freeze(at_x, "all")

        def objective(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            loss = self.task.loss(model(inputs), targets)
            of_x = self.task.loss(at_x(inputs), targets)
            found = torch.autograd.grad(of_x, [*at_x.parameters()], allow_unused=True)
            # The gradient of these products in p is the correction of its gradient.
            products = [
                ((c[name] + terms[name] - (0 if g is None else g)) * p).sum()
                for (name, p), g in zip(model.named_parameters(), found, strict=True)
            ]
            return loss, loss + torch.stack(products).sum()

        epochs = self.settings.representation_epochs
        return minimise(self, objective, epochs, [optimizer], sgd=sgd)


def flat(arrays: Tensors) -> Tensor:
    """Return all values as a vector."""
    return torch.cat([value.flatten() for value in arrays.values()])
