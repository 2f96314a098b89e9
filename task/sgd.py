"""The pieces of local training: hyper-parameters, freezing, the loop over batches."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from logging import getLogger
from typing import Annotated

import torch
from greenlet import getcurrent
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.sgd import sgd as torch_sgd

from flwr_frl.task.devices import CPU, current
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.layers import IGNORED, none_counts
from flwr_frl.task.models import Part, SplitModel
from flwr_frl.task.settings import Checked, Free, Range, SettingsError
from flwr_frl.task.split_model import on_trial

Loss = Callable[[Tensor, Tensor], Tensor]
# Called with a batch's features and targets and the model; its value is added to the
# loss.
Regularizer = Callable[[Tensor, Tensor, SplitModel], Tensor]
# Called with a batch's inputs and targets; learns from them and returns their loss.
Step = Callable[[Tensor, Tensor], Tensor]
# As torch calls CPUs on which bfloat16 takes many times as long as float32.
IMITATES_BFLOAT16 = ("NO AVX", "AVX2")
log = getLogger("task")


class TrainingDivergedError(ArithmeticError):
    """The loss is no longer a finite number."""


class OneExampleError(SettingsError):
    """A batch has one example, which the model's batch norms cannot train on."""


@dataclass(frozen=True)
class SGD(Checked):
    """Stochastic gradient descent as the authors of FedRep and FLUTE run it.

    Parameters
    ----------
    learning_rate : float, default 0.01
        Step size η.
    momentum : float, default 0.5
        Momentum β; its buffers start anew in every call of `train`.
    weight_decay : float, default 1e-4
        Weight decay of weights. Biases have none.
    batch_size : int, default 10
        Examples a step.
    bfloat16 : bool, default False
        Whether the forward pass runs in bfloat16 where torch's autocast does so. That
        is faster on a CPU with AVX-512 and bfloat16, and far slower on one without.
    """

    learning_rate: Annotated[float, Range("(0, inf)")] = 0.01
    momentum: Annotated[float, Range("[0, 1)")] = 0.5
    weight_decay: Annotated[float, Range("[0, inf)")] = 1e-4
    batch_size: Annotated[int, Range("[1, inf)")] = 10
    bfloat16: Annotated[bool, Free()] = False

    def autocast(self) -> torch.autocast:
        """Return the context in which a forward pass runs."""
        if self.bfloat16 and current() == CPU:
            warn_if_imitated()
        return torch.autocast(current().type, torch.bfloat16, enabled=self.bfloat16)

    @staticmethod
    def is_bias(name: str) -> bool:
        """Return whether a parameter of this name has no weight decay."""
        # Recurrent layers have names like bias_ih_l0.
        return name.rpartition(".")[2].startswith("bias")

    def optimizer(self, module: nn.Module) -> "SGDOptimizer":
        """Return SGD of a module's parameters alone, with decay of weights only."""
        return SGDOptimizer(module, self)


@cache
def warn_if_imitated() -> None:
    """Say once in a process that its CPU only imitates bfloat16, if it does."""
    kind = torch.backends.cpu.get_cpu_capability()
    if kind in IMITATES_BFLOAT16:
        log.warning(
            "bfloat16=true is far slower than float32 on this CPU, which lacks "
            "instructions for it (torch calls it %s)",
            kind,
        )


class SGDOptimizer:
    """Steps of SGD on the parameters of one module; momentum begins anew.

    Used as torch's own optimizer is, whose arithmetic it calls. The class itself would
    load torch's compiler, in each process that handles one message: 2 s, and far more
    on a Raspberry Pi.

    Parameters
    ----------
    module : nn.Module
        What learns: all of its parameters that have gradients.
    sgd : SGD
        The hyper-parameters.
    """

    def __init__(self, module: nn.Module, sgd: SGD) -> None:
        weights: list[Tensor] = []
        biases: list[Tensor] = []
        for name, parameter in module.named_parameters():
            (biases if sgd.is_bias(name) else weights).append(parameter)
        self.groups = ((weights, sgd.weight_decay), (biases, 0.0))
        self.sgd = sgd
        self.momentum: dict[Tensor, Tensor | None] = {}

    @property
    def param_groups(self) -> list[dict[str, list[Tensor]]]:
        """The parameters, as those who wrap torch's optimizers ask for them."""
        return [{"params": parameters} for parameters, _ in self.groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for parameters, _ in self.groups:
            for parameter in parameters:
                parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move each parameter that has a gradient."""
        for parameters, decay in self.groups:
            gradients = {
                p: _laid_out_as(p, p.grad) for p in parameters if p.grad is not None
            }
            moved = list(gradients)
            momentum = [self.momentum.get(p) for p in moved if self.sgd.momentum]
            torch_sgd(
                moved,
                list(gradients.values()),
                momentum,
                fused=True,
                weight_decay=decay,
                momentum=self.sgd.momentum,
                lr=self.sgd.learning_rate,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
            self.momentum.update(zip(moved, momentum, strict=False))


def _laid_out_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return a gradient in its parameter's memory format, as torch's fused SGD needs.

    Gradients by autograd have it.
    """
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def freeze(model: SplitModel, part: Part) -> nn.Module:
    """Let a part of a model learn, and nothing else; return the part.

    What is frozen needs no gradients, and its norms keep their statistics.

    Parameters
    ----------
    model : SplitModel
        Put into training mode.
    part : {"head", "representation", "all"}
        What learns.
    """
    module = model.part(part)
    model.requires_grad_(False)
    module.requires_grad_(True)
    model.train()
    for frozen in model.modules():
        if isinstance(frozen, _NormBase) and frozen not in set(module.modules()):
            frozen.eval()
    return module


def loop(step: Step, examples: ExampleSet, epochs: int, sgd: SGD) -> float:
    """Make a step with every batch of every epoch.

    There is no step with a batch of which cross-entropy ignores all targets. An epoch's
    last example is left out where it is alone in its batch and the model's batch norms
    cannot train on one, as torch's ``drop_last`` would leave it out.

    Parameters
    ----------
    step : callable
        Of a batch's inputs and targets; returns the batch's mean loss.
    examples : ExampleSet
        Shuffled, and augmented where asked for, in each epoch.
    epochs : int
        Passes over the examples; 0 does nothing.
    sgd : SGD
        Its batch size counts.

    Returns
    -------
    float
        Mean loss over the last epoch; 0 without epochs and without steps.

    Raises
    ------
    TrainingDivergedError
        If the loss is no longer finite.
    OneExampleError
        If no batch has more than one example, and the model cannot train on that.
    """
    mean, examples = 0.0, examples.on(current())
    ignoring = has_ignored(examples)
    others = can_be_left_out(examples, sgd)
    with told_of_one_example(examples, sgd):
        for epoch in range(epochs):
            total, count = torch.zeros((), device=examples.place), 0
            for inputs, targets in examples.batches(sgd.batch_size, shuffle=True):
                if ignoring and bool(none_counts(targets[None])):
                    continue
                try:
                    with unchanged_where_refused(len(targets), sgd):
                        loss = step(inputs, targets)
                except ValueError as error:
                    if others and len(targets) == 1 and refuses_one(error):
                        continue
                    raise
                total += loss * len(targets)
                count += len(targets)
            mean = total.item() / max(1, count)
            if not torch.isfinite(total):
                raise diverged(mean, epoch, sgd)
    return mean


def has_ignored(examples: ExampleSet) -> bool:
    """Return whether there are targets that cross-entropy ignores.

    Asked once: a GPU would be waited for in each step.
    """
    targets = examples.targets
    return not targets.is_floating_point() and bool((targets == IGNORED).any())


def can_be_left_out(examples: ExampleSet, sgd: SGD) -> bool:
    """Return whether an example that is alone in its batch has others beside it."""
    return len(examples) > 1 and sgd.batch_size > 1


def steps_an_epoch(model: SplitModel, examples: ExampleSet, sgd: SGD) -> int:
    """Return how many steps `loop` makes in an epoch, where all targets count.

    Whether norms refuse a last example is tried; model and generators stay as they are.
    """
    steps = math.ceil(len(examples) / sgd.batch_size)
    alone = len(examples) % sgd.batch_size == 1 and can_be_left_out(examples, sgd)
    if not alone or not any(isinstance(m, _NormBase) for m in model.modules()):
        return steps
    try:
        with on_trial(model):
            model.train()(examples.on(current()).first(1))
    except ValueError as error:
        if not refuses_one(error):
            raise
        return steps - 1
    return steps


def refuses_one(error: Exception) -> bool:
    """Return whether an exception says that norms cannot train on one example."""
    by_torch = isinstance(error, ValueError) and "more than 1 value per" in str(error)
    return by_torch or isinstance(error, OneExampleError)


@contextmanager
def unchanged_where_refused(count: int, sgd: SGD) -> Iterator[None]:
    """Leave norms' statistics as they were where a step with one example fails.

    Norms before the one that refuses it have moved theirs. With a ``count`` of more
    examples, and where each step has one, nothing is done.
    """
    if not count == 1 < sgd.batch_size:
        yield
        return
    here, before = getcurrent(), list[tuple[Tensor, Tensor]]()

    def remember(module: nn.Module, inputs: object) -> None:
        # Another client of the cohort may be at work meanwhile.
        if isinstance(module, _NormBase) and getcurrent() is here:
            before.extend((own, own.clone()) for own in module.buffers(recurse=False))

    hook = register_module_forward_pre_hook(remember)
    try:
        yield
    except ValueError:
        for own, value in reversed(before):
            own.data.copy_(value)
        raise
    finally:
        hook.remove()


@contextmanager
def told_of_one_example(examples: ExampleSet, sgd: SGD) -> Iterator[None]:
    """Say in one line that batch norms cannot train on a batch of one example.

    Raises `OneExampleError` instead of torch's own error.
    """
    try:
        yield
    except ValueError as error:
        if not refuses_one(error):
            raise
        raise OneExampleError(
            f"batch-size {sgd.batch_size} leaves one of {len(examples)} examples "
            "alone, which this model's batch norms cannot train on; another "
            "batch-size does not, or larger images"
        ) from None


def diverged(mean: float, epoch: int, sgd: SGD) -> TrainingDivergedError:
    """Return the error of a mean loss that is not finite after an epoch, from 0."""
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
        Parameters by name; those that the model alone has are left free, and those that
        are frozen add a constant.
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
        return (
            self.weight / 2 * torch.stack(distances).sum()
            if distances
            else features.new_zeros(())
        )
