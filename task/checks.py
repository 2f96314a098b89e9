"""Checks that a task's model, loss, metrics and examples fit each other."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from flwr_frl.task.devices import seeded
from flwr_frl.task.examples import EVALUATION_BATCH, IGNORED, ExampleSet, are_classes
from flwr_frl.task.metrics import number
from flwr_frl.task.models.frozen import frozen_tensors
from flwr_frl.task.models.pretrained import logits_of
from flwr_frl.task.models.side_effects import on_trial, uses_batch_statistics
from flwr_frl.task.models.split_model import SplitModel
from flwr_frl.task.npy import is_finite
from flwr_frl.task.settings import SettingsError, reason_of
from flwr_frl.task.training.sgd import SGD, freeze
from flwr_frl.task.types import Loss, Metric, Task

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
            raise SettingsError(
                f"the model's {name!r} is {_name(value.dtype)}; expected float32 (set "
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
            f"targets are {_name(targets.dtype)}; with classes they must be integers, "
            "from 0"
        )
    width = outputs.shape[1:2].numel()
    if not targets.is_floating_point() and width < count:
        raise SettingsError(
            f"the model has {width} outputs; of {count} classes it must have one each"
        )
    if are_classes(targets, outputs.shape[1:2]):
        _check_classes(task.loss, outputs, batch[1])
        if not count:
            check_range(marked, outputs.shape[1], ignored)


def ignored_by(loss: Loss) -> int:
    """Return the target that a loss ignores, its ``ignore_index`` if it has one."""
    arguments = getattr(loss, "keywords", {})  # Of `functools.partial`.
    index = getattr(loss, "ignore_index", arguments.get("ignore_index"))
    return IGNORED if index is None else int(index)


def _check_classes(loss: Loss, outputs: Tensor, targets: Tensor) -> None:
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
    _check_pairs("the loss", task.loss, outputs, targets)
    for name, metric in task.metrics.items():
        _try_metric(name, metric, outputs, targets)
        _check_pairs(f"metric {name!r}", metric, outputs, targets)
    return outputs


def _try_metric(name: str, metric: Metric, outputs: Tensor, targets: Tensor) -> None:
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
        number(name, _call(who, metric, outputs=outputs, targets=varied))


@torch.no_grad()
def _check_pairs(
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


def _computed(task: Task, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return outputs and loss of a batch; `SettingsError` if one of them is invalid."""
    inputs, targets = batch
    model = task.scratch_model.eval()
    # Forward may draw random numbers.
    with seeded(0):
        outputs = _call("the model", model, inputs=inputs)
    if not isinstance(outputs, Tensor):
        raise SettingsError(
            f"the model returns a {type(outputs).__name__}; expected a tensor"
        )
    _check_shapes(outputs, targets)
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
    i = refused[0] if refused else 0
    for name, values in zip(("inputs", "targets"), batch, strict=True):
        if not values[i].isfinite().all():
            line = f"the {name} of row {rows[i]} are not finite; {error}"
            return SettingsError(line)
    known = accepted and refused
    return SettingsError(f"row {rows[i]}: {error}") if known else error


def try_training(task: Task, examples: ExampleSet) -> None:
    """Raise `SettingsError` unless a task can be trained, also on one example.

    Tries one training step, and a batch of one example, as the last batch may have one.

    Parameters
    ----------
    task : Task
        The task. Its scratch model is left as it was.
    examples : ExampleSet
        Training examples; the first `FEW` are tried.
    """
    inputs, targets = next(examples.batches(FEW))
    # Batch norms refuse a single example.
    if len(inputs) == 1:
        return
    model = task.scratch_model
    tensors = model.tensors
    parameters = {p: p.detach().clone() for p in model.parameters()}
    with seeded(0), on_trial(model):
        try:
            with torch.enable_grad():
                outputs = _training_step(task, inputs, targets)
        finally:
            for parameter, value in parameters.items():
                parameter.copy_(value)
                parameter.grad = None
        _try_one(task, inputs[:1], targets[:1], outputs)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if tensors.get(name, buffer) is not buffer:
            raise SettingsError(
                f"the model's forward replaces its buffer {name!r}; it must change the "
                "buffer in place, with copy_"
            )


def _training_step(task: Task, inputs: Tensor, targets: Tensor) -> Tensor:
    """Make a training step with the scratch model, and return the outputs."""
    model = task.scratch_model
    freeze(model, "all")
    try:
        outputs = _call("the model in training mode", model, inputs=inputs)
    except SettingsError as error:
        kind = type(model.representation(inputs))
        evaluated = model.eval().representation(inputs)
        if issubclass(kind, Tensor) or not isinstance(evaluated, Tensor):
            raise
        raise _auxiliary("representation", kind) from error
    if not isinstance(outputs, Tensor):
        raise _auxiliary("model", type(outputs))
    value = _call("the loss", task.loss, outputs=outputs, targets=targets)
    try:
        value.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise SettingsError(
                    f"the gradient of {name!r} is sparse; expected dense, with "
                    "sparse=False"
                )
        SGD(momentum=0.0).optimizer(model).step()
    except SettingsError:
        raise
    # Custom functions and hooks may raise any exception.
    except Exception as error:
        raise SettingsError(f"a training step fails: {reason_of(error)}") from error
    return outputs.detach()


def _auxiliary(who: str, kind: type) -> SettingsError:
    return SettingsError(
        f"the {who} returns a {kind.__name__} in training mode and a tensor in "
        "evaluation mode; expected a tensor in both, without auxiliary outputs "
        "(aux_logits=False in torchvision)"
    )


def _try_one(task: Task, inputs: Tensor, targets: Tensor, outputs: Tensor) -> None:
    """Raise `SettingsError` unless one example gives a row like those of a batch."""
    model = task.scratch_model.eval()
    if any(map(uses_batch_statistics, model.modules())):
        return
    one = _call("the model", model, inputs=inputs)
    if one.shape[:1] != (1,) or one.shape[1:] != outputs.shape[1:]:
        raise SettingsError(
            f"the model returns outputs of shape {tuple(outputs.shape)} for "
            f"{len(outputs)} examples and of shape {tuple(one.shape)} for one; "
            f"expected {(1, *outputs.shape[1:])} (squeeze() also removes the "
            "dimension of the examples; squeeze(1) does not)"
        )
    with warnings.catch_warnings():
        # Statistics of one example may be undefined.
        warnings.simplefilter("ignore")
        _call("the loss", task.loss, outputs=one, targets=targets)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _call(who: str, function: Callable[..., Any], **tensors: Tensor) -> Any:
    try:
        return function(*tensors.values())
    # A user's model or loss may raise any exception.
    except Exception as error:
        reason = reason_of(error)
        forms = (
            f"{name} of type {_name(value.dtype)} and shape {tuple(value.shape)}"
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
def try_twice(module: nn.Module, inputs: Tensor) -> Any:
    """Return a module's outputs in evaluation mode, None if it does not accept inputs.

    Raises `SettingsError` if a second call with the same random numbers differs.
    """
    try:
        with seeded(0):
            outputs = logits_of(module.eval()(inputs))
    # `try_batch` reports exceptions of a user's module.
    except Exception:
        return None
    try:
        with seeded(0):
            again = logits_of(module(inputs))
        torch.testing.assert_close(again, outputs, equal_nan=True)
    except Exception as error:
        raise SettingsError(
            f"two calls of {type(module).__name__} with the same inputs and random "
            "numbers differ; its forward must keep no state, such as that of an LSTM, "
            "and draw from torch's global generator"
        ) from error
    return outputs


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
    expected = try_twice(module, inputs)
    if expected is None:
        return
    model = SplitModel.wrap(module, head).eval()
    try:
        with seeded(0):
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
