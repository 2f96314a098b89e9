"""Local training of a named part of a split model, and its evaluation."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from task.examples import ExampleSet
from task.models import Part, SplitModel
from task.settings import Settings, require

Loss = Callable[[Tensor, Tensor], Tensor]
# Called with a batch's features and the model; its value is added to the loss.
Regularizer = Callable[[Tensor, SplitModel], Tensor]

EVALUATION_BATCH = 50


class TrainingDivergedError(ArithmeticError):
    """The loss is no longer a finite number."""


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent as the authors of FedRep and FLUTE run it.

    Parameters
    ----------
    learning_rate : float, default 0.01
        Step size.
    momentum : float, default 0.5
        Momentum, in [0, 1); its buffers start anew in every call of `train`.
    weight_decay : float, default 1e-4
        Weight decay of weights. Biases have none.
    batch_size : int, default 10
        Examples a step.
    bfloat16 : bool, default False
        Whether the forward pass runs in bfloat16 where torch's autocast does so.
    """

    learning_rate: float = 0.01
    momentum: float = 0.5
    weight_decay: float = 1e-4
    batch_size: int = 10
    bfloat16: bool = False

    def __post_init__(self) -> None:
        finite = 0 < self.learning_rate < float("inf")
        require(finite, "learning-rate", self.learning_rate, "above 0 and finite")
        require(0 <= self.momentum < 1, "momentum", self.momentum, "in [0, 1)")
        finite = 0 <= self.weight_decay < float("inf")
        require(finite, "weight-decay", self.weight_decay, "at least 0 and finite")
        require(self.batch_size >= 1, "batch-size", self.batch_size, "at least 1")

    @classmethod
    def from_settings(cls, settings: Settings) -> "SGD":
        """Return the SGD of ``learning-rate``, ``momentum`` and so on.

        Parameters
        ----------
        settings : mapping
            All settings.

        Returns
        -------
        SGD
            The hyper-parameters.
        """
        return cls(
            learning_rate=float(settings["learning-rate"]),
            momentum=float(settings["momentum"]),
            weight_decay=float(settings["weight-decay"]),
            batch_size=int(settings["batch-size"]),
            bfloat16=bool(settings["bfloat16"]),
        )

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """Return an optimizer of a module's parameters, and of nothing else.

        Parameters
        ----------
        module : nn.Module
            The part to train.

        Returns
        -------
        torch.optim.Optimizer
            SGD with weight decay on weights only.
        """
        named = list(module.named_parameters())
        weights = [p for name, p in named if not name.endswith("bias")]
        biases = [p for name, p in named if name.endswith("bias")]
        return torch.optim.SGD(
            [
                {"params": weights, "weight_decay": self.weight_decay},
                {"params": biases, "weight_decay": 0.0},
            ],
            lr=self.learning_rate,
            momentum=self.momentum,
            fused=True,
        )


def train(
    model: SplitModel,
    part: Part,
    examples: ExampleSet,
    loss: Loss,
    epochs: int,
    sgd: SGD,
    regularizer: Regularizer | None = None,
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

    Returns
    -------
    float
        Mean loss over the last epoch, without the regularizer; 0 without epochs.

    Raises
    ------
    TrainingDivergedError
        If the loss is no longer finite.
    """
    module = model.part(part)
    model.requires_grad_(False)
    module.requires_grad_(True)
    model.train()
    for frozen in model.modules():
        # A frozen batch norm must not move its running statistics either.
        if isinstance(frozen, _BatchNorm) and frozen not in set(module.modules()):
            frozen.eval()
    if part == "head" and not examples.augment and not _is_random(model.representation):
        features, targets = _features(model, examples, sgd)
        examples = ExampleSet(features, targets)
        forward: nn.Module = nn.Identity()
    else:
        forward = model.representation
    optimizer = sgd.optimizer(module)
    mean = 0.0
    for epoch in range(epochs):
        total = torch.zeros(())
        for inputs, targets in examples.batches(sgd.batch_size, shuffle=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=sgd.bfloat16):
                features = forward(inputs)
                value = loss(model.head(features), targets)
                objective = value
                if regularizer is not None:
                    objective = value + regularizer(features, model)
            objective.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += value.detach() * len(targets)
        mean = total.item() / len(examples)
        if not torch.isfinite(total):
            raise TrainingDivergedError(
                f"the loss is {mean} after epoch {epoch + 1} of training the {part} "
                f"with learning-rate {sgd.learning_rate}; a smaller one may help"
            )
    return mean


def _is_random(module: nn.Module) -> bool:
    return any(
        # torchvision's StochasticDepth is no dropout, and torchvision may be missing.
        (isinstance(m, _DropoutNd) or type(m).__name__ == "StochasticDepth")
        and float(getattr(m, "p", 0)) > 0
        for m in module.modules()
    )


@torch.no_grad()
def _features(
    model: SplitModel, examples: ExampleSet, sgd: SGD
) -> tuple[Tensor, Tensor]:
    features, targets = [], []
    with torch.autocast("cpu", torch.bfloat16, enabled=sgd.bfloat16):
        for inputs, target in examples.batches(EVALUATION_BATCH):
            features.append(model.representation(inputs).float())
            targets.append(target)
    return torch.cat(features), torch.cat(targets)


@torch.no_grad()
def evaluate(
    model: SplitModel, examples: ExampleSet, loss: Loss
) -> tuple[float, float]:
    """Evaluate a model on a client's examples.

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
        Mean loss over the examples.
    accuracy : float
        Share of examples whose largest output is the target, 0 to 1; for targets that
        are no classes, NaN. Both are NaN without examples.
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
    accuracy = float("nan") if examples.targets.is_floating_point() else right / n
    return total / n, accuracy
