"""Settings of local training: optimiser, clipping, learning rate over the rounds."""

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from flwr_frl.common.settings import (
    SettingsError,
    error_line,
    is_path,
    load,
    require,
    setting,
    unknown,
)
from flwr_frl.task.training.class_weights import FORMS as WEIGHTS
from flwr_frl.task.training.class_weights import parse
from flwr_frl.task.training.schedule import FORMS, decay, rate_factor
from flwr_frl.task.training.sgd import SGD, Optimizer, parameter_groups

# Names of optimisers; each is a class of torch, except for `SGDOptimizer`.
OPTIMIZERS = {
    "sgd": "",
    "adam": "torch.optim:Adam",
    "adamw": "torch.optim:AdamW",
}
# Added to a norm by which gradients are divided, as in torch.
SMALLEST_NORM = 1e-6


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
        after one half and a hundredth after three quarters of the rounds;
        ``step:EVERY:FACTOR`` for a multiplication by FACTOR after every EVERY rounds;
        or ``cosine`` for (1 + cos(π k / n)) / 2 in the k-th of n rounds, from 0.
        Rounds are counted after the warm-up. Models that are fitted for a test, as
        with ``fedavg-ft``, and newcomers train with ``learning-rate`` itself.
        ``dpsgd``, ``choco-sgd`` and ``squarm-sgd`` have a schedule over iterations t:
        ``constant``; ``inverse:A`` for ``learning-rate`` / (t + A); or
        ``steps:WARMUP:T1,T2,...:FACTOR`` for a linear warm-up over WARMUP iterations
        and a division by FACTOR at each of the iterations T1, T2, ….
    warmup_rounds : int, default 0
        Number W of first rounds with a learning rate that rises linearly, to
        ``learning-rate`` t / (W + 1) in round t.
    class_weights : str, default "none"
        Weights of the classes in the training loss, by which each example's
        cross-entropy is multiplied: ``none``; ``balanced`` for weights in inverse
        proportion to the client's own counts of the classes, with mean 1; or a weight
        of each class, separated by commas.
    """

    optimizer_: str = setting(  # type: ignore[misc]
        "sgd", form="sgd, adam, adamw or an import path", code=True
    )
    max_gradient_norm: float = setting(0.0, ge=0)  # type: ignore[misc]
    learning_rate_schedule: str = setting(
        "constant",
        form=f"{FORMS}; inverse:A or steps:WARMUP:T1,T2,...:FACTOR over iterations",
        safe=True,
    )
    warmup_rounds: int = setting(0, ge=0)
    class_weights: str = setting("none", form=WEIGHTS, safe=True)

    def __post_init__(self) -> None:
        """Check the values, and that the optimiser can be used."""
        super().__post_init__()
        if self.optimizer_ not in OPTIMIZERS:
            if not is_path(self.optimizer_):
                raise unknown("optimizer", self.optimizer_, OPTIMIZERS)
            check_optimizer(self.optimizer_)
        decay(self.learning_rate_schedule)
        parse(self.class_weights)

    def check_rounds(self, rounds: int) -> None:
        """Raise `SettingsError` if the warm-up does not end within the run."""
        allowed = f"below num-server-rounds, {rounds}"
        valid = self.warmup_rounds < rounds or not self.warmup_rounds
        require(valid, "warmup-rounds", self.warmup_rounds, allowed)

    def in_round(self, server_round: int, rounds: int) -> Self:
        """Return the settings with the learning rate of one of the rounds, from 1."""
        text, warmup = self.learning_rate_schedule, self.warmup_rounds
        factor = rate_factor(text, warmup, server_round, rounds)
        if factor == 1:
            return self
        return replace(self, learning_rate=self.learning_rate * factor)

    def optimizer(self, module: nn.Module) -> Optimizer:
        """Return the optimiser of a module's parameters; only weights decay."""
        if self.optimizer_ == "sgd":
            return super().optimizer(module)
        path = OPTIMIZERS.get(self.optimizer_, self.optimizer_)
        groups: list[dict[str, Any]] = [
            {"params": parameters, "weight_decay": decay}
            for parameters, decay in parameter_groups(module, self)
        ]
        optimizer = load(path, "optimizer")(groups, lr=self.learning_rate)
        if self.max_gradient_norm:
            parameters = [p for group in groups for p in group["params"]]

            def clip(*_: Any) -> None:
                nn.utils.clip_grad_norm_(parameters, self.max_gradient_norm)

            optimizer.register_step_pre_hook(clip)
        return cast(Optimizer, optimizer)


@cache
def check_optimizer(path: str) -> None:
    """Raise `SettingsError` unless a path names an optimiser that can be used."""
    kind = load(path, "optimizer")
    if not (inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)):
        raise SettingsError(
            f"optimizer {path!r} is no subclass of torch.optim.Optimizer", "optimizer"
        )
    weight, bias = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    groups = [
        {"params": [weight], "weight_decay": 0.0},
        {"params": [bias], "weight_decay": 0.0},
    ]
    try:
        cast(Any, kind)(groups, lr=0.1).step()
    # Third-party classes may raise any exception.
    except Exception as error:
        raise SettingsError(
            f"optimizer {path!r} cannot be used: {error_line(error)}; it must accept "
            "parameter groups and lr, and step without a closure",
            "optimizer",
        ) from None


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
