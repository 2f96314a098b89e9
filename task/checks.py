"""One pass that tries a task on a few examples before the first round.

A mistake for which torch raises an error is reported with torch's words. Mistakes that
torch accepts are found here: targets that broadcast, classes out of range, values that
are not finite, and heads that are not last. Models, losses and metrics are the user's
and may raise any exception.
"""

import math
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from flwr_frl.common.errors import SettingsError, reason_of, require
from flwr_frl.task.devices import seeded
from flwr_frl.task.examples import EVALUATION_BATCH, IGNORED, ExampleSet, are_classes
from flwr_frl.task.models.frozen import copy_sharing_frozen, frozen_tensors
from flwr_frl.task.models.split_model import SplitModel, logits_of
from flwr_frl.task.training.sgd import freeze

if TYPE_CHECKING:
    from flwr_frl.task.base import Task

# Number of examples of a training step that is tried.
FEW = 10


def check_part(task: "Task", part: str, examples: ExampleSet) -> None:
    """Raise `SettingsError` unless a task can be used with a client's examples.

    A process may have 100,000 clients. Values are checked of all, but examples of a
    form that the task has accepted are not tried again.

    Parameters
    ----------
    task : Task
        The task, which remembers the accepted forms.
    part : {"train", "test"}
        Use of the examples.
    examples : ExampleSet
        At least one example.
    """
    inputs, targets = examples.inputs, examples.targets
    # Rows of mapped files are not read.
    if examples.rows is None:
        check_finite("inputs", inputs)
    check_finite("targets", targets)
    accepted = task.accepted_forms
    form = part, *((tuple(t.shape[1:]), t.dtype) for t in (inputs, targets))
    if form not in accepted:
        if not accepted:
            task.check_model(examples)
        if task.classes and not targets.is_floating_point():
            # On a GPU, the loss of such a target would end the process's use of it.
            check_range(task, targets, len(task.classes))
        # Models, losses and metrics may draw random numbers.
        with seeded(0):
            outputs = try_examples(task, examples, training=part == "train")
        has_classes = are_classes(targets, outputs.shape[1:2])
        accepted[form] = (len(task.classes) or outputs.shape[1]) if has_classes else 0
    if accepted[form]:
        check_range(task, targets, accepted[form])


def try_examples(task: "Task", examples: ExampleSet, training: bool) -> Tensor:
    """Return the outputs for a batch; `SettingsError` if a part does not accept it.

    Parameters
    ----------
    task : Task
        The task. Its models stay as they are.
    examples : ExampleSet
        At least one example. The first ones are tried.
    training : bool
        Also try a training step, and one example, as the last batch may have one.
    """
    model = copy_sharing_frozen(task.scratch_model).eval()
    inputs, targets = next(examples.batches(EVALUATION_BATCH))
    outputs, loss = _try(task, model, inputs, targets)
    # The targets of fewer examples may all be ignored.
    require(math.isfinite(loss), "the loss of the first batch", loss, "a finite number")
    try_metrics(task, outputs, targets)
    # Batch norms refuse to train on a single example.
    if training and len(inputs) > 1:
        freeze(model, "all")
        buffers = dict(model.named_buffers())
        _try(task, model.train(), inputs[:FEW], targets[:FEW])
        for name, buffer in model.named_buffers():
            if buffers.get(name, buffer) is not buffer:
                raise SettingsError(
                    f"the model's forward replaces its buffer {name!r}; it must change "
                    "the buffer in place, with copy_"
                )
        _try(task, model.eval(), inputs[:1], targets[:1])
    return outputs


def _try(
    task: "Task", model: SplitModel, inputs: Tensor, targets: Tensor
) -> tuple[Tensor, float]:
    """Return outputs and loss; in training mode, gradients must exist as well."""
    try:
        outputs = model(inputs)
        _check_shapes(task, outputs, targets)
        with warnings.catch_warnings():
            # torch broadcasts (n, 1) and (n,) to (n, n), and only warns.
            warnings.filterwarnings("error", message="Using a target size")
            loss = task.loss(outputs, targets)
        value = float(loss.item())
        if model.training:
            torch.autograd.backward(loss)
    except SettingsError:
        raise
    except Exception as error:
        mode = "training" if model.training else "evaluation"
        forms = [(v.dtype, tuple(v.shape)) for v in (inputs, targets)]
        raise SettingsError(
            f"the model or the loss fails in {mode} with inputs of type and shape "
            f"{forms[0]} and targets of {forms[1]}: {reason_of(error)}"
        ) from error
    return outputs.detach(), value


def _check_shapes(task: "Task", outputs: Any, targets: Tensor) -> None:
    """Raise `SettingsError` unless the outputs are a tensor that fits the targets."""
    allowed = "a tensor, without others beside it (aux_logits=False in torchvision)"
    require(isinstance(outputs, Tensor), "the model's output", outputs, allowed)
    count = len(task.classes)
    if are_classes(targets, outputs.shape[1:2]):
        fits = targets.shape == outputs.shape[:1] + outputs.shape[2:]
        fits = fits and outputs.shape[1] >= count
    else:
        same_size = targets.numel() == outputs.numel()
        fits = targets.shape == outputs.shape or not same_size
        fits = fits and targets.ndim >= outputs.ndim and not count
    if not fits or outputs.shape[:1] != targets.shape[:1]:
        raise SettingsError(
            f"outputs have the shape {tuple(outputs.shape)}, targets ({targets.dtype}) "
            f"the shape {tuple(targets.shape)}, and classes has {count} names; integer "
            "targets are classes, with an output for each; numbers are floats of as "
            "many dimensions as the outputs, (n, 1) for one number"
        )


def try_metrics(task: "Task", outputs: Tensor, targets: Tensor) -> None:
    """Raise `SettingsError` if a mistake in a metric's code raises an exception.

    A metric may be undefined for some targets, and then raise another exception.
    """
    for name, metric in task.metrics.items():
        try:
            float(metric(outputs, targets))
        except (AttributeError, NameError, TypeError) as error:
            raise SettingsError(f"metric {name!r} fails: {reason_of(error)}") from error
        # A custom metric may raise any exception.
        except Exception:
            continue


def check_finite(name: str, values: Tensor) -> None:
    """Raise `SettingsError` if a row has a value that is not finite."""
    if values.is_floating_point() and not values.isfinite().all():
        row = int((~values.isfinite()).nonzero()[0, 0])
        raise SettingsError(f"the {name} of row {row} are not finite")


def check_range(task: "Task", targets: Tensor, count: int) -> None:
    """Raise `SettingsError` if an integer target is none of ``count`` classes.

    Cross-entropy ignores the target -100, and a custom loss may ignore all below 0.
    """
    wrong = targets >= count
    if task.loss is nn.functional.cross_entropy:
        wrong |= (targets < 0) & (targets != IGNORED)
    if wrong.any():
        first = tuple(wrong.nonzero()[0].tolist())
        raise SettingsError(
            f"the target of row {first[0]} is {int(targets[first])}; of {count} "
            f"classes it must be one from 0 to {count - 1}"
        )


def check_model(model: SplitModel) -> None:
    """Raise `SettingsError` if an initial model cannot be trained or sent."""
    is_trained = not frozen_tensors(model) or any(True for _ in model.parameters())
    allowed = "at least one; none requires a gradient"
    require(is_trained, "the model's number of trained parameters", 0, allowed)
    for name, value in model.tensors.items():
        short = value.dtype in (torch.float16, torch.bfloat16)
        if is_lazy(value) or short or not value.isfinite().all():
            raise SettingsError(
                f"the model's {name!r} has no shape yet, 16 bits or values that are "
                "not finite; call lazy layers once in model(), train in 16 bits with "
                "bfloat16=true, and register masks with persistent=False"
            )


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
        with seeded(0):
            expected = logits_of(module.eval()(inputs))
    # The trial reports a model that fails.
    except Exception:
        return
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
