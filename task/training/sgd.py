"""Building blocks of local training: hyper-parameters, optimiser, freezing, loop."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import itemgetter
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from flwr_frl.common.errors import TrainingDivergedError, require, unknown
from flwr_frl.common.settings import Checked, is_path, load, setting
from flwr_frl.task.devices import current
from flwr_frl.task.examples import Batch, ExampleSet
from flwr_frl.task.models.split_model import Part, SplitModel, on_trial

# Maps a batch's features and targets and the model to a value added to the loss.
Regularizer = Callable[[Tensor, Tensor, SplitModel], Tensor]
# Trains on a batch's inputs and targets, and returns the batch's mean loss.
Step = Callable[[Tensor, Tensor], Tensor]

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
class SGD(Checked):
    """Hyper-parameters of stochastic gradient descent, as used by FedRep and FLUTE.

    Parameters
    ----------
    learning_rate : float, default 0.01
        Step size η.
    momentum : float, default 0.5
        Momentum β; its buffers last for one call of `train`.
    weight_decay : float, default 1e-4
        Weight decay of weights. Biases do not decay.
    batch_size : int, default 10
        Examples per step.
    bfloat16 : bool, default False
        Run the forward pass in bfloat16 under torch's autocast. Faster on a CPU with
        AVX-512 and bfloat16, and far slower on one without.
    """

    learning_rate: float = setting(0.01, gt=0)
    momentum: float = setting(
        0.5, ge=0, lt=1, unused_if={"optimizer": ("adam", "adamw")}
    )
    weight_decay: float = setting(1e-4, ge=0)
    batch_size: int = setting(10, ge=1)
    bfloat16: bool = setting(False)
    # Settings of `TrainerSettings`.
    optimizer_: ClassVar[str] = "sgd"
    max_gradient_norm: ClassVar[float] = 0.0

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        if not self.bfloat16:
            return nullcontext()
        return torch.autocast(current().type, torch.bfloat16)

    @staticmethod
    def is_bias(name: str) -> bool:
        """Return True if a parameter of this name has no weight decay."""
        # Biases of recurrent layers have names such as bias_ih_l0.
        return name.rpartition(".")[2].startswith("bias")

    def optimizer(self, module: nn.Module) -> "Optimizer":
        """Return an optimiser for a module's parameters; only weights decay."""
        return SGDOptimizer(module, self)


class SGDOptimizer:
    """SGD of one module's parameters, with torch's arithmetic and interface.

    A step calls torch's fused kernel itself. `torch.optim.SGD` takes three times as
    long for a small model, and constructing any optimiser of `torch.optim` imports
    torch's compiler, which takes 2 s and far longer on a Raspberry Pi: a device starts
    a new process for every message.

    Parameters
    ----------
    module : nn.Module
        The module; a step updates its parameters that have a gradient.
    sgd : SGD
        The hyper-parameters.
    """

    def __init__(self, module: nn.Module, sgd: SGD) -> None:
        self.sgd = sgd
        # The kernel takes parameters of one type and one weight decay; weights first.
        self.groups: dict[tuple[float, torch.dtype], list[Tensor]] = {}
        named = [(sgd.is_bias(name), p) for name, p in module.named_parameters()]
        for is_bias, parameter in sorted(named, key=itemgetter(0)):
            decay = 0.0 if is_bias else sgd.weight_decay
            self.groups.setdefault((decay, parameter.dtype), []).append(parameter)
        self.parameters = [p for group in self.groups.values() for p in group]
        momentum = self.parameters if sgd.momentum else ()
        self.momentum = {p: torch.zeros_like(p) for p in momentum}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameters, as wrappers of torch's optimisers expect them."""
        return [{"params": parameters} for parameters in self.groups.values()]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update each parameter that has a gradient."""
        sgd = self.sgd
        if sgd.max_gradient_norm:
            nn.utils.clip_grad_norm_(self.parameters, sgd.max_gradient_norm)
        for (decay, _), parameters in self.groups.items():
            pairs = [(p, p.grad) for p in parameters if p.grad is not None]
            if not pairs:
                continue
            torch._fused_sgd_(
                [p for p, _ in pairs],
                # The kernel needs the memory format of the parameter, which gradients
                # of autograd have.
                [
                    g if g.stride() == p.stride() else torch.empty_like(p).copy_(g)
                    for p, g in pairs
                ],
                [self.momentum[p] for p, _ in pairs] if sgd.momentum else [],
                weight_decay=decay,
                momentum=sgd.momentum,
                lr=sgd.learning_rate,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
            )


Optimizer = SGDOptimizer | torch.optim.Optimizer


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


def freeze(model: SplitModel, part: Part) -> nn.Module:
    """Freeze a model except for one part, and return the part.

    Frozen parameters require no gradients, and frozen norms keep their statistics.

    Parameters
    ----------
    model : SplitModel
        Put into training mode.
    part : {"head", "representation", "all"}
        The part to train.
    """
    structure = model.structure
    members = structure.members[part]
    for parameter in structure.parameters.values():
        if parameter.requires_grad != (parameter in members):
            parameter.requires_grad_(parameter in members)
    modules = (model, *structure.modules)
    frozen_norms = {m for m in structure.norms if m not in members}
    # Takes longer than to find out that it is not necessary.
    if not all(m.training for m in modules if m not in frozen_norms):
        model.train()
    for norm in frozen_norms:
        norm.eval()
    return model.part(part)


def loop(
    step: Step,
    examples: ExampleSet,
    epochs: int,
    sgd: SGD,
    model: SplitModel | None = None,
) -> float:
    """Call a step with every batch of every epoch.

    A last batch of one example is skipped if the model's batch norms cannot train on
    it, as with torch's ``drop_last``.

    Parameters
    ----------
    step : callable
        Trains on a batch's inputs and targets and returns its mean loss.
    examples : ExampleSet
        Shuffled, and augmented if ``augment`` is set, in each epoch.
    epochs : int
        Passes over the examples; 0 does nothing.
    sgd : SGD
        Determines the batch size.
    model : SplitModel, optional
        The model that is trained, frozen as in the steps. If it is not given, no batch
        of one example is skipped; see `trainable_examples`.

    Returns
    -------
    float
        Mean loss over the last epoch; 0 without epochs or steps.

    Raises
    ------
    TrainingDivergedError
        If the loss is no longer finite.
    """
    examples = examples.on(current())
    if model is not None and epochs:
        examples = trainable_examples(model, examples, sgd)
    batches = partial(examples.batches, sgd.batch_size, shuffle=True)
    return run_epochs(step, batches, epochs, sgd)


def run_epochs(
    step: Step, batches: Callable[[], Iterable[Batch]], epochs: int, sgd: SGD
) -> float:
    """Call a step with every batch that ``batches`` returns for each epoch.

    See `loop` for the other parameters, the returned mean and the error.
    """
    mean = 0.0
    for epoch in range(epochs):
        total, count = torch.zeros((), device=current()), 0
        for inputs, targets in batches():
            total += step(inputs, targets) * len(targets)
            count += len(targets)
        mean = total.item() / max(1, count)
        if not math.isfinite(mean):
            raise diverged(mean, epoch, sgd)
    return mean


def trainable_examples(model: SplitModel, examples: ExampleSet, sgd: SGD) -> ExampleSet:
    """Return the examples, without a last batch of one if the model cannot train on it.

    The variance of a batch norm's inputs is not defined for one example, and torch
    raises an error, which remains for training on a single example.

    Parameters
    ----------
    model : SplitModel
        The model. Norms of frozen parts are in evaluation mode, and accept one example.
    examples : ExampleSet
        On the device of the model.
    sgd : SGD
        Determines the batch size.
    """
    leaves_one = len(examples) % sgd.batch_size == 1 and len(examples) > 1
    if leaves_one and model.refuses_one(examples.first(1)):
        return replace(examples, drop_single=True)
    return examples


def gradient_weight(
    model: SplitModel, examples: ExampleSet, epochs: int, sgd: SGD
) -> float:
    """Return the total weight of the gradients of some epochs of SGD.

    It is the number of steps K, or Σ_t (1 − βᵗ)/(1 − β) over them with momentum β, as
    a gradient then contributes to later steps as well.
    """
    steps, beta = math.ceil(len(examples) / sgd.batch_size), sgd.momentum
    with on_trial(model):
        model.train()
        steps -= trainable_examples(model, examples.on(current()), sgd).drop_single
    return float(sum((1 - beta**t) / (1 - beta) for t in range(1, epochs * steps + 1)))


def diverged(mean: float, epoch: int, sgd: SGD) -> TrainingDivergedError:
    """Return the error for a mean loss that is not finite after an epoch, from 0."""
    return TrainingDivergedError(
        f"the loss is {mean} after epoch {epoch + 1} of local training with "
        f"learning-rate {sgd.learning_rate}; a smaller one may help"
    )


@dataclass(frozen=True)
class Proximal:
    """The regularizer weight/2 ‖w − anchor‖² of a model's parameters w.

    Parameters
    ----------
    weight : float
        μ of FedProx, λ of Ditto.
    anchor : mapping of str to Tensor
        Values by parameter name, such as ``representation.0.weight``. Parameters
        without an anchor are not regularised; frozen ones add a constant.
    """

    weight: float
    anchor: Mapping[str, Tensor]

    def __call__(
        self, features: Tensor, targets: Tensor | None, model: SplitModel
    ) -> Tensor:
        """Return the regularizer's value."""
        distances = [
            (parameter - self.anchor[name]).square().sum()
            for name, parameter in model.named_parameters()
            if name in self.anchor
        ]
        if distances:
            return self.weight / 2 * torch.stack(distances).sum()
        allowed = "names that begin with 'representation.' or 'head.'"
        require(not self.anchor, "the anchor", list(self.anchor), allowed)
        return features.new_zeros(())
