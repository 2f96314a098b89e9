"""Settings of local training: optimiser and learning rate."""

import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor, nn

from flwr_frl.common.errors import require, unknown
from flwr_frl.common.settings import is_path, load, setting
from flwr_frl.task.training.sgd import SGD, Optimizer, SGDOptimizer

# Added to a norm by which gradients are divided, as in torch.
SMALLEST_NORM = 1e-6
# Classes of torch by name; ``sgd`` is `SGDOptimizer`.
OPTIMIZERS = {"adam": "torch.optim:Adam", "adamw": "torch.optim:AdamW"}
# The schedule `step` multiplies the learning rate by the factor at these shares of the
# rounds, as ResNets are trained (He et al., CVPR 2016).
STEP_FACTOR, STEPS_AT = 0.1, (0.5, 0.75)
# Factors of the learning rate in the k-th of n rounds, from 0.
DECAYS: dict[str, Callable[[int, int], float]] = {
    "constant": lambda k, n: 1.0,
    "step": lambda k, n: STEP_FACTOR ** sum(k >= share * n for share in STEPS_AT),
    "cosine": lambda k, n: (1 + math.cos(math.pi * k / n)) / 2,
}
SCHEDULES = "constant, step or cosine"


@dataclass(frozen=True)
class TrainerSettings(SGD):
    """Optimiser of local training, and its learning rate over the rounds.

    Parameters
    ----------
    optimizer_ : str, default "sgd"
        Optimiser of local training: ``sgd``, ``adam``, ``adamw``, or the import path
        ``package.module:Class`` of a subclass of ``torch.optim.Optimizer``, which is
        called with the parameter groups, their ``weight_decay`` and ``lr``. Only
        ``sgd`` has ``momentum``. An optimiser's state is never sent.
    max_gradient_norm : float, default 0
        Norm to which the gradient of all parameters that train together is clipped in
        each step; 0 does not clip. With ``dp-noise`` it clips the noisy gradient.
    learning_rate_schedule : str, default "constant"
        Factor of ``learning-rate`` in each round: ``constant``; ``step`` for a tenth
        after one half and a hundredth after three quarters of the rounds; or
        ``cosine`` for (1 + cos(π k / n)) / 2 in the k-th of n rounds, from 0. Models
        that are fitted for a test, as with ``fedavg-ft``, and newcomers train with
        ``learning-rate`` itself.
        ``dpsgd``, ``choco-sgd`` and ``squarm-sgd`` have a schedule over iterations t:
        ``constant``; ``inverse:A`` for ``learning-rate`` / (t + A); or
        ``steps:WARMUP:T1,T2,...:FACTOR`` for a linear warm-up over WARMUP iterations
        and a division by FACTOR at each of the iterations T1, T2, ….
    """

    optimizer_: str = setting(  # type: ignore[misc]
        "sgd", form="sgd, adam, adamw or an import path", code=True
    )
    max_gradient_norm: float = setting(0.0, ge=0)  # type: ignore[misc]
    learning_rate_schedule: str = setting(
        "constant",
        form=f"{SCHEDULES}; inverse:A or steps:WARMUP:T1,T2,...:FACTOR over iterations",
        safe=True,
    )

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if self.optimizer_ != "sgd":
            optimizer_class(self.optimizer_)
        schedule = self.learning_rate_schedule
        require(schedule in DECAYS, "learning-rate-schedule", schedule, SCHEDULES)

    def in_round(self, server_round: int, rounds: int) -> Self:
        """Return the settings with the learning rate of one of the rounds, from 1."""
        # A round after the last one has the factor of the last one.
        before = min(server_round, rounds) - 1
        factor = DECAYS[self.learning_rate_schedule](before, rounds)
        if factor == 1:
            return self
        return replace(self, learning_rate=self.learning_rate * factor)

    def optimizer(self, module: nn.Module) -> Optimizer:
        """Return the optimiser of a module's parameters; only weights decay."""
        if self.optimizer_ == "sgd":
            return SGDOptimizer(module, self)
        groups: list[dict[str, Any]] = [
            {"params": parameters, "weight_decay": decay}
            for (decay, _), parameters in SGDOptimizer(module, self).groups.items()
        ]
        kind = optimizer_class(self.optimizer_)
        optimizer: torch.optim.Optimizer = kind(groups, lr=self.learning_rate)
        if self.max_gradient_norm:
            parameters = [p for group in groups for p in group["params"]]

            def clip(*_: Any) -> None:
                nn.utils.clip_grad_norm_(parameters, self.max_gradient_norm)

            optimizer.register_step_pre_hook(clip)
        return optimizer


@cache
def optimizer_class(name: str) -> Any:
    """Return an optimiser of torch by its name or path; `SettingsError` for others."""
    if name not in OPTIMIZERS and not is_path(name):
        raise unknown("optimizer", name, ["sgd", *OPTIMIZERS])
    kind = load(OPTIMIZERS.get(name, name), "optimizer")
    valid = inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
    require(valid, "optimizer", name, "a subclass of torch.optim.Optimizer")
    return kind


def clip_stacked(gradients: dict[str, Tensor], max_norm: float) -> dict[str, Tensor]:
    """Return the gradients of several models, each model's clipped to a norm.

    Parameters
    ----------
    gradients : dict of str to Tensor, shape (models, ...)
        Gradients by the parameter's name.
    max_norm : float
        Largest norm of a model's gradient.
    """
    if not gradients:
        return gradients
    squares: Iterable[Tensor] = (
        g.flatten(1).square().sum(1) for g in gradients.values()
    )
    norms = torch.stack([*squares]).sum(0).sqrt()
    factors = (max_norm / (norms + SMALLEST_NORM)).clamp(max=1.0)
    return {
        name: gradient * factors.view(-1, *[1] * (gradient.ndim - 1))
        for name, gradient in gradients.items()
    }
