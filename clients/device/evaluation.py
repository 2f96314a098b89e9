"""Tests of a model on a client's examples."""

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
        Task.
    index : int
        Index of the client.
    model : SplitModel
        Model to test.

    Returns
    -------
    loss : float
        Mean loss.
    num_examples : int
        Number of test examples.
    metrics : dict
        ``accuracy``, 0 to 1, if targets are classes; ``global-nc2`` and ``local-nc2``
        (`flwr_frl.task.models.neural_collapse`) if the head is also linear; the task's
        custom metrics.
    """
    examples = test_examples(task, index)
    loss, metrics = measure(task, model, examples)
    if "accuracy" in metrics and isinstance(model.head, nn.Linear):
        classes = class_mask(task, index, model.head)
        weight = model.head.weight.detach()[None]
        for name, local in (("global-nc2", False), ("local-nc2", True)):
            value = neural_collapse(weight, classes, local).item()
            # Large weights overflow it; the accuracy is valid all the same.
            if isfinite(value):
                metrics[name] = value
    return loss, len(examples), metrics


def measure(
    task: Task, model: SplitModel, examples: ExampleSet
) -> tuple[float, dict[str, Scalar]]:
    """Return a model's loss, and its accuracy and custom metrics, if any."""
    seen: list[tuple[Tensor, Tensor]] = []

    def seen_loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append((outputs, targets))
        return task.loss(outputs, targets)

    # Only calls with the same loss object can be batched across clients.
    loss, accuracy = evaluate(model, examples, seen_loss if task.metrics else task.loss)
    metrics: dict[str, Scalar] = {}
    if seen:
        pairs = [torch.cat(parts).cpu() for parts in zip(*seen, strict=True)]
        values = {name: number(name, of(*pairs)) for name, of in task.metrics.items()}
        # A metric may be undefined for one client, such as R² of one example.
        metrics |= {name: value for name, value in values.items() if isfinite(value)}
    # Integer targets with one output need not be classes. With one class, every
    # prediction is correct.
    if len(examples) and len(task.classes) == 1:
        accuracy = 1.0
    if isfinite(accuracy) or (len(examples) == 0 and task.classes):
        metrics["accuracy"] = accuracy
    return loss, metrics


def class_mask(task: Task, index: int, head: nn.Linear) -> Tensor:
    """Return the mask u_i of the classes that a client trains on.

    It is boolean, of shape (1, m) for m classes, on the head's device.
    """
    mask = torch.zeros(1, head.out_features, dtype=torch.bool)
    targets = task.train_examples(index).targets
    # Cross-entropy ignores negative targets.
    mask[0, targets[targets >= 0]] = True
    return mask.to(head.weight.device)
