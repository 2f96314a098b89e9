"""Local training with example-level differential privacy (Abadi et al., CCS 2016).

Opacus clips each example's gradient, adds the noise and accounts for the privacy loss.
Batches are Poisson-sampled, as the accountant assumes. Neighbouring data sets differ in
one additional example.
"""

import logging
import math
import secrets
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from flwr_frl.common.errors import need, require
from flwr_frl.common.settings import Checked, require_all_of_noise, setting
from flwr_frl.task.devices import seed
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models.split_model import SplitModel
from flwr_frl.task.training.local_training import TrainCall
from flwr_frl.task.training.sgd import freeze, run_epochs


@dataclass(frozen=True)
class ExamplePrivacy(Checked):
    """Differential privacy of a client's examples.

    Parameters
    ----------
    dp_noise : float, default 0
        Noise multiplier z of local training with example-level differential privacy:
        noise with standard deviation z C is added to the sum of a batch's gradients; 0
        (none) or at least 0.001. A device may set all three in its node config.
    dp_clip : float, default 0
        C, the norm to which each example's gradient is clipped.
    dp_delta : float, default 0
        δ for which each client's ε is computed; well below one divided by its number of
        examples.
    """

    dp_noise: float = setting(0.0, ge=0, le=1_000_000, per_device=True)
    dp_clip: float = setting(0.0, ge=0, per_device=True)
    dp_delta: float = setting(0.0, ge=0, lt=1, per_device=True)

    def __post_init__(self) -> None:
        """Check the values, and that Opacus is installed."""
        super().__post_init__()
        require_all_of_noise("dp", self.dp_noise, self.dp_clip, self.dp_delta)
        if self.dp_noise:
            need("opacus", "privacy", "dp-noise")


def sampling(num_examples: int, batch_size: int) -> tuple[float, int]:
    """Return an example's sampling probability, and the steps of an epoch."""
    rate = min(1.0, batch_size / max(1, num_examples))
    return rate, math.ceil(num_examples / batch_size)


# For each kind of step so far: the noise multiplier, an example's probability of being
# in a batch, and the number of steps.
History = tuple[tuple[float, float, int], ...]


def epsilon(history: History, delta: float) -> float:
    """Return ε ≥ 0 for δ after some steps, as Opacus' `RDPAccountant` computes it."""
    if not any(steps for *_, steps in history):
        return 0.0
    spent = sum(
        steps * _divergence_of_step(noise, rate) for noise, rate, steps in history
    )
    orders, rdp = _accounting()
    result = rdp.get_privacy_spent(orders=orders, rdp=spent, delta=delta)[0]
    # With much noise, the bound for the orders that Opacus tries can be below 0.
    return max(float(result), 0.0)


def _opacus(name: str) -> Any:
    """Import a module of Opacus without the handler that it adds to the root logger.

    With that handler, Flower's log messages would be printed twice.
    """
    handlers = logging.root.handlers[:]
    module = import_module(f"opacus.{name}")
    logging.root.handlers[:] = handlers
    return module


def _accounting() -> tuple[list[float], Any]:
    """Return the orders of the Rényi divergence, and Opacus' functions of it."""
    orders = _opacus("accountants").RDPAccountant.DEFAULT_ALPHAS
    return orders, _opacus("accountants.analysis.rdp")


@lru_cache(maxsize=1024)
def _divergence_of_step(noise: float, rate: float) -> npt.NDArray[np.float64]:
    """Return the Rényi divergence of a step at all orders; takes 0.1 s."""
    orders, rdp = _accounting()
    divergence = rdp.compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=orders)
    return np.asarray(divergence)


def check_model(model: SplitModel, privacy: ExamplePrivacy) -> None:
    """Raise `SettingsError` if Opacus cannot compute per-example gradients of a model.

    It cannot if the examples of a batch affect each other, as in batch norms. Nothing
    of the model is frozen afterwards.
    """
    # Opacus does not check frozen parts.
    freeze(model, "all")
    errors = [
        *_opacus("validators").ModuleValidator.validate(model, strict=False),
        *_opacus("grad_sample").GradSampleHooks.validate(model, strict=False),
    ]
    if errors:
        reason = " ".join(str(errors[0]).split()).partition(". ")[0]
        require(False, "dp-noise", privacy.dp_noise, f"0 with this model: {reason}")


def train_privately(call: TrainCall, privacy: ExamplePrivacy) -> float:
    """Train as `local_training.train` does, with example-level differential privacy.

    Sampling, augmentation and noise do not depend on the run's seed: anyone who knows
    the seed could subtract the noise. A regularizer may have two parts. The part that
    depends on features must be a sum over the examples, and is clipped with their
    losses. The other part, which is the regularizer's value for an empty batch, and the
    correction contain no information about the examples, so they are not clipped.

    Parameters
    ----------
    call : TrainCall
        The call; its loss is a mean over the examples with equal weights.
    privacy : ExamplePrivacy
        Noise and clipping.

    Returns
    -------
    float
        Mean loss over the last epoch, without noise.

    Raises
    ------
    TrainingDivergedError
        If the loss is no longer finite.
    SettingsError
        If some targets are ignored, or a trained parameter is not used in the forward
        pass of a module that Opacus supports.
    """
    seed(secrets.randbits(63))
    model, sgd, targets = call.model, call.sgd, call.examples.targets
    valid = targets.is_floating_point() or bool((targets >= 0).all())
    allowed = "0 where some targets do not count: their number would change the "
    allowed += "weights of all others in the mean"
    require(valid, "dp-noise", privacy.dp_noise, allowed)
    examples = call.prepared()
    if not any(parameter.requires_grad for parameter in model.parameters()):
        # A representation may have no parameters.
        return call.alone()
    forward = nn.Identity() if call.has_features else model.representation
    expected = min(sgd.batch_size, len(examples))
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    hooks = _hooks(model)
    optimizer = _opacus("optimizers").DPOptimizer(
        sgd.optimizer(model.part(call.part)),
        noise_multiplier=privacy.dp_noise,
        max_grad_norm=privacy.dp_clip,
        expected_batch_size=expected,
    )

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        """Make a step and return the mean loss."""
        optimizer.zero_grad(set_to_none=True)
        features, value = inputs, torch.zeros((), device=examples.device)
        if len(targets):
            with sgd.autocast():
                features = forward(inputs)
                value = call.loss(model.head(features), targets)
                # A sum, so that an example's term does not depend on the batch's size.
                objective = value * len(targets)
                if call.regularizer is not None:
                    term = call.regularizer(features, targets, model)
                    objective = objective + expected * term
            objective.backward()  # type: ignore[no-untyped-call]
        for name, parameter in trained.items():
            samples = getattr(parameter, "grad_sample", None)
            if samples is None:
                allowed = f"0 with this model: Opacus has no gradients of {name!r}"
                require(not len(targets), "dp-noise", privacy.dp_noise, allowed)
                samples = parameter.new_zeros(0, *parameter.shape)
            # Opacus would compute norms in bfloat16, with errors of about 0.4 %.
            parameter.grad_sample = samples.to(parameter.dtype)  # type: ignore[attr-defined]
        optimizer.pre_step()
        # Terms that do not depend on the examples are added to the noisy gradients.
        if call.regularizer is not None:
            term = call.regularizer(features.detach()[:0], targets[:0], model)
            if term.requires_grad:
                term.backward()  # type: ignore[no-untyped-call]
        for name, slope in (call.correction or {}).items():
            if name in trained:
                cast(Tensor, trained[name].grad).add_(slope)
        optimizer.original_optimizer.step()
        return value.detach()

    batches = partial(sampled_batches, examples, sgd.batch_size)
    try:
        with warnings.catch_warnings():
            # The first layer's inputs have no gradients.
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            return run_epochs(step, batches, call.epochs, sgd)
    finally:
        hooks.cleanup()
        # Opacus leaves this attribute behind.
        for parameter in model.parameters():
            parameter.__dict__.pop("summed_grad", None)


def _hooks(model: SplitModel) -> Any:
    """Attach Opacus' hooks for the gradients of each example's loss in a sum."""

    class Hooks(_opacus("grad_sample").GradSampleHooks):  # type: ignore[misc]
        def rearrange_grad_samples(self, **more: Any) -> Any:
            activations, slopes = super().rearrange_grad_samples(**more)
            # Opacus assumes that images are contiguous, which channels-last images
            # are not.
            contiguous = torch.contiguous_format
            return [a.clone(memory_format=contiguous) for a in activations], slopes

    return Hooks(model, loss_reduction="sum")


def sampled_batches(
    examples: ExampleSet, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield an epoch of Poisson-sampled batches."""
    rate, steps = sampling(len(examples), batch_size)
    for _ in range(steps):
        yield examples.chosen(torch.rand(len(examples)) < rate)
