"""Metrics besides loss and accuracy, by name or import path."""

import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from flwr_frl.common.errors import SettingsError, need, require, unknown
from flwr_frl.common.messages import OF_CLIENTS
from flwr_frl.common.settings import is_path, load

if TYPE_CHECKING:
    from flwr_frl.task.base import Task

# Maps all outputs and targets of a client's test examples to one number.
Metric = Callable[[Tensor, Tensor], Tensor | float]
# Keys of rounds, clients and results, which no metric of a task may use.
RESERVED = frozenset(
    (
        *("accuracy", "loss", "global-nc2", "local-nc2", "train-loss", "class-counts"),
        *("num-examples", "num-test-examples", "last-round", "evaluated-in"),
        *("round", "rounds", "seconds", "seconds-simulated", "seeds", "bits", "bytes"),
        *("clients", "asked", "rejected", "unanswered", "evaluated"),
        *("accuracy-weighted", "accuracy-global", "accuracy-newcomers"),
        *("accuracy-std-seeds", "loss-weighted", "loss-point", "lost-replies"),
        *("accuracy-worst-decile", "accuracy-best-decile"),
        *("evaluated-before", "evaluation-rejected", "evaluation-unanswered"),
        *("epsilon", "delta", "example-epsilon"),
        *("error-best", "error-phase-1", "error-scratch", "iterations"),
    )
)


def _scored(name: str, outputs: Tensor, targets: Tensor, **options: Any) -> float:
    """Return a score of scikit-learn; NaN without a target that has a class."""
    from sklearn import metrics

    # Cross-entropy ignores targets below 0.
    counted = targets >= 0
    if not counted.any():
        return math.nan
    true, predicted = targets[counted], outputs.argmax(1)[counted]
    with warnings.catch_warnings():
        # scikit-learn warns if a client has few classes, which is common here.
        warnings.simplefilter("ignore", UserWarning)
        return float(getattr(metrics, name)(true, predicted, **options))


# scikit-learn's scores: the mean recall of the classes, and the mean F1 over all true
# and predicted classes.
METRICS: Mapping[str, Metric] = {
    "balanced-accuracy": partial(_scored, "balanced_accuracy_score"),
    "macro-f1": partial(_scored, "f1_score", average="macro", zero_division=0.0),
}


def named_metrics(text: str, task: "Task") -> dict[str, Metric]:
    """Return the metrics that the setting ``metrics`` names.

    Parameters
    ----------
    text : str
        Names or import paths, separated by commas.
    task : Task
        The task; its own metrics are not among the returned ones.

    Raises
    ------
    SettingsError
        If a metric is unknown, is not callable, needs a missing package or classes that
        the task lacks, or has a reserved name.
    """
    metrics: dict[str, Metric] = {}
    for name in filter(None, (part.strip() for part in text.split(","))):
        metric = load(name, "metrics") if is_path(name) else METRICS.get(name)
        if metric is None:
            raise unknown("metric", name, METRICS, code="metrics")
        require(callable(metric), "metrics", name, "a function")
        if name in METRICS:
            need("sklearn", "simulation", f"metric {name!r}")
            allowed = "a metric of a task with classes (classes=... of an ExampleTask)"
            require(bool(task.classes), "metrics", name, allowed)
        metrics[name.rpartition(":")[2]] = metric
    check_metrics({**task.metrics, **metrics})
    return metrics


def check_metrics(metrics: Mapping[str, Metric]) -> None:
    """Raise `SettingsError` unless metrics have names, none of them reserved."""
    for name in metrics:
        text = str(name)
        reserved = text in RESERVED or text.startswith("bytes-")
        if not name or reserved or text.endswith(OF_CLIENTS) or text != name:
            raise SettingsError(
                f"a metric is called {name!r}; expected a text that is no reserved name"
            )
