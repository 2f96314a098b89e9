"""Local training of a part of a split model, and its evaluation.

`train` consists of `freeze`, `loop` and the hyper-parameters `SGD`, which a client with
a custom step uses directly. If clients train together (`cohort`), equal calls of
`train` and `gradient` are computed as one.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from flwr_frl.task.devices import current
from flwr_frl.task.examples import ExampleSet, are_classes
from flwr_frl.task.models.split_model import Part, SplitModel
from flwr_frl.task.training.calls import GradientCall, TrainCall, evaluation_size
from flwr_frl.task.training.cohort import make
from flwr_frl.task.training.sgd import SGD, Regularizer
from flwr_frl.task.types import Loss


def train(
    model: SplitModel,
    part: Part,
    examples: ExampleSet,
    loss: Loss,
    epochs: int,
    sgd: SGD,
    regularizer: Regularizer | None = None,
    correction: Mapping[str, Tensor] | None = None,
) -> float:
    """Train a part of a model on a client's examples; the other part stays unchanged.

    If the representation is frozen and nothing random happens before the head (no
    augmentation, no dropout), its features are computed once for all epochs. A
    parameter that both parts share is trained with either of them, and then features
    are computed in each step.

    Parameters
    ----------
    model : SplitModel
        On the device of this process (`devices.current`). Only the named part is
        modified, in place.
    part : {"head", "representation", "all"}
        The part to train.
    examples : ExampleSet
        The client's training examples, on any device.
    loss : callable
        Maps a batch's outputs and targets to the mean over the batch. `loop` lists the
        batches that are skipped.
    epochs : int
        Passes over the examples; 0 does nothing.
    sgd : SGD
        The hyper-parameters.
    regularizer : callable, optional
        Maps a batch's features and targets and the model to a value added to the loss.
        Clients can train together if it is a dataclass of tensors and hashable values,
        such as `Proximal`, or the same function for all of them. Otherwise each client
        trains alone.
    correction : mapping of str to Tensor, optional
        Added to the gradients of the parameters of these names in every step.

    Returns
    -------
    float
        Mean loss over the last epoch, without the regularizer; 0 without epochs.

    Raises
    ------
    TrainingDivergedError
        If the loss is no longer finite.
    SettingsError
        If no batch has more than one example, and the model cannot train on one.
    """
    examples = examples.on(current())
    terms = regularizer, correction
    call = TrainCall(model, part, examples, loss, epochs, sgd, *terms)
    return cast(float, make(call))


def gradient(
    model: SplitModel, inputs: Tensor, targets: Tensor, loss: Loss, sgd: SGD
) -> Tensor:
    """Add the gradient of a batch's loss to the gradients of all parameters.

    Parameters
    ----------
    model : SplitModel
        In training mode, with parameters that require gradients.
    inputs, targets : Tensor
        The batch.
    loss : callable
        Maps a batch's outputs and targets to the mean over the batch.
    sgd : SGD
        Determines whether the forward pass runs in bfloat16.

    Returns
    -------
    Tensor
        The loss, detached.
    """
    inputs, targets = inputs.to(current()), targets.to(current())
    return cast(Tensor, make(GradientCall(model, inputs, targets, loss, sgd)))


@torch.no_grad()
def evaluate(
    model: SplitModel, examples: ExampleSet, loss: Loss
) -> tuple[float, float]:
    """Return a model's mean loss and accuracy on a client's examples.

    Parameters
    ----------
    model : SplitModel
        The model; left in evaluation mode.
    examples : ExampleSet
        The client's test examples.
    loss : callable
        Maps a batch's outputs and targets to the mean over the batch.

    Returns
    -------
    loss : float
        Mean over the examples; NaN without examples.
    accuracy : float
        Share of targets whose class has the largest output, from 0 to 1; NaN if targets
        are not integers, the model has one output, or there are no examples.
    """
    model.eval()
    batches = examples.on(current()).batches(evaluation_size(model, examples))
    return _means(((model(inputs), targets) for inputs, targets in batches), loss)


@torch.no_grad()
def evaluate_each(
    model: SplitModel, sets: Sequence[ExampleSet], loss: Loss
) -> list[tuple[float, float]]:
    """Return the results of `evaluate` for each of several clients' examples.

    All examples form a single batch, so the model must treat them independently.
    """
    model.eval()
    here = [examples.on(current()) for examples in sets]
    inputs = [e.inputs if e.is_plain else e.first(len(e)) for e in here]
    outputs = model(torch.cat(inputs)).split([len(examples) for examples in here])
    pairs = zip(outputs, here, strict=True)
    return [_means([(o, e.targets.to(e.place))], loss) for o, e in pairs]


def _means(batches: Iterable[tuple[Tensor, Tensor]], loss: Loss) -> tuple[float, float]:
    """Return the mean loss and the accuracy of batches of outputs and targets."""
    total, correct, counted, classes = 0.0, 0, 0, False
    for outputs, targets in batches:
        classes = are_classes(targets, outputs.shape[1:2])
        # A sequence has a class at every position; ignored ones are negative.
        n = int((targets >= 0).sum()) if classes else len(targets)
        if n:
            total += loss(outputs, targets).item() * n
            counted += n
        if classes:
            correct += int((outputs.argmax(1) == targets).sum())
    if counted == 0:
        return float("nan"), float("nan")
    return total / counted, correct / counted if classes else float("nan")
