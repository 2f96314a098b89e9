"""Local training of a named part of a split model, and its evaluation.

`train` is made of pieces that a client with a step of its own uses by themselves:
`freeze`, `loop` and the hyper-parameters `SGD`. Where clients train together
(`flwr_frl.task.cohort`), equal calls of `train`, `gradient` and `evaluate` are made as
one.
"""

from collections.abc import Mapping
from typing import cast

from torch import Tensor

from flwr_frl.task.calls import EvaluateCall, GradientCall, TrainCall, features_of
from flwr_frl.task.cohort import make
from flwr_frl.task.devices import current
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import Part, SplitModel
from flwr_frl.task.sgd import (
    SGD,
    Loss,
    OneExampleError,
    Proximal,
    Regularizer,
    Step,
    TrainingDivergedError,
    can_be_left_out,
    freeze,
    has_ignored,
    loop,
    steps_an_epoch,
    told_of_one_example,
)

__all__ = [
    "SGD",
    "Loss",
    "OneExampleError",
    "Proximal",
    "Regularizer",
    "Step",
    "TrainingDivergedError",
    "can_be_left_out",
    "evaluate",
    "features_of",
    "freeze",
    "gradient",
    "has_ignored",
    "loop",
    "steps_an_epoch",
    "told_of_one_example",
    "train",
]


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
    """Train a part of a model on a client's examples; the other part stays as it is.

    While the representation is frozen and nothing random happens before the head (no
    augmentation, no dropout), its features are computed once for all epochs. A
    parameter that is in both parts learns with either of them: the other part then
    moves with it, and features are computed in each step.

    Parameters
    ----------
    model : SplitModel
        On the device of this process, `flwr_frl.task.devices.current`. Changed in
        place: the parameters of the named part only, to the last bit.
    part : {"head", "representation", "all"}
        What is trained.
    examples : ExampleSet
        The client's training examples, wherever they are.
    loss : callable
        Of a batch's outputs and targets; the mean over the batch. There is no step with
        a batch whose targets are all -100, which cross-entropy ignores, and an epoch's
        last example is left out as `loop` says.
    epochs : int
        Passes over the examples; 0 does nothing.
    sgd : SGD
        The hyper-parameters.
    regularizer : callable, optional
        Of a batch's features and targets and the model; added to the loss. A frozen
        dataclass, as `Proximal` is, lets clients train together; with another callable
        a client trains alone.
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
    """
    examples = examples.on(current())
    call = TrainCall(model, part, examples, loss, epochs, sgd, regularizer, correction)
    return cast(float, make(call))


def gradient(
    model: SplitModel, inputs: Tensor, targets: Tensor, loss: Loss, sgd: SGD
) -> Tensor:
    """Add the gradient of a batch's loss to that of all parameters.

    Parameters
    ----------
    model : SplitModel
        In training mode; its parameters require gradients.
    inputs, targets : Tensor
        The batch.
    loss : callable
        Of a batch's outputs and targets; the mean over the batch.
    sgd : SGD
        Says whether the forward pass is in bfloat16.

    Returns
    -------
    Tensor
        The loss, without a gradient.
    """
    inputs, targets = inputs.to(current()), targets.to(current())
    return cast(Tensor, make(GradientCall(model, inputs, targets, loss, sgd)))


def evaluate(
    model: SplitModel, examples: ExampleSet, loss: Loss
) -> tuple[float, float]:
    """Return a model's mean loss and accuracy on a client's examples.

    Parameters
    ----------
    model : SplitModel
        The model; it is left in evaluation mode.
    examples : ExampleSet
        The client's test examples.
    loss : callable
        Of a batch's outputs and targets; the mean over the batch.

    Returns
    -------
    loss : float
        Mean over the examples; NaN without examples.
    accuracy : float
        Share of targets that are the largest output, 0 to 1; NaN where targets are not
        integers or the model has one output, and without examples.
    """
    call = EvaluateCall(model, examples.on(current()), loss)
    return cast(tuple[float, float], make(call))
