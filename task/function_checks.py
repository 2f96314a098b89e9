"""Checks of losses and metrics, which are arbitrary functions of the user."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flwr_frl.common.settings import SettingsError, reason_of
from flwr_frl.task.examples import IGNORED
from flwr_frl.task.metrics import number
from flwr_frl.task.types import Loss, Metric


def name_of(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype."""
    return str(dtype).removeprefix("torch.")


def called(who: str, function: Callable[..., Any], **tensors: Tensor) -> Any:
    """Return a function's value for tensors; `SettingsError` if it raises an error."""
    try:
        return function(*tensors.values())
    # A user's model or loss may raise any exception.
    except Exception as error:
        reason = reason_of(error)
        forms = (
            f"{name} of type {name_of(value.dtype)} and shape {tuple(value.shape)}"
            for name, value in tensors.items()
        )
        raise SettingsError(f"{who} refuses {' and '.join(forms)}: {reason}") from error


def ignored_by(loss: Loss) -> int:
    """Return the target that a loss ignores, its ``ignore_index`` if it has one."""
    arguments = getattr(loss, "keywords", {})  # Set by `functools.partial`
    index = getattr(loss, "ignore_index", arguments.get("ignore_index"))
    return IGNORED if index is None else int(index)


def check_classes(loss: Loss, outputs: Tensor, targets: Tensor) -> None:
    """Raise `SettingsError` if a loss reads classes otherwise than accuracy does."""
    if outputs.ndim > 2 and outputs.movedim(-1, 1).shape == outputs.shape:
        classes = outputs.shape[1]
        one_hot = nn.functional.one_hot(targets.clamp(0, classes - 1), classes)
        last = one_hot.to(outputs.dtype)
        if loss(last, targets) < loss(last.movedim(-1, 1), targets):
            raise SettingsError(
                f"the loss expects the classes in the last dimension of outputs of "
                f"shape {tuple(outputs.shape)}; they must be the second, and the "
                "others the targets'"
            )
    if loss is nn.functional.cross_entropy or hasattr(loss, "ignore_index"):
        return
    # The gradients of these outputs vanish only where the loss ignores a target.
    varied = torch.linspace(0, 1, outputs.numel()).view_as(outputs).requires_grad_()
    try:
        (gradient,) = torch.autograd.grad(loss(varied, targets), varied)
    # It accepted the model's outputs, which may be probabilities.
    except Exception:
        return
    counts = (gradient != 0).any(1)
    ignored = {*targets[~counts].tolist()} - {
        *targets[counts].tolist(),
        ignored_by(loss),
    }
    if counts.any() and max(ignored, default=-1) >= 0:
        value = max(ignored)
        raise SettingsError(
            f"the loss ignores the target {value}, which accuracy would count; give "
            f"the loss an attribute ignore_index = {value}, as torch's have, or use "
            "negative targets"
        )


def try_metric(name: str, metric: Metric, outputs: Tensor, targets: Tensor) -> None:
    """Raise `SettingsError` unless a metric has a value for a batch or other targets.

    A metric may be undefined for the targets of a client, which are all of one class
    for example. It then has no value for this client.
    """
    try:
        number(name, metric(outputs, targets))
    # A custom metric may raise any exception.
    except Exception:
        classes = 1 if targets.is_floating_point() else outputs.shape[1:2].numel()
        # Two examples of each class, as far as they fit into the memory.
        n = max(2, min(2 * classes, 10**7 // outputs[:1].numel()))
        inputs_of = torch.arange(n) % len(outputs)
        varied = (torch.arange(n) % max(2, classes)).to(targets.dtype)
        shape = n, *targets.shape[1:]
        varied = varied.view(n, *[1] * (targets.ndim - 1)).expand(shape)
        who, outputs = f"metric {name!r}", outputs[inputs_of]
        number(name, called(who, metric, outputs=outputs, targets=varied))


@torch.no_grad()
def check_pairs(
    who: str, function: Callable[..., Any], outputs: Tensor, targets: Tensor
) -> None:
    """Raise `SettingsError` if each output is compared with the targets of all rows.

    torch broadcasts outputs (n, 1) and targets (n,) to (n, n). The value then does not
    change if the targets are permuted, but does if they have the outputs' dimensions.
    """
    n = len(outputs)
    if n == 1 or targets.numel() != n or targets.ndim == outputs.ndim:
        return
    # Distinct values, in double precision so that different values are not close, and
    # between 0 and 1 because they may be probabilities.
    values = torch.linspace(0.1, 0.9, n, dtype=torch.float64)
    column = values.view(n, *[1] * (outputs.ndim - 1))

    def is_invariant(shape: torch.Size) -> bool:
        given, reversed_ = values.view(shape), values.flip(0).view(shape)
        results = [
            float(function(column.expand_as(outputs), y)) for y in (given, reversed_)
        ]
        return math.isclose(*results, rel_tol=1e-9)

    try:
        mixed = is_invariant(targets.shape) and not is_invariant(column.shape)
    # A function of classes, or one that does not accept such values.
    except Exception:
        return
    if mixed:
        raise SettingsError(
            f"{who} compares each output with the targets of all rows: torch "
            f"broadcasts outputs of shape {tuple(outputs.shape)} and targets of shape "
            f"{tuple(targets.shape)}; expected targets of shape {tuple(column.shape)}"
        )


@torch.no_grad()
def is_sum(
    loss: Callable[[Tensor, Tensor], Any],
    outputs: Tensor,
    targets: Tensor,
    value: float,
) -> bool:
    """Return True if a loss is a sum over the examples instead of a mean.

    A sum doubles and triples with the batch, and equals the sum of the losses of both
    halves, each to one per cent. A loss of pairs may fulfil one of these conditions.

    Parameters
    ----------
    loss : callable
        The loss.
    outputs, targets : Tensor
        A batch.
    value : float
        The loss of the batch.
    """
    half = len(outputs) // 2
    try:
        multiples = [
            float(loss(torch.cat([outputs] * n), torch.cat([targets] * n)))
            for n in (2, 3)
        ]
        parts = [(outputs[:half], targets[:half]), (outputs[half:], targets[half:])]
        halves = sum(float(loss(*part)) for part in parts) if half else value
    # A loss for a fixed number of examples is not a sum over them.
    except Exception:
        return False
    near = [
        math.isclose(f, n * value, rel_tol=0.01) for n, f in enumerate(multiples, 2)
    ]
    # Halves lack the pairs between them.
    near.append(math.isclose(halves, value, rel_tol=0.01))
    return value != 0 and all(near)
