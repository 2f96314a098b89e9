"""L2GD (Hanzely & Richtárik, 2020): a mixture of a global and local models."""

from itertools import islice
from math import isfinite

import numpy as np
import torch

from flwr_frl.clients.base import Update
from flwr_frl.clients.device.personal_model import AllClientsMeanClient
from flwr_frl.common.messages import COINS
from flwr_frl.common.settings import setting
from flwr_frl.task.training.local_training import gradient
from flwr_frl.task.training.sgd import diverged, freeze, trainable_examples


class L2GDClient(AllClientsMeanClient, assumes_sgd=True):
    """Algorithm 1, client side: a coin of probability p decides on each step.

    An aggregation is x_i ← (1 − αλ/(np)) x_i + αλ/(np) x̄, a local step
    x_i ← x_i − α/(n (1 − p)) ∇f_i(x_i), on a batch. A round is the time between two
    communications: aggregations, which do not change x̄, until the first local step,
    then local steps until the next aggregation. All clients of a round draw the same
    coins.

    The paper has no momentum. Momentum lengthens local steps and so weakens λ.
    ``learning-rate`` is η = α / (n (1 − p)). p determines the length of a round;
    ``representation-epochs`` is not used.

    Parameters
    ----------
    l2gd_lambda : float, default 0.1
        λ of the objective f_i(x_i) + λ/2 ‖x_i − x̄‖² (equation 2); 0 is local training.
        From p / (η (1 − p)) on, an aggregation sets x_i to x̄.
    l2gd_probability : float, default 0.1
        p, probability of an aggregation; a round has 1/p local steps on average.
    """

    l2gd_lambda: float = setting(0.1, ge=0)
    l2gd_probability: float = setting(0.1, gt=0, lt=1)

    @property
    def pull(self) -> float:
        """The mixing weight αλ / (np) = ηλ (1 − p) / p of an aggregation."""
        settings, p = self.settings, self.settings.l2gd_probability
        return float(settings.learning_rate * settings.l2gd_lambda * (1 - p) / p)

    def update(self) -> Update:
        """Aggregate, make the local steps, and send Δx_i."""
        self.load_personal_model()
        coins = np.random.default_rng(int(self.config[COINS]))
        p = self.settings.l2gd_probability
        aggregations, steps = int(coins.geometric(1 - p)), int(coins.geometric(p))
        self.aggregate(aggregations)
        return self.local_steps(steps), self.change()

    def personalize(self) -> None:
        """Train x_i from x̄ on the objective (equation 2) with x̄ fixed."""
        self.personalize_near(self.settings.l2gd_lambda)

    @torch.no_grad()
    def aggregate(self, times: int) -> None:
        """Make several aggregations."""
        # Batch norm statistics are aggregated, too; integer counts are not.
        share = 1 - max(0.0, 1 - self.pull) ** times
        # Each tensor is updated once, as tied parameters have several names.
        for name, x in {id(x): (n, x) for n, x in self.model.tensors.items()}.values():
            if x.is_floating_point():
                x.copy_(x.lerp(self.received[name], share))

    def local_steps(self, steps: int) -> float:
        """Make at least one step; return the mean loss over their batches."""
        model, settings = self.model, self.settings
        optimizer = settings.optimizer(freeze(model, "all"))
        examples = trainable_examples(model, self.train_examples, settings)
        total = torch.zeros((), device=self._device)
        for batch in islice(examples.stream(settings.batch_size), steps):
            optimizer.zero_grad()
            total += gradient(model, *batch, self.task.loss, settings)
            optimizer.step()
        mean = total.item() / steps
        if not isfinite(mean):
            raise diverged(mean, 0, settings)
        return mean
