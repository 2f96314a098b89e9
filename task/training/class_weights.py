"""Weights of classes in the training loss."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flwr_frl.common.settings import SettingsError, require
from flwr_frl.task.examples import IGNORED, ExampleSet
from flwr_frl.task.types import Task

NAME = "class-weights"
FORMS = "none, balanced or a weight of each class, separated by commas"


@dataclass(frozen=True)
class WeightedCrossEntropy:
    """Cross-entropy with weights of the classes.

    It is Σ w_y ℓ(x, y) / n over the n targets of a batch that are not ignored. Unlike
    torch's weighted mean, it does not divide by the sum of the weights, so the term of
    an example does not depend on the classes of the others.

    Parameters
    ----------
    weights : tuple of float
        The weight w_c of each class.
    """

    weights: tuple[float, ...]

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a batch."""
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        weights = torch.tensor(self.weights, dtype=outputs.dtype, device=outputs.device)
        total = nn.functional.cross_entropy(outputs, targets, weights, reduction="sum")
        return total / (targets != IGNORED).sum()


def parse(text: str) -> tuple[float, ...]:
    """Return the weights in the setting; () for ``none`` and ``balanced``.

    Raises
    ------
    SettingsError
        If the text is invalid.
    """
    if text in ("none", "balanced"):
        return ()
    try:
        weights = tuple(float(number) for number in text.split(","))
        valid = all(0 <= w < math.inf for w in weights) and any(weights)
    except ValueError:
        valid = False
    require(valid, NAME, text, FORMS)
    return weights


def weighted(text: str, task: Task, examples: ExampleSet) -> WeightedCrossEntropy:
    """Return a task's loss with the weights of the setting.

    Parameters
    ----------
    text : str
        ``balanced`` or the weights.
    task : Task
        The task.
    examples : ExampleSet
        The client's training examples.

    Raises
    ------
    SettingsError
        If the task's loss is not the cross-entropy of classes, or the number of weights
        is not the number of classes.
    """
    targets, count = examples.targets, len(task.classes or ())
    is_entropy = task.loss is nn.functional.cross_entropy
    if not (count and is_entropy and not targets.is_floating_point()):
        raise SettingsError(
            f"{NAME} is {text!r}; expected none with this task, whose loss is not the "
            "cross-entropy of classes",
            NAME,
        )
    weights = parse(text)
    if weights:
        require(
            len(weights) == count, NAME, text, f"{count} weights, one of each class"
        )
        return WeightedCrossEntropy(weights)
    counts = torch.bincount(targets[targets >= 0].flatten(), minlength=count).tolist()
    present = sum(n > 0 for n in counts)
    # The mean weight of the client's examples is 1.
    total = sum(counts)
    return WeightedCrossEntropy(
        tuple(total / (present * n) if n else 1.0 for n in counts)
    )
