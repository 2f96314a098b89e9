"""Tests of a model on a client's own examples."""

from math import isfinite

import torch
from flwr.common import Scalar
from torch import Tensor, nn

from flwr_frl.task.base import Task
from flwr_frl.task.checks import number
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import SplitModel
from flwr_frl.task.models.neural_collapse import neural_collapse
from flwr_frl.task.resident import test_examples
from flwr_frl.task.training import evaluate


def evaluate_model(
    task: Task, index: int, model: SplitModel
) -> tuple[float, int, dict[str, Scalar]]:
    """Test a model on a client's test examples.

    Parameters
    ----------
    task : Task
        The task.
    index : int
        The client.
    model : SplitModel
        The model.

    Returns
    -------
    loss : float
        Mean loss.
    num_examples : int
        Number of test examples.
    metrics : dict
        ``accuracy``, 0 to 1, where targets are classes; ``global-nc2`` and
        ``local-nc2`` (`flwr_frl.task.models.neural_collapse`) where the head is linear
        besides; the task's own.
    """
    examples = test_examples(task, index)
    loss, metrics = measure(task, model, examples)
    if "accuracy" in metrics and isinstance(model.head, nn.Linear):
        classes = class_mask(task, index, model.head)
        weight = model.head.weight.detach()[None]
        for name, local in (("global-nc2", False), ("local-nc2", True)):
            value = neural_collapse(weight, classes, local).item()
            # Weights may be so large that it is none; the accuracy counts even so.
            if isfinite(value):
                metrics[name] = value
    return loss, len(examples), metrics


def measure(
    task: Task, model: SplitModel, examples: ExampleSet
) -> tuple[float, dict[str, Scalar]]:
    """Return a model's loss, and its accuracy and the task's own metrics, if any."""
    seen: list[tuple[Tensor, Tensor]] = []

    def seen_loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append((outputs, targets))
        return task.loss(outputs, targets)

    # Tests with a loss that is the same object can be made together.
    loss, accuracy = evaluate(model, examples, seen_loss if task.metrics else task.loss)
    metrics: dict[str, Scalar] = {}
    if seen:
        whole = [torch.cat(parts).cpu() for parts in zip(*seen, strict=True)]
        own = {name: number(name, of(*whole)) for name, of in task.metrics.items()}
        # What has no value here, R² of one example say, counts where it has one.
        metrics |= {name: value for name, value in own.items() if isfinite(value)}
    # Counts and yes or no are integers, too, with one output and no classes. Where
    # there is but one class, all are of it.
    if len(examples) and len(task.classes) == 1:
        accuracy = 1.0
    if isfinite(accuracy) or (len(examples) == 0 and task.classes):
        metrics["accuracy"] = accuracy
    return loss, metrics


def class_mask(task: Task, index: int, head: nn.Linear) -> Tensor:
    """Return which of the head's m classes a client trains on: u_i, bool (1, m).

    It is on the head's device.
    """
    mask = torch.zeros(1, head.out_features, dtype=torch.bool)
    targets = task.train_examples(index).targets
    # What cross-entropy ignores is of no class.
    mask[0, targets[targets >= 0]] = True
    return mask.to(head.weight.device)
