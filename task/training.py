"""Local training of a named part of a split model, and its evaluation.

`train` is made of pieces that a client with a step of its own uses by themselves:
`freeze`, `loop` and the hyper-parameters `SGD`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from task.examples import ExampleSet
from task.models import Part, SplitModel
from task.settings import Checked, Free, Range, SettingsError

Loss = Callable[[Tensor, Tensor], Tensor]
# Called with a batch's features and the model; its value is added to the loss.
Regularizer = Callable[[Tensor, SplitModel], Tensor]
# Called with a batch's inputs and targets; learns from them and returns their loss.
Step = Callable[[Tensor, Tensor], Tensor]

EVALUATION_BATCH = 50


class TrainingDivergedError(ArithmeticError):
    """The loss is no longer a finite number."""


@dataclass(frozen=True)
class SGD(Checked):
    """Stochastic gradient descent as the authors of FedRep and FLUTE run it.

    Parameters
    ----------
    learning_rate : float, default 0.01
        Step size η.
    momentum : float, default 0.5
        Momentum β; its buffers start anew in every call of `train`.
    weight_decay : float, default 1e-4
        Weight decay of weights. Biases have none.
    batch_size : int, default 10
        Examples a step.
    bfloat16 : bool, default False
        Whether the forward pass runs in bfloat16 where torch's autocast does so.
    """

    learning_rate: Annotated[float, Range("(0, inf)")] = 0.01
    momentum: Annotated[float, Range("[0, 1)")] = 0.5
    weight_decay: Annotated[float, Range("[0, inf)")] = 1e-4
    batch_size: Annotated[int, Range("[1, inf)")] = 10
    bfloat16: Annotated[bool, Free()] = False

    def autocast(self) -> torch.autocast:
        """Return the context in which a forward pass runs."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self.bfloat16)

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """Return SGD of a module's parameters alone, with decay of weights only."""
        named = list(module.named_parameters())
        # Recurrent layers have names like bias_ih_l0.
        is_bias = [name.rpartition(".")[2].startswith("bias") for name, _ in named]
        weights = [p for (_, p), bias in zip(named, is_bias, strict=True) if not bias]
        biases = [p for (_, p), bias in zip(named, is_bias, strict=True) if bias]
        return torch.optim.SGD(
            [
                {"params": weights, "weight_decay": self.weight_decay},
                {"params": biases, "weight_decay": 0.0},
            ],
            lr=self.learning_rate,
            momentum=self.momentum,
            fused=True,
        )


def freeze(model: SplitModel, part: Part) -> nn.Module:
    """Let a part of a model learn, and nothing else; return the part.

    What is frozen needs no gradients, and its batch norms keep their statistics.

    Parameters
    ----------
    model : SplitModel
        Put into training mode.
    part : {"head", "representation", "all"}
        What learns.
    """
    module = model.part(part)
    model.requires_grad_(False)
    module.requires_grad_(True)
    model.train()
    for frozen in model.modules():
        if isinstance(frozen, _BatchNorm) and frozen not in set(module.modules()):
            frozen.eval()
    return module


def loop(step: Step, examples: ExampleSet, epochs: int, sgd: SGD) -> float:
    """Make a step with every batch of every epoch.

    Parameters
    ----------
    step : callable
        Of a batch's inputs and targets; returns the batch's mean loss.
    examples : ExampleSet
        Shuffled, and augmented where asked for, in each epoch.
    epochs : int
        Passes over the examples; 0 does nothing.
    sgd : SGD
        Its batch size counts.

    Returns
    -------
    float
        Mean loss over the last epoch; 0 without epochs.

    Raises
    ------
    TrainingDivergedError
        If the loss is no longer finite.
    SettingsError
        If the last batch is one example, and the model cannot train on that.
    """
    mean = 0.0
    for epoch in range(epochs):
        total = torch.zeros(())
        for inputs, targets in examples.batches(sgd.batch_size, shuffle=True):
            try:
                total += step(inputs, targets) * len(targets)
            except ValueError as error:
                if "more than 1 value per channel" not in str(error):
                    raise
                raise SettingsError(
                    f"batch-size {sgd.batch_size} leaves one of {len(examples)} "
                    "examples alone, which this model's batch norms cannot train on; "
                    "another batch-size does not, or larger images"
                ) from None
        mean = total.item() / len(examples)
        if not torch.isfinite(total):
            raise TrainingDivergedError(
                f"the loss is {mean} after epoch {epoch + 1} of local training with "
                f"learning-rate {sgd.learning_rate}; a smaller one may help"
            )
    return mean


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
    augmentation, no dropout), its features are computed once for all epochs.

    Parameters
    ----------
    model : SplitModel
        Changed in place: the named part only, to the last bit.
    part : {"head", "representation", "all"}
        What is trained.
    examples : ExampleSet
        The client's training examples.
    loss : callable
        Of a batch's outputs and targets; the mean over the batch.
    epochs : int
        Passes over the examples; 0 does nothing.
    sgd : SGD
        The hyper-parameters.
    regularizer : callable, optional
        Of a batch's features and the model; added to the loss.
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
    module = freeze(model, part)
    forward: nn.Module = model.representation
    if part == "head" and not examples.augment and not _is_random(forward):
        examples = ExampleSet(*_features(model, examples, sgd))
        forward = nn.Identity()
    optimizer = sgd.optimizer(module)
    added = [
        (parameter, correction[name])
        for name, parameter in model.named_parameters()
        if correction and name in correction and parameter.requires_grad
    ]

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        with sgd.autocast():
            features = forward(inputs)
            value = loss(model.head(features), targets)
            objective = value
            if regularizer is not None:
                objective = value + regularizer(features, model)
        if objective.requires_grad:  # A representation may have no parameters.
            objective.backward()  # type: ignore[no-untyped-call]
        for parameter, term in added:
            if parameter.grad is not None:
                parameter.grad += term
        optimizer.step()
        return value.detach()

    return loop(step, examples, epochs, sgd)


def proximal(weight: float, anchor: Mapping[str, Tensor]) -> Regularizer:
    """Return the regularizer weight/2 ‖w − anchor‖² of a model's parameters w.

    Parameters
    ----------
    weight : float
        μ of FedProx, λ of Ditto.
    anchor : mapping of str to Tensor
        Parameters by name; those that the model alone has are left free.
    """

    def penalty(features: Tensor, model: SplitModel) -> Tensor:
        distances = [
            (parameter - anchor[name]).square().sum()
            for name, parameter in model.named_parameters()
            if name in anchor and parameter.requires_grad
        ]
        return (
            weight / 2 * torch.stack(distances).sum()
            if distances
            else torch.tensor(0.0)
        )

    return penalty


def _is_random(module: nn.Module) -> bool:
    # torchvision's StochasticDepth is no dropout, and torchvision may be missing.
    # Recurrent and attention layers have a dropout of their own.
    return any(
        (isinstance(m, _DropoutNd) or type(m).__name__ == "StochasticDepth")
        and float(getattr(m, "p", 0)) > 0
        for m in module.modules()
    ) or any(
        isinstance(m, nn.RNNBase | nn.MultiheadAttention) and m.dropout > 0
        for m in module.modules()
    )


@torch.no_grad()
def _features(
    model: SplitModel, examples: ExampleSet, sgd: SGD
) -> tuple[Tensor, Tensor]:
    features, targets = [], []
    with sgd.autocast():
        for inputs, target in examples.batches(EVALUATION_BATCH):
            features.append(model.representation(inputs).float())
            targets.append(target)
    return torch.cat(features), torch.cat(targets)


@torch.no_grad()
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
        classes, and without examples.
    """
    model.eval()
    total, right = 0.0, 0
    for inputs, targets in examples.batches(EVALUATION_BATCH):
        outputs = model(inputs)
        total += loss(outputs, targets).item() * len(targets)
        if not targets.is_floating_point():
            right += int((outputs.argmax(1) == targets).sum())
    n = len(examples)
    if n == 0:
        return float("nan"), float("nan")
    # A sequence has a target at every place.
    targets = examples.targets
    share = float("nan") if targets.is_floating_point() else right / targets.numel()
    return total / n, share
