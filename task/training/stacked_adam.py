"""Adam and AdamW of several models at once, with the arithmetic of torch."""

import math

import torch
from torch import Tensor

from flwr_frl.task.training.sgd import SGD

# torch's defaults.
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


class StackedAdam:
    """Adam (Kingma & Ba, ICLR 2015) or AdamW (Loshchilov & Hutter, ICLR 2019).

    Parameters
    ----------
    trained : dict of str to Tensor, shape (models, ...)
        The parameters by name.
    sgd : SGD
        Learning rate, weight decay, and which of the two optimisers.
    """

    def __init__(self, trained: dict[str, Tensor], sgd: SGD) -> None:
        self.sgd = sgd
        self.mean = {name: torch.zeros_like(t) for name, t in trained.items()}
        self.square = {name: torch.zeros_like(t) for name, t in trained.items()}
        # A model without a batch makes no step, so each model counts its own steps.
        self.steps = {n: t.new_zeros(len(t)) for n, t in trained.items()}

    @property
    def state(self) -> dict[str, dict[str, Tensor]]:
        """The stacked state by torch's names and by the names of parameters."""
        return {"exp_avg": self.mean, "exp_avg_sq": self.square, "step": self.steps}

    def updated(
        self, name: str, value: Tensor, gradient: Tensor, members: Tensor | None
    ) -> Tensor:
        """Return new values of one parameter of some models.

        Parameters
        ----------
        name : str
            The parameter.
        value, gradient : Tensor, shape (members, ...)
            Its values and gradients.
        members : Tensor, optional
            Indices of the models; None for all.
        """
        sgd, place = self.sgd, slice(None) if members is None else members
        decay = 0.0 if sgd.is_bias(name) else sgd.weight_decay
        if sgd.optimizer_ == "adamw":
            value = value * (1 - sgd.learning_rate * decay)
        elif decay:
            gradient = gradient.add(value, alpha=decay)
        mean = self.mean[name][place].lerp(gradient, 1 - BETA1)
        square = self.square[name][place] * BETA2
        square.addcmul_(gradient, gradient, value=1 - BETA2)
        self.steps[name][place] += 1
        steps = self.steps[name][place].view(-1, *[1] * (value.ndim - 1))
        # 1 − βᵗ in float32, as MPS has no float64.
        rate = sgd.learning_rate / -torch.expm1(steps * math.log(BETA1))
        root = (-torch.expm1(steps * math.log(BETA2))).sqrt()
        self.mean[name][place], self.square[name][place] = mean, square
        return value - rate * mean / (square.sqrt() / root + EPSILON)
