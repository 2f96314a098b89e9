"""L2GD (Hanzely & Richtárik, 2020): a mixture of a global and local models."""

from dataclasses import dataclass
from itertools import islice
from typing import Annotated

import numpy as np
import torch
from flwr.common import NDArrays

from flwr_frl.clients.base import Config, Reply, TrainingSettings
from flwr_frl.clients.device.personal_model import AllClientsMeanClient
from flwr_frl.task.messages import COINS
from flwr_frl.task.settings import Range, SettingsError
from flwr_frl.task.training import (
    TrainingDivergedError,
    freeze,
    gradient,
    trainable_examples,
)


@dataclass(frozen=True)
class L2GDSettings(TrainingSettings):
    """Settings of L2GD's clients; ``learning_rate`` is η = α / (n (1 − p)).

    p determines the length of a round; ``representation_epochs`` is not used.

    Parameters
    ----------
    l2gd_lambda : float, default 0.1
        λ of the objective f_i(x_i) + λ/2 ‖x_i − x̄‖² (equation 2); 0 is local training.
        At most p / (η (1 − p)), at which an aggregation sets x_i to x̄.
    l2gd_probability : float, default 0.1
        p, probability of an aggregation; a round has 1/p local steps on average.
    """

    l2gd_lambda: Annotated[float, Range("[0, inf)")] = 0.1
    l2gd_probability: Annotated[float, Range("(0, 1)")] = 0.1

    def __post_init__(self) -> None:
        """Also check that an aggregation does not overshoot x̄."""
        super().__post_init__()
        # Tolerate rounding errors.
        if self.pull > 1 + 1e-9:
            most = self.l2gd_lambda / self.pull
            raise SettingsError(
                f"l2gd-lambda is {self.l2gd_lambda}; expected at most "
                f"{most:g} with l2gd-probability {self.l2gd_probability} and "
                f"learning-rate {self.learning_rate}"
            )

    @property
    def pull(self) -> float:
        """The mixing weight αλ / (np) = ηλ (1 − p) / p of an aggregation."""
        p = self.l2gd_probability
        return self.learning_rate * self.l2gd_lambda * (1 - p) / p


class L2GDClient(AllClientsMeanClient, assumes_sgd=True):
    """Algorithm 1, client side: a coin of probability p decides on each step.

    An aggregation is x_i ← (1 − αλ/(np)) x_i + αλ/(np) x̄, a local step
    x_i ← x_i − α/(n (1 − p)) ∇f_i(x_i), on a batch. A round is the time between two
    communications: aggregations, which do not change x̄, until the first local step,
    then local steps until the next aggregation. All clients of a round draw the same
    coins.

    The paper has no momentum. Momentum lengthens local steps and so weakens λ.
    """

    settings_type = L2GDSettings
    settings: L2GDSettings

    def fit(self, parameters: NDArrays, config: Config) -> Reply:
        """Aggregate, make the local steps, and send Δx_i."""
        self.receive(parameters, config)
        self.load_personal_model()
        coins = np.random.default_rng(int(config[COINS]))
        p = self.settings.l2gd_probability
        aggregations, steps = int(coins.geometric(1 - p)), int(coins.geometric(p))
        self.aggregate(aggregations)
        return self.send_change(self.local_steps(steps), config)

    def personalize(self) -> None:
        """Train x_i from x̄ on the objective (equation 2) with x̄ fixed."""
        self.personalize_near(self.settings.l2gd_lambda)

    @torch.no_grad()
    def aggregate(self, times: int) -> None:
        """Make several aggregations."""
        # Batch norm statistics are aggregated, too; integer counts are not.
        share = 1 - max(0.0, 1 - self.settings.pull) ** times
        # Each tensor is updated once, as tied parameters have several names.
        for name, x in {id(x): (n, x) for n, x in self.model.tensors.items()}.values():
            if x.is_floating_point():
                x.lerp_(self.received[name], share)

    def local_steps(self, steps: int) -> float:
        """Make at least one step; return the mean loss over their batches."""
        model, settings = self.model, self.settings
        optimizer = settings.optimizer(freeze(model, "all"))
        examples = trainable_examples(model, self.train_examples, settings)
        total = torch.zeros((), device=self.device)
        for batch in islice(examples.stream(settings.batch_size), steps):
            optimizer.zero_grad()
            total += gradient(model, *batch, self.training_loss, settings)
            optimizer.step()
        if not torch.isfinite(total):
            raise TrainingDivergedError(
                f"the loss is {total.item()} in {steps} local steps with learning-rate "
                f"{settings.learning_rate}; a smaller one may help"
            )
        return total.item() / steps
