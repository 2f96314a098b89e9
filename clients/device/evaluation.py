"""Test a model on a client's examples."""

from collections.abc import Sequence
from logging import WARNING
from math import isfinite, nan

import numpy as np
import torch
from flwr.common import Scalar, log
from torch import Tensor, nn

from flwr_frl.common.errors import error_line
from flwr_frl.common.run_cache import run_cache
from flwr_frl.task.base import Task
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.metrics import Metric
from flwr_frl.task.models import SplitModel
from flwr_frl.task.models.neural_collapse import neural_collapse
from flwr_frl.task.training.local_training import evaluate, evaluate_each


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
        ``accuracy``, 0 to 1, if targets are classes; in addition ``global-nc2`` and
        ``local-nc2`` (`flwr_frl.task.models.neural_collapse`) if the head is one linear
        layer; the task's custom metrics. Both NC2 and custom metrics are left out if
        they are not finite.
    """
    examples = task.resident("test", index)
    loss, metrics = measure(task, model, examples)
    if "accuracy" in metrics:
        metrics |= _collapse(task, [index], model)[0]
    return loss, len(examples), metrics


def evaluate_clients(
    task: Task, indices: Sequence[int], model: SplitModel
) -> list[tuple[float, int, dict[str, Scalar]]]:
    """Test a model on the examples of several clients, as `evaluate_model` for each.

    All examples are one batch. The task must have no custom metrics.
    """
    sets = [task.resident("test", index) for index in indices]
    tested = evaluate_each(model, sets, task.loss)
    results = [
        (loss, len(examples), _accuracy(task, examples, accuracy))
        for examples, (loss, accuracy) in zip(sets, tested, strict=True)
    ]
    scored = [pair for pair in zip(indices, results, strict=True) if pair[1][2]]
    distances = _collapse(task, [index for index, _ in scored], model)
    for (_, (_, _, metrics)), distance in zip(scored, distances, strict=True):
        metrics |= distance
    return results


def _collapse(
    task: Task, indices: Sequence[int], model: SplitModel
) -> list[dict[str, Scalar]]:
    """Return ``global-nc2`` and ``local-nc2`` of clients that have the same head."""
    metrics: list[dict[str, Scalar]] = [{} for _ in indices]
    if not indices or not isinstance(model.head, nn.Linear):
        return metrics
    # The test targets are classes; training targets may be probabilities.
    sets = [task.train_examples(index) for index in indices]
    if any(examples.targets.is_floating_point() for examples in sets):
        return metrics
    classes = torch.cat([class_mask(task, index, model.head) for index in indices])
    heads = model.head.weight.detach().expand(len(indices), -1, -1)
    for name, local in (("global-nc2", False), ("local-nc2", True)):
        values = neural_collapse(heads, classes, local).tolist()
        for of_client, value in zip(metrics, values, strict=True):
            # NC2 overflows for large weights, but the accuracy remains valid.
            if isfinite(value):
                of_client[name] = value
    return metrics


def measure(
    task: Task, model: SplitModel, examples: ExampleSet
) -> tuple[float, dict[str, Scalar]]:
    """Return a model's loss, and its accuracy and custom metrics, if any."""
    seen: list[tuple[Tensor, Tensor]] = []

    def seen_loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append((outputs, targets))
        return task.loss(outputs, targets)

    # Only calls with the same loss object can be batched across clients.
    used_loss = seen_loss if task.metrics else task.loss
    loss, accuracy = evaluate(model, examples, used_loss)
    metrics: dict[str, Scalar] = {}
    if seen:
        outputs, targets = zip(*seen, strict=True)
        pair = torch.cat(outputs).cpu(), torch.cat(targets).cpu()
        values = {n: _value(n, metric, *pair) for n, metric in task.metrics.items()}
        # A metric may be undefined for one client, such as R² of one example.
        metrics |= {name: value for name, value in values.items() if isfinite(value)}
    return loss, metrics | _accuracy(task, examples, accuracy)


def _value(name: str, metric: Metric, outputs: Tensor, targets: Tensor) -> float:
    """Return a metric's value, NaN if it is undefined for the examples."""
    try:
        return float(metric(outputs, targets))
    # `try_metrics` has reported errors that occur with any examples.
    except Exception as error:
        _report(name, error_line(error))
        return nan


@run_cache(maxsize=None)
def _report(name: str, line: str) -> None:
    """Log an error of a metric once in a run."""
    text = "metric %r has no value for clients with examples that it rejects: %s"
    log(WARNING, text, name, line)


def _accuracy(task: Task, examples: ExampleSet, value: float) -> dict[str, Scalar]:
    """Return ``accuracy``, if the targets are classes."""
    # Integer targets with one output need not be classes. With one class, every
    # prediction is correct.
    if len(examples) and len(task.classes) == 1:
        value = 1.0
    is_accuracy = isfinite(value) or (len(examples) == 0 and task.classes)
    return {"accuracy": value} if is_accuracy else {}


def class_mask(task: Task, index: int, head: nn.Linear) -> Tensor:
    """Return the mask u_i of the classes that a client trains on.

    It is boolean, of shape (1, m) for m classes, on the head's device.
    """
    mask = np.zeros((1, head.out_features), bool)
    targets = task.train_examples(index).targets.numpy()
    # Cross-entropy ignores negative targets. NumPy takes a third of torch's time.
    mask[0, targets[targets >= 0]] = True
    return torch.from_numpy(mask).to(head.weight.device)
