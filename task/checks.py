"""Checks that a task's model, loss, metrics and examples fit each other."""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flwr_frl.common.settings import SettingsError
from flwr_frl.task.examples import EVALUATION_BATCH, IGNORED, ExampleSet, are_classes
from flwr_frl.task.function_checks import (
    called,
    check_classes,
    check_pairs,
    ignored_by,
    is_sum,
    name_of,
    try_metric,
)
from flwr_frl.task.types import Task

# Bounds of inputs and of targets.
Bounds = tuple[tuple[float, float], ...]


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
    targets = examples.targets
    is_cross_entropy = task.loss is nn.functional.cross_entropy
    count, ignored = len(task.classes), IGNORED if is_cross_entropy else np.inf
    marked = targets.masked_fill(targets == ignored_by(task.loss), IGNORED)
    # Before the loss, whose own error would not name the row.
    check_range(marked, count, ignored)
    rows = _rows_to_try(examples)
    batch = next(examples.subset(rows).batches(len(rows)))
    outputs = try_batch(task, batch, rows.tolist())
    entropy = is_cross_entropy and outputs.ndim > 1
    if entropy and outputs.shape[1] == 1 and len(task.classes) != 1:
        raise SettingsError(
            "the loss is cross-entropy and the model has one output, for which it is "
            "always 0; use another loss for numbers, such as nn.functional.mse_loss"
        )
    if task.classes and targets.is_floating_point():
        raise SettingsError(
            f"targets are {name_of(targets.dtype)}; with classes they must be "
            "integers, from 0"
        )
    width = outputs.shape[1:2].numel()
    if not targets.is_floating_point() and width < count:
        raise SettingsError(
            f"the model has {width} outputs; of {count} classes it must have one each"
        )
    if are_classes(targets, outputs.shape[1:2]):
        check_classes(task.loss, outputs, batch[1])
        if not count:
            check_range(marked, outputs.shape[1], ignored)


def _rows_to_try(examples: ExampleSet) -> Tensor:
    """Return the rows of the first batch, and of later inputs that are not finite.

    They are one batch, as the loss may ignore all rows with such inputs.
    """
    inputs, first = examples.inputs, min(len(examples), EVALUATION_BATCH)
    rows = torch.arange(first)
    # Memory-mapped inputs are images of bytes.
    if inputs.is_floating_point() and examples.rows is None:
        odd = (~inputs.flatten(1).isfinite().all(1)).nonzero()[:, 0]
        rows = torch.cat([rows, odd[odd >= first][:EVALUATION_BATCH]])
    return rows


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


def try_batch(
    task: Task, batch: tuple[Tensor, Tensor], rows: Sequence[int] | None = None
) -> Tensor:
    """Return the model's outputs for a batch.

    Parameters
    ----------
    task : Task
        The task.
    batch : tuple of Tensor
        Inputs and targets.
    rows : sequence of int, optional
        Rows of the examples that form the batch; the first ones by default.

    Raises
    ------
    SettingsError
        If the model, the loss or a metric does not accept the batch. The error names
        the row if model and loss accept others.
    """
    targets = batch[1]
    try:
        outputs, value = _computed(task, batch)
    except SettingsError as error:
        rows = range(len(targets)) if rows is None else rows
        raise _located(task, batch, rows, error) from error
    outputs = outputs.detach()
    if is_sum(task.loss, outputs, targets, value.item()):
        raise SettingsError(
            "the loss of a batch and the same again is twice the loss; expected the "
            "mean over the batch (reduction='mean' in torch's losses), not the sum"
        )
    check_pairs("the loss", task.loss, outputs, targets)
    for name, metric in task.metrics.items():
        try_metric(name, metric, outputs, targets)
        check_pairs(f"metric {name!r}", metric, outputs, targets)
    return outputs


def _computed(task: Task, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return outputs and loss of a batch; `SettingsError` if one of them is invalid."""
    inputs, targets = batch
    outputs = called("the model", task.scratch_model.eval(), inputs=inputs)
    if not isinstance(outputs, Tensor):
        raise SettingsError(
            f"the model returns a {type(outputs).__name__}; expected a tensor"
        )
    _check_shapes(outputs, targets)
    with warnings.catch_warnings():
        # torch broadcasts (n, 1) and (n,) to (n, n), and only warns.
        warnings.filterwarnings("error", message="Using a target size")
        value = called("the loss", task.loss, outputs=outputs, targets=targets)
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
    return outputs.detach(), value.detach()


def _check_shapes(outputs: Tensor, targets: Tensor) -> None:
    """Raise `SettingsError` unless integer targets have the shape of classes."""
    expected = outputs.shape[:1] + outputs.shape[2:]
    if not are_classes(targets, outputs.shape[1:2]) or targets.shape == expected:
        return
    shapes = f"outputs of shape {tuple(outputs.shape)} and integer targets of shape "
    shapes += f"{tuple(targets.shape)}"
    if targets.shape == outputs.shape:
        raise SettingsError(
            f"{shapes}; integers are classes, so the targets of several labels or "
            "numbers must be floats (targets.float())"
        )
    raise SettingsError(
        f"{shapes}; classes must be the outputs' second dimension, and the others the "
        "targets'"
    )


def _located(
    task: Task, batch: tuple[Tensor, Tensor], rows: Sequence[int], error: SettingsError
) -> SettingsError:
    """Return an error of a batch that names the first row at fault, if it has one."""
    refused, accepted = [], False
    for i in range(len(rows)):
        inputs, targets = (part[i : i + 1] for part in batch)
        # The loss of targets that it ignores is NaN.
        if not targets.is_floating_point() and (targets < 0).all():
            continue
        try:
            _computed(task, (inputs, targets))
            accepted = True
        except SettingsError:
            refused.append(i)
        if accepted and refused:
            break
    if not refused:
        return error
    i = refused[0]
    for name, values in zip(("inputs", "targets"), batch, strict=True):
        if not values[i].isfinite().all():
            line = f"the {name} of row {rows[i]} are not finite; {error}"
            return SettingsError(line)
    return SettingsError(f"row {rows[i]}: {error}") if accepted else error
