"""Per-FedAvg (Fallah et al., NeurIPS 2020): a model that is good after one step."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flwr_frl.clients.base import Client, on_copy
from flwr_frl.clients.device.groups import Tensors
from flwr_frl.common.errors import require
from flwr_frl.common.settings import setting
from flwr_frl.task.devices import random_state, set_random_state
from flwr_frl.task.examples import EVALUATION_BATCH, count_targets
from flwr_frl.task.models import SplitModel
from flwr_frl.task.training.local_training import gradient
from flwr_frl.task.training.sgd import freeze, loop, trainable_examples

Batch = tuple[Tensor, Tensor]


class PerFedAvgClient(Client, assumes_sgd=True):
    """Algorithm 1, client side, first-order variant (FO).

    The objective is F_i(w) = f_i(w − α ∇f_i(w)). A step draws independent batches D and
    D': w̃ = w − α ∇f_i(w; D), and w ← w − β ∇f_i(w̃; D'). ``learning-rate`` is β, the
    meta-step size.

    Parameters
    ----------
    inner_learning_rate : float, default 0.01
        α, step size from the meta-model (section 5: 0.01 and 0.001); 0 disables the
        step.
    adaptation_epochs : int, default 0
        Epochs of local SGD before a test; FedRep's comparison uses 5. With 0, the model
        is tested after one full-gradient step, as in the objective.
    """

    inner_learning_rate: float = setting(0.01, ge=0)
    adaptation_epochs: int = setting(0, ge=0)

    def update(self) -> float:
        """Make meta-steps for ``representation-epochs``, and send the meta-model.

        The training loss is f_i(w̃; D').
        """
        optimizer = self.settings.optimizer(freeze(self.model, "all"))
        named = dict(self.model.named_parameters())
        examples = trainable_examples(self.model, self.train_examples, self.settings)
        first, third = (examples.stream(self.settings.batch_size) for _ in range(2))

        def step(inputs: Tensor, targets: Tensor) -> Tensor:
            w = {name: p.detach().clone() for name, p in named.items()}
            _, slope = self.gradient(w, next(first))
            there = moved(w, slope, -self.settings.inner_learning_rate)
            loss, slope = self.gradient(there, (inputs, targets))
            meta = self.meta_gradient(w, slope, third)
            for name, parameter in named.items():
                parameter.data.copy_(w[name])
                parameter.grad = meta[name]
            optimizer.step()
            return loss

        return loop(step, examples, self.settings.representation_epochs, self.settings)

    def meta_gradient(
        self, w: Tensors, slope: Tensors, batches: Iterator[Batch]
    ) -> Tensors:
        """Return the gradient of F_i at w, which equals ∇f_i(w̃) to first order."""
        return slope

    def gradient(self, point: Tensors, batch: Batch) -> tuple[Tensor, Tensors]:
        """Return the loss of a batch and its gradient at a point."""
        named = dict(self.model.named_parameters())
        for name, parameter in named.items():
            parameter.data.copy_(point[name])
            parameter.grad = torch.zeros_like(parameter)
        loss = gradient(self.model, *batch, self.task.loss, self.settings)
        return loss, {n: p.grad for n, p in named.items() if p.grad is not None}

    def deployed_model(self) -> SplitModel:
        """Return the model w − α ∇f_i(w), or w trained for ``adaptation-epochs``.

        Without training examples, return the meta-model.
        """
        if not len(self.task.train_examples(self._index)):
            return self.model
        with on_copy(self) as client:
            client.adapt()
        return client.model

    def adapt(self) -> None:
        """Train the model for ``adaptation-epochs``, or make one full-gradient step."""
        if self.settings.adaptation_epochs:
            self.train("all", self.settings.adaptation_epochs)
            return
        examples = self.train_examples
        named = dict(freeze(self.model, "all").named_parameters())
        # Without dropout, and with the deployed batch norm statistics.
        self.model.eval()
        w = {name: p.detach().clone() for name, p in named.items()}
        there, alpha = w, self.settings.inner_learning_rate
        # The loss of a batch is a mean over its targets that are not ignored.
        count = count_targets(examples.targets)
        for batch in examples.batches(EVALUATION_BATCH):
            if not (counted := count_targets(batch[1])):
                continue
            share = counted / count
            there = moved(there, self.gradient(w, batch)[1], -alpha * share)
        self.model.load({**self.model.tensors, **there})


class HFMAMLClient(PerFedAvgClient):
    """Per-FedAvg (HF): w ← w − β (I − α ∇²f_i(w; D'')) ∇f_i(w̃; D').

    The Hessian-vector product is (∇f_i(w + δv; D'') − ∇f_i(w − δv; D'')) / 2δ.

    Parameters
    ----------
    hessian_delta : float, default 0.001
        δ of the finite difference that approximates the Hessian-vector product.
    """

    hessian_delta: float = setting(1e-3, gt=0)

    @staticmethod
    def check_settings(settings: Any) -> None:
        """Refuse bfloat16, which is too coarse for the finite difference."""
        require(not settings.bfloat16, "bfloat16", True, "false with 'hf-maml'")

    def meta_gradient(
        self, w: Tensors, slope: Tensors, batches: Iterator[Batch]
    ) -> Tensors:
        """Return ∇f_i(w̃) minus α times its Hessian-vector product."""
        batch, delta = next(batches), self.settings.hessian_delta
        # Both gradients use the same dropout mask.
        random = random_state()
        _, ahead = self.gradient(moved(w, slope, delta), batch)
        set_random_state(random)
        _, behind = self.gradient(moved(w, slope, -delta), batch)
        alpha = self.settings.inner_learning_rate
        return moved(slope, moved(ahead, behind, -1.0), -alpha / (2 * delta))


def moved(point: Tensors, direction: Tensors, step: float) -> Tensors:
    """Return point + step · direction."""
    return {n: torch.add(t, direction[n], alpha=step) for n, t in point.items()}
