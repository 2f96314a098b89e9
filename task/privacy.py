"""Local training with differential privacy of examples (Abadi et al., CCS 2016).

Opacus clips each example's gradient, adds the noise and counts what it is worth. Here
each batch is drawn anew, every example with the same probability, as the account takes
it. Two data sets are neighbours if one of them has an example more.
"""

import logging
import math
import secrets
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Annotated, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from flwr_frl.task.calls import TrainCall, features_of
from flwr_frl.task.devices import current, seed
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import SplitModel
from flwr_frl.task.settings import (
    Checked,
    Range,
    SettingsError,
    need,
    require,
    require_all_of_noise,
)
from flwr_frl.task.sgd import diverged, freeze


@dataclass(frozen=True)
class ExamplePrivacy(Checked):
    """Differential privacy of a device's examples.

    Parameters
    ----------
    dp_noise : float, default 0
        Noise multiplier z of local training with differential privacy of examples
        (`flwr_frl.task.privacy`): the sum of a batch's gradients gets noise with the
        standard deviation z C; 0 (none) or at least 0.001. A device may set all three
        for itself.
    dp_clip : float, default 0
        C, the longest gradient that counts of one example.
    dp_delta : float, default 0
        δ for which each client's ε is counted; well below one in its number of
        examples.
    """

    dp_noise: Annotated[float, Range("[0, inf)")] = 0.0
    dp_clip: Annotated[float, Range("[0, inf)")] = 0.0
    dp_delta: Annotated[float, Range("[0, 1)")] = 0.0

    def __post_init__(self) -> None:
        """Check the values, and that Opacus is there."""
        super().__post_init__()
        require_all_of_noise("dp", self.dp_noise, self.dp_clip, self.dp_delta)
        if self.dp_noise:
            need("opacus", "privacy", "dp-noise")


def sampling(num_examples: int, batch_size: int) -> tuple[float, int]:
    """Return with which probability an example is in a batch, and an epoch's steps."""
    rate = min(1.0, batch_size / max(1, num_examples))
    return rate, math.ceil(num_examples / batch_size)


# Noise multiplier, probability of an example in a batch, and steps.
History = tuple[tuple[float, float, int], ...]


def epsilon(history: History, delta: float) -> float:
    """Return ε at δ of so many steps: that of Opacus' `RDPAccountant`."""
    if not any(steps for *_, steps in history):
        return 0.0
    spent = sum(steps * _of_one_step(noise, rate) for noise, rate, steps in history)
    orders = _opacus("accountants").RDPAccountant.DEFAULT_ALPHAS
    rdp = _opacus("accountants.analysis.rdp")
    return float(rdp.get_privacy_spent(orders=orders, rdp=spent, delta=delta)[0])


def _opacus(name: str) -> Any:
    """Import a module of Opacus, whose import gives the root logger a handler.

    With it, what Flower logs would be printed twice.
    """
    handlers = logging.root.handlers[:]
    module = import_module(f"opacus.{name}")
    logging.root.handlers[:] = handlers
    return module


@lru_cache(maxsize=1024)
def _of_one_step(noise: float, rate: float) -> npt.NDArray[np.float64]:
    """Return the Rényi divergence of a step at all orders, which takes 0.1 s."""
    orders = _opacus("accountants").RDPAccountant.DEFAULT_ALPHAS
    rdp = _opacus("accountants.analysis.rdp")
    found = rdp.compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=orders)
    return np.asarray(found)


def check_model(model: SplitModel, privacy: ExamplePrivacy) -> None:
    """Raise `SettingsError` if the examples of a batch see each other in a model.

    So they do in batch norms. What Opacus cannot take apart is refused as well. The
    model is left as `freeze` does with all that learns.
    """
    # Of a part that is frozen nothing would be said.
    freeze(model, "all")
    errors = [
        *_opacus("validators").ModuleValidator.validate(model, strict=False),
        *_opacus("grad_sample").GradSampleHooks.validate(model, strict=False),
    ]
    if errors:
        reason = " ".join(str(errors[0]).split()).partition(". ")[0]
        require(False, "dp-noise", privacy.dp_noise, f"0 with this model: {reason}")


def train_privately(call: TrainCall, privacy: ExamplePrivacy) -> float:
    """Train as `flwr_frl.task.training.train`, with example-level DP.

    Sampling, augmentation and noise do not follow from the run's seed: who knows them
    can take them off again. The regularizer's part that has to do with features must be
    a sum over the examples; its other part is what it is of none of them, and is not
    clipped, nor is the correction: neither tells anything of the examples.

    Parameters
    ----------
    call : TrainCall
        What to train; its loss is a mean over examples that all count the same.
    privacy : ExamplePrivacy
        How.

    Returns
    -------
    float
        Mean loss over the last epoch, as it is.

    Raises
    ------
    TrainingDivergedError
        If the loss is no longer finite.
    SettingsError
        If some targets do not count, or some of what learns is not in the forward pass
        of a module, as Opacus needs it.
    """
    seed(secrets.randbits(63))
    model, sgd = call.model, call.sgd
    examples = call.examples.on(current())
    check_targets(examples.targets)
    module = freeze(model, call.part)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        # A representation may have no parameters.
        return call.alone()
    forward: nn.Module = model.representation
    if call.has_features:
        examples = features_of(model, examples, sgd)
        forward = nn.Identity()
    expected = min(sgd.batch_size, len(examples))
    learning = {n: p for n, p in model.named_parameters() if p.requires_grad}
    hooks = _hooks(model)
    optimizer = _opacus("optimizers").DPOptimizer(
        sgd.optimizer(module),
        noise_multiplier=privacy.dp_noise,
        max_grad_norm=privacy.dp_clip,
        expected_batch_size=expected,
    )

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        """Make a step, and return the sum of the losses."""
        optimizer.zero_grad(set_to_none=True)
        features, value = inputs, torch.zeros((), device=examples.place)
        if len(targets):
            with sgd.autocast():
                features = forward(inputs)
                # A sum: nobody's part depends on how many there are.
                value = call.loss(model.head(features), targets) * len(targets)
                objective = value
                if call.regularizer is not None:
                    term = call.regularizer(features, targets, model)
                    objective = value + expected * term
            objective.backward()  # type: ignore[no-untyped-call]
        none = features.detach()[:0], targets[:0]
        beside = _beside_examples(call, *none, learning)
        for name, parameter in learning.items():
            found = getattr(parameter, "grad_sample", None)
            if found is None and len(targets):
                raise SettingsError(
                    f"dp-noise is {privacy.dp_noise}; it must be 0 with this model: of "
                    f"{name!r} single examples have no gradient"
                )
            if found is None:
                found = parameter.new_zeros(0, *parameter.shape)
            # Opacus takes lengths as they come, in bfloat16 with errors of some 0.4 %.
            parameter.grad_sample = found.to(parameter.dtype)  # type: ignore[attr-defined]
        optimizer.pre_step()
        for name, term in beside.items():
            learning[name].grad = cast(Tensor, learning[name].grad) + term
        optimizer.original_optimizer.step()
        return value.detach()

    mean = 0.0
    try:
        with warnings.catch_warnings():
            # The first layer's inputs have no gradients.
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            for epoch in range(call.epochs):
                total, count = torch.zeros((), device=examples.place), 0
                for inputs, targets in drawn(examples, sgd.batch_size):
                    total += step(inputs, targets)
                    count += len(targets)
                mean = total.item() / max(1, count)
                if not math.isfinite(mean):
                    raise diverged(mean, epoch, sgd)
    finally:
        hooks.cleanup()
        # One of them stays there.
        for parameter in model.parameters():
            parameter.__dict__.pop("summed_grad", None)
    return mean


def _hooks(model: SplitModel) -> Any:
    """Have Opacus find each example's gradients of the sum of a batch's losses."""

    class Hooks(_opacus("grad_sample").GradSampleHooks):  # type: ignore[misc]
        def rearrange_grad_samples(self, **more: Any) -> Any:
            activations, slopes = super().rearrange_grad_samples(**more)
            # Of images Opacus takes neighbours in a row to be neighbours in memory,
            # which in channels last they are not.
            own = torch.contiguous_format
            return [a.clone(memory_format=own) for a in activations], slopes

    return Hooks(model, loss_reduction="sum")


def drawn(examples: ExampleSet, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield an epoch of batches in which each example is with the same probability."""
    rate, steps = sampling(len(examples), batch_size)
    for _ in range(steps):
        yield examples.chosen(torch.rand(len(examples)) < rate)


def check_targets(targets: Tensor) -> None:
    """Raise `SettingsError` if some targets are ignored, as cross-entropy does."""
    if not targets.is_floating_point() and targets.numel() and int(targets.min()) < 0:
        raise SettingsError(
            "dp-noise must be 0 where some targets do not count: a loss that is a mean "
            "of the others weighs each by how many they are"
        )


def _beside_examples(
    call: TrainCall, features: Tensor, targets: Tensor, learning: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return what is added to the gradients, and does not come from the examples.

    Features and targets are those of none.
    """
    found: dict[str, Tensor] = {}
    if call.regularizer is not None:
        value = call.regularizer(features, targets, call.model)
        if value.requires_grad:
            parameters = list(learning.values())
            slopes = torch.autograd.grad(value, parameters, allow_unused=True)
            pairs = zip(learning, slopes, strict=True)
            found = {name: slope for name, slope in pairs if slope is not None}
    for name, term in (call.correction or {}).items():
        if name in learning:
            found[name] = found[name] + term if name in found else term
    return found
