"""Checks that a task's model, loss, metrics and examples fit each other."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from flwr_frl.task.examples import EVALUATION_BATCH, IGNORED, ExampleSet, are_classes
from flwr_frl.task.metrics import number
from flwr_frl.task.models.frozen import frozen_tensors
from flwr_frl.task.models.pretrained import logits_of
from flwr_frl.task.models.side_effects import on_trial
from flwr_frl.task.models.split_model import SplitModel
from flwr_frl.task.npy import is_finite
from flwr_frl.task.settings import SettingsError, reason_of
from flwr_frl.task.types import Task

# Number of examples on which models are tried in training mode.
FEW = 10

# Bounds of inputs and of targets.
Bounds = tuple[tuple[float, float], ...]


def check_model(model: SplitModel) -> None:
    """Refuse an initial model that cannot be trained or sent.

    Parameters
    ----------
    model : SplitModel
        A model of `new_model`.

    Raises
    ------
    SettingsError
        If it has only frozen parameters, or if its state dict contains uninitialised,
        16-bit or non-finite values.
    """
    frozen = frozen_tensors(model)
    if frozen and not any(True for _ in model.parameters()):
        raise SettingsError(
            f"the model's {min(frozen)!r} does not require a gradient, and neither "
            "does any other parameter; at least one must, to be trained"
        )
    for name, value in model.tensors.items():
        if is_lazy(value):
            raise SettingsError(
                f"the model's {name!r} has no shape yet; a lazy module must be "
                "given its number of inputs, or be called once in model()"
            )
        if value.dtype in (torch.float16, torch.bfloat16):
            dtype = str(value.dtype).removeprefix("torch.")
            raise SettingsError(
                f"the model's {name!r} is {dtype}; expected float32 (set "
                "bfloat16=true to train in 16 bits)"
            )
        if not is_finite(value.detach().cpu().numpy()):
            raise SettingsError(
                f"the model's {name!r} is not finite; what never changes, a mask "
                "of -inf say, must be a buffer with persistent=False"
            )


class TriedExamples:
    """The forms of examples that a task has accepted, so that few clients are tried.

    A form consists of shapes, dtypes, the number of examples in the first batch, and
    whether there are ``rows`` and ``mean``. Examples of an accepted form are not tried
    again if their floats are finite and their integers within the accepted bounds.
    """

    def __init__(self) -> None:
        # Smallest and largest integers of inputs and targets, by form.
        self._bounds: dict[tuple[Any, ...], Bounds] = {}

    def covers(self, part: str, examples: ExampleSet) -> bool:
        """Return whether examples are like some that have been accepted."""
        accepted = self._bounds.get(_form(part, examples))
        if accepted is None:
            return False
        pairs = zip(accepted, _bounds(examples), strict=True)
        # The comparison is false for NaN.
        return all(low <= a and b <= high for (low, high), (a, b) in pairs)

    def add(self, part: str, examples: ExampleSet) -> None:
        """Record that examples have been accepted, unless their sum overflows."""
        form, new = _form(part, examples), _bounds(examples)
        if any(math.isnan(high) for _, high in new):
            return
        first, second = self._bounds.get(form, new), new
        self._bounds[form] = tuple(
            (min(a, c), max(b, d)) for (a, b), (c, d) in zip(first, second, strict=True)
        )


def _form(part: str, examples: ExampleSet) -> tuple[Any, ...]:
    inputs, targets = examples.inputs, examples.targets
    tensors = ((tuple(value.shape[1:]), value.dtype) for value in (inputs, targets))
    first = min(len(examples), EVALUATION_BATCH)
    return part, first, examples.rows is None, examples.mean is None, *tensors


def _bounds(examples: ExampleSet) -> Bounds:
    """Return bounds of integers; (0, 0) for bytes and finite floats, else (0, NaN)."""

    def bounds(values: Tensor) -> tuple[float, float]:
        # Pixels are bytes, and may be mapped from a file.
        if values.dtype in (torch.uint8, torch.bool) or values.numel() == 0:
            return 0, 0
        if values.is_floating_point() or values.is_complex():
            # The sum may overflow. Then the examples are tried once more than needed.
            return 0, 0 if math.isfinite(abs(values.sum().item())) else math.nan
        low, high = values.aminmax()
        return int(low), int(high)

    read = examples.inputs if examples.rows is None else examples.inputs[:0]
    return bounds(read), bounds(examples.targets)


def try_examples(task: Task, examples: ExampleSet) -> None:
    """Raise `SettingsError` unless the task can be used with the examples.

    Tries the first batch and examples with inputs that are not finite, and checks the
    range of all classes.

    Parameters
    ----------
    task : Task
        The task.
    examples : ExampleSet
        The examples, at least one.
    """
    inputs, targets = examples.inputs, examples.targets
    is_cross_entropy = task.loss is nn.functional.cross_entropy
    count, ignored = len(task.classes), IGNORED if is_cross_entropy else np.inf
    # Before the loss, whose own error would not name the row.
    check_range(targets, count, ignored)
    outputs = try_batch(task, next(examples.batches(EVALUATION_BATCH)))
    entropy = is_cross_entropy and outputs.ndim > 1
    if entropy and outputs.shape[1] == 1 and len(task.classes) != 1:
        raise SettingsError(
            "the loss is cross-entropy and the model has one output, for which it is "
            "always 0; use another loss for numbers, such as nn.functional.mse_loss"
        )
    if task.classes and targets.is_floating_point():
        dtype = str(targets.dtype).removeprefix("torch.")
        raise SettingsError(
            f"targets are {dtype}; with classes they must be integers, from 0"
        )
    tried = targets[: len(outputs)]
    if are_classes(tried, outputs.shape[1:2]) and (
        outputs.argmax(1).shape != tried.shape
    ):
        raise SettingsError(
            f"outputs of shape {tuple(outputs.shape)} and integer targets of shape "
            f"{tuple(tried.shape)}; classes must be the outputs' second dimension, and "
            "the others the targets'"
        )
    width = outputs.shape[1:2].numel()
    if not tried.is_floating_point() and width < count:
        raise SettingsError(
            f"the model has {width} outputs; of {count} classes it must have one each"
        )
    if entropy and not count:
        check_range(targets, outputs.shape[1], ignored)
    # Memory-mapped inputs are images of bytes.
    if inputs.is_floating_point() and examples.rows is None:
        rows = inputs.reshape(len(inputs), -1)
        odd = (~rows.isfinite().all(1)).nonzero()[:EVALUATION_BATCH, 0]
        if len(odd):
            # Together with the first rows, as the loss may ignore all of the odd ones.
            rows = torch.cat([odd, torch.arange(min(len(inputs), EVALUATION_BATCH))])
            try:
                try_batch(task, (inputs[rows], targets[rows]))
            except SettingsError as error:
                raise SettingsError(
                    f"the inputs of row {int(odd[0])} are not finite; {error}"
                ) from error


def check_range(targets: Tensor, count: int, ignored: float) -> None:
    """Raise `SettingsError` if an integer target is none of ``count`` classes, if any.

    A negative target is allowed if it is ``ignored``, or if that is infinity.
    """
    if not count or targets.is_floating_point():
        return
    flat = targets.flatten()
    wrong = (flat >= count) | ((flat < 0) & (flat != ignored) & (ignored < 0))
    if wrong.any():
        first = int(wrong.nonzero()[0])
        row = first * len(targets) // len(flat)
        raise SettingsError(
            f"the target of row {row} is {int(flat[first])}; of {count} classes it "
            f"must be one from 0 to {count - 1}"
        )


def try_batch(task: Task, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the model's outputs for a batch.

    Raises `SettingsError` unless model, loss and metrics accept it.
    """
    inputs, targets = batch
    outputs = _call("the model", task.scratch_model.eval(), inputs=inputs)
    if not isinstance(outputs, Tensor):
        raise SettingsError(
            f"the model returns a {type(outputs).__name__}; expected a tensor"
        )
    with warnings.catch_warnings():
        # torch broadcasts (n, 1) and (n,) to (n, n), and only warns.
        warnings.filterwarnings("error", message="Using a target size")
        value = _call("the loss", task.loss, outputs=outputs, targets=targets)
    if not isinstance(value, Tensor) or value.ndim > 0:
        shown = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else value
        raise SettingsError(
            f"the loss of a batch is {shown!s}; expected a tensor of one number, the "
            "mean over the batch"
        )
    if not value.isfinite():
        raise SettingsError(
            f"the loss of the first batch is {value.item()}; expected finite"
        )
    if outputs.requires_grad and not value.requires_grad:
        raise SettingsError(
            "the loss has no gradient; expected computed from the outputs by "
            "torch, and not from a copy of them (detach, item, numpy)"
        )
    outputs = outputs.detach()
    if is_sum(task.loss, outputs, targets, value.item()):
        raise SettingsError(
            "the loss of a batch and the same again is twice the loss; expected the "
            "mean over the batch (reduction='mean' in torch's losses), not the sum"
        )
    for name, metric in task.metrics.items():
        value = _call(f"metric {name!r}", metric, outputs=outputs, targets=targets)
        number(name, value)
    return outputs


def try_training_mode(model: SplitModel, examples: ExampleSet) -> None:
    """Raise `SettingsError` unless a model can be called in training mode.

    Parameters
    ----------
    model : SplitModel
        The model. It is left as it was.
    examples : ExampleSet
        Training examples; the first `FEW` are tried.
    """
    inputs, _ = next(examples.batches(FEW))
    # Batch norms refuse a single example.
    if len(inputs) == 1:
        return
    tensors = model.tensors
    with on_trial(model):
        _call("the model in training mode", model.train(), inputs=inputs)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if tensors.get(name, buffer) is not buffer:
            raise SettingsError(
                f"the model's forward replaces its buffer {name!r}; it must change the "
                "buffer in place, with copy_"
            )


def _call(who: str, function: Callable[..., Any], **tensors: Tensor) -> Any:
    try:
        return function(*tensors.values())
    # A user's model or loss may raise any exception.
    except Exception as error:
        reason = reason_of(error)
        forms = (
            f"{name} of type {str(value.dtype).removeprefix('torch.')} and shape "
            f"{tuple(value.shape)}"
            for name, value in tensors.items()
        )
        raise SettingsError(f"{who} refuses {' and '.join(forms)}: {reason}") from error


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


@torch.no_grad()
def check_head(module: nn.Module, head: str, inputs: Tensor) -> None:
    """Raise `SettingsError` unless the head is the last layer that a module applies.

    Parameters
    ----------
    module : nn.Module
        The module, which is split in place.
    head : str
        Dotted name of the head.
    inputs : Tensor
        Inputs to try the module on.
    """
    name = type(module).__name__
    try:
        expected = logits_of(module.eval()(inputs))
    # `try_batch` reports exceptions of a user's module.
    except Exception:
        return
    model = SplitModel.wrap(module, head).eval()
    try:
        outputs = model(inputs)
        torch.testing.assert_close(
            outputs, expected, rtol=1e-3, atol=1e-4, equal_nan=True
        )
    except Exception as error:
        raise SettingsError(
            f"head is {head!r}, which is not the last thing that {name} applies: what "
            "follows it (a softmax, a squeeze, an object around the outputs) must be "
            "left to the loss, or be part of a named head"
        ) from error
