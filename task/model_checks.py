"""Checks that a task's model can be split, trained and sent."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from flwr_frl.common.npy import is_finite
from flwr_frl.common.settings import SettingsError, reason_of
from flwr_frl.task.devices import seeded
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.function_checks import called, name_of
from flwr_frl.task.models.frozen import frozen_tensors
from flwr_frl.task.models.pretrained import logits_of
from flwr_frl.task.models.side_effects import on_trial, uses_batch_statistics
from flwr_frl.task.models.split_model import SplitModel
from flwr_frl.task.training.sgd import SGD, freeze
from flwr_frl.task.types import Task

# Number of examples of a training step that is tried.
FEW = 10


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
                f"the model's {name!r} is {name_of(value.dtype)}; expected float32 "
                "(set bfloat16=true to train in 16 bits)"
            )
        if not is_finite(value.detach().cpu().numpy()):
            raise SettingsError(
                f"the model's {name!r} is not finite; what never changes, a mask "
                "of -inf say, must be a buffer with persistent=False"
            )


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
    with on_trial(model):
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
        outputs = called("the model in training mode", model, inputs=inputs)
    except SettingsError as error:
        kind = type(model.representation(inputs))
        evaluated = model.eval().representation(inputs)
        if issubclass(kind, Tensor) or not isinstance(evaluated, Tensor):
            raise
        raise _auxiliary("representation", kind) from error
    if not isinstance(outputs, Tensor):
        raise _auxiliary("model", type(outputs))
    value = called("the loss", task.loss, outputs=outputs, targets=targets)
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
    one = called("the model", model, inputs=inputs)
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
        called("the loss", task.loss, outputs=one, targets=targets)
