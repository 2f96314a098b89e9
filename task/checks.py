"""One pass that tries a task on a few examples before the first round.

It finds what users most often get wrong: types and shapes that do not fit, classes out
of range, losses that are no number, heads that are not last, and models that cannot be
trained or sent. Models, losses and metrics are the user's and may raise any exception.
"""

import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from flwr_frl.common.npy import is_finite
from flwr_frl.common.settings import SettingsError, reason_of
from flwr_frl.task.devices import seeded
from flwr_frl.task.examples import EVALUATION_BATCH, IGNORED, ExampleSet, are_classes
from flwr_frl.task.metrics import number
from flwr_frl.task.models.frozen import copy_sharing_frozen, frozen_tensors
from flwr_frl.task.models.pretrained import logits_of
from flwr_frl.task.models.side_effects import uses_batch_statistics
from flwr_frl.task.models.split_model import SplitModel
from flwr_frl.task.training.sgd import freeze
from flwr_frl.task.types import Loss

if TYPE_CHECKING:
    from flwr_frl.task.base import Task

# Number of examples of a training step that is tried.
FEW = 10


class Trials:
    """The forms of examples that a task has accepted, so that few clients are tried.

    A process may have 100,000 clients. Examples of an accepted form are not tried again
    unless they have tokens above all that were tried.
    """

    def __init__(self) -> None:
        self.accepted: set[tuple[Any, ...]] = set()
        self.highest = 0
        # Number of classes: those of the task, or the outputs for integer targets.
        self.classes = 0

    def check(self, task: "Task", part: str, examples: ExampleSet) -> None:
        """Raise `SettingsError` unless the task can be used with the examples."""
        inputs, targets = examples.inputs, examples.targets
        check_range(targets, self.classes or len(task.classes), task.loss)
        tensors = ((tuple(t.shape[1:]), t.dtype) for t in (inputs, targets))
        form = part, *tensors
        highest = 0
        # Rows of mapped files are not read.
        if examples.rows is None:
            check_finite("inputs", inputs)
            if inputs.dtype == torch.int64 and inputs.numel():
                highest = int(inputs.max())
        check_finite("targets", targets)
        if form in self.accepted and highest <= self.highest:
            return
        # Models, losses and metrics may draw random numbers.
        with seeded(0):
            outputs = try_examples(task, examples, training=part == "train")
        if are_classes(targets, outputs.shape[1:2]):
            self.classes = outputs.shape[1]
            check_range(targets, self.classes, task.loss)
        self.accepted.add(form)
        self.highest = max(self.highest, highest)


def try_examples(task: "Task", examples: ExampleSet, training: bool) -> Tensor:
    """Return the outputs for a batch; `SettingsError` if a part does not accept it.

    Parameters
    ----------
    task : Task
        The task. Its models stay as they are.
    examples : ExampleSet
        At least one example. The first ones are tried.
    training : bool
        Also try a training step.
    """
    model = copy_sharing_frozen(task.scratch_model).eval()
    inputs, targets = next(examples.batches(EVALUATION_BATCH))
    outputs = _outputs(model, inputs)
    _check_shapes(task, outputs, targets)
    value = _loss_of(task, outputs, targets)
    if not value.isfinite():
        line = f"the loss of the first batch is {value.item()}; expected finite"
        raise SettingsError(line)
    outputs = outputs.detach()
    try_metrics(task, outputs, targets)
    if training:
        _try_training(task, model, inputs[:FEW], targets[:FEW])
    return outputs


def try_metrics(task: "Task", outputs: Tensor, targets: Tensor) -> None:
    """Raise `SettingsError` unless metrics return numbers.

    A metric may be undefined for some targets, and then raise an exception, but not one
    of a mistake in its code.
    """
    for name, metric in task.metrics.items():
        try:
            value = metric(outputs, targets)
        except (AttributeError, NameError, TypeError) as error:
            raise SettingsError(f"metric {name!r} fails: {reason_of(error)}") from error
        # A custom metric may raise any exception.
        except Exception:
            continue
        number(name, value)


def check_finite(name: str, values: Tensor) -> None:
    """Raise `SettingsError` if a row has a value that is not finite."""
    if values.is_floating_point() and not math.isfinite(values.sum().item()):
        odd = (~values.isfinite()).nonzero()
        # The sum of large numbers may overflow.
        if len(odd):
            raise SettingsError(f"the {name} of row {int(odd[0, 0])} are not finite")


def check_range(targets: Tensor, count: int, loss: Loss) -> None:
    """Raise `SettingsError` if an integer target is none of ``count`` classes, if any.

    Cross-entropy ignores the target -100, and a custom loss may ignore all below 0.
    """
    if not count or targets.is_floating_point():
        return
    low, high = targets.aminmax()
    if 0 <= int(low) <= int(high) < count:
        return
    flat = targets.flatten()
    wrong = flat >= count
    if loss is nn.functional.cross_entropy:
        wrong |= (flat < 0) & (flat != IGNORED)
    if wrong.any():
        first = int(wrong.nonzero()[0])
        row = first * len(targets) // len(flat)
        raise SettingsError(
            f"the target of row {row} is {int(flat[first])}; of {count} classes it "
            f"must be one from 0 to {count - 1}"
        )


def check_model(model: SplitModel) -> None:
    """Raise `SettingsError` if an initial model cannot be trained or sent.

    It has only frozen parameters, or its state dict contains uninitialised, 16-bit or
    non-finite values.
    """
    if frozen_tensors(model) and not any(True for _ in model.parameters()):
        raise SettingsError(
            f"the model's {min(frozen_tensors(model))!r} does not require a gradient, "
            "and neither does any other parameter; at least one must, to be trained"
        )
    for name, value in model.tensors.items():
        problem = ""
        if is_lazy(value):
            problem = "has no shape yet; call the model once in model()"
        elif value.dtype in (torch.float16, torch.bfloat16):
            problem = f"is {value.dtype}; expected float32 (bfloat16=true trains in 16"
            problem += " bits)"
        elif not is_finite(value.detach().cpu().numpy()):
            problem = "is not finite; a mask must be a buffer with persistent=False"
        if problem:
            raise SettingsError(f"the model's {name!r} {problem}")


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
    with seeded(0):
        expected = logits_of(_called("the model", module.eval(), inputs=inputs))
    try:
        with seeded(0):
            outputs = SplitModel.wrap(module, head).eval()(inputs)
        torch.testing.assert_close(
            outputs, expected, rtol=1e-3, atol=1e-4, equal_nan=True
        )
    except Exception as error:
        raise SettingsError(
            f"head is {head!r}, which is not the last thing that {name} applies: what "
            "follows it (a softmax, a squeeze, an object around the outputs) must be "
            "left to the loss, or be part of a named head"
        ) from error


def _called(who: str, function: Callable[..., Any], **tensors: Tensor) -> Any:
    """Return a function's value for tensors; `SettingsError` if it raises an error."""
    try:
        return function(*tensors.values())
    except Exception as error:
        forms = (
            f"{name} of type {str(value.dtype).removeprefix('torch.')} and shape "
            f"{tuple(value.shape)}"
            for name, value in tensors.items()
        )
        line = f"{who} refuses {' and '.join(forms)}: {reason_of(error)}"
        raise SettingsError(line) from error


def _outputs(model: nn.Module, inputs: Tensor) -> Tensor:
    mode = "training" if model.training else "evaluation"
    outputs = _called("the model", model, inputs=inputs)
    if isinstance(outputs, Tensor):
        return outputs
    raise SettingsError(
        f"the model returns a {type(outputs).__name__} in {mode} mode; expected a "
        "tensor, without auxiliary outputs (aux_logits=False in torchvision)"
    )


def _loss_of(task: "Task", outputs: Tensor, targets: Tensor) -> Tensor:
    with warnings.catch_warnings():
        # torch broadcasts (n, 1) and (n,) to (n, n), and only warns.
        warnings.filterwarnings("error", message="Using a target size")
        value = _called("the loss", task.loss, outputs=outputs, targets=targets)
    if not isinstance(value, Tensor) or value.ndim > 0:
        shown = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else value
        raise SettingsError(
            f"the loss of a batch is {shown!s}; expected a tensor of one number, the "
            "mean over the batch"
        )
    if outputs.requires_grad and not value.requires_grad:
        raise SettingsError(
            "the loss has no gradient; expected computed from the outputs by "
            "torch, and not from a copy of them (detach, item, numpy)"
        )
    return value


def _check_shapes(task: "Task", outputs: Tensor, targets: Tensor) -> None:
    """Raise `SettingsError` unless the targets' form fits the outputs and the loss."""
    shapes = f"outputs have the shape {tuple(outputs.shape)}, targets "
    shapes += f"({targets.dtype}) the shape {tuple(targets.shape)}"
    width, classes = outputs.shape[1:2].numel(), len(task.classes)
    if classes and (targets.is_floating_point() or width < classes):
        raise SettingsError(
            f"{shapes}; with {classes} classes, there must be an output for each, and "
            "targets must be integers"
        )
    if are_classes(targets, outputs.shape[1:2]):
        if targets.shape != outputs.shape[:1] + outputs.shape[2:]:
            raise SettingsError(
                f"{shapes}; integers are classes, which must be the outputs' second "
                "dimension, and the others the targets'; several labels or numbers "
                "must be floats (targets.float())"
            )
        return
    same_size = targets.numel() == outputs.numel() and targets.shape != outputs.shape
    if targets.ndim < outputs.ndim or same_size:
        raise SettingsError(
            f"{shapes}; targets that are numbers must have as many dimensions as the "
            "outputs, (n, 1) for one number"
        )


def _try_training(
    task: "Task", model: SplitModel, inputs: Tensor, targets: Tensor
) -> None:
    """Raise `SettingsError` unless a model can be trained, also on one example."""
    # Batch norms refuse a single example.
    if len(inputs) == 1:
        return
    buffers = dict(model.named_buffers())
    freeze(model, "all")
    outputs = _outputs(model, inputs)
    try:
        torch.autograd.backward(_loss_of(task, outputs, targets))
    except SettingsError:
        raise
    # Custom functions and hooks may raise any exception.
    except Exception as error:
        raise SettingsError(f"a training step fails: {reason_of(error)}") from error
    for name, buffer in model.named_buffers():
        if buffers.get(name, buffer) is not buffer:
            raise SettingsError(
                f"the model's forward replaces its buffer {name!r}; it must change the "
                "buffer in place, with copy_"
            )
    if any(map(uses_batch_statistics, model.modules())):
        return
    # The last batch may have one example.
    one = _outputs(model.eval(), inputs[:1])
    if one.shape != (1, *outputs.shape[1:]):
        raise SettingsError(
            f"the model returns outputs of shape {tuple(one.shape)} for one example; "
            f"expected {(1, *outputs.shape[1:])} (squeeze() also removes the dimension "
            "of the examples; squeeze(1) does not)"
        )
    _loss_of(task, one, targets[:1])
