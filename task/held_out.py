"""Validation sets."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from flwr_frl.common.errors import require
from flwr_frl.common.settings import Checked, setting
from flwr_frl.task.base import Task
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.metrics import named_metrics

# Number of clients whose splits are cached; the most recent ones.
CACHED_CLIENTS = 32
# Distinguishes these random draws from others with the same seed.
VALIDATION = 0x7A11D


@dataclass(frozen=True)
class EvaluationSettings(Checked):
    """The examples and metrics of every evaluation.

    Parameters
    ----------
    validation_fraction : float, default 0
        Share of each client's training examples that forms its validation set and is
        not trained on, drawn from seed and client. If examples are overlapping windows
        of a text, the last ones form the validation set.
    evaluate_on : {"test", "validation"}, default "test"
        Examples of every evaluation: each client's test set, or its validation set, so
        that no choice depends on the test set.
    metrics : str, default ""
        Metrics besides loss and accuracy, separated by commas: scikit-learn's
        ``balanced-accuracy`` and ``macro-f1`` if the task names its classes, and import
        paths ``package.module:function`` of functions that map all outputs and targets
        of a client to a number.
    seed : int, default 0
        Determines the validation sets that are drawn.
    """

    validation_fraction: float = setting(0.0, ge=0, lt=1)
    evaluate_on: Literal["test", "validation"] = setting("test")
    metrics: str = setting(
        "",
        form="names or import paths, with commas between",
        code=True,
        may_differ="on resume",
    )
    seed: int = setting(0, ge=0)

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        allowed = "test, unless validation-fraction is above 0"
        valid = self.evaluate_on == "test" or self.validation_fraction > 0
        require(valid, "evaluate-on", self.evaluate_on, allowed)


def with_evaluation(task: Task, settings: EvaluationSettings) -> Task:
    """Return a task with the settings' validation sets and metrics.

    Without any, this is the same object.
    """
    named = named_metrics(settings.metrics, task)
    if not settings.validation_fraction and not named:
        return task

    @lru_cache(maxsize=CACHED_CLIENTS)
    def parts(client: int) -> tuple[ExampleSet, ExampleSet]:
        return split(task.train_examples(client), client, settings, task.overlap)

    changes: dict[str, Any] = {"metrics": {**task.metrics, **named}}
    if settings.validation_fraction:
        changes |= {"train_examples": lambda i: parts(i)[0], "held_out": True}
    if settings.evaluate_on == "validation":
        changes["test_examples"] = lambda i: parts(i)[1]
    return changed(task, changes)


def split(
    examples: ExampleSet, client: int, settings: EvaluationSettings, overlap: int = 0
) -> tuple[ExampleSet, ExampleSet]:
    """Split training examples into a training and a validation set.

    Parameters
    ----------
    examples : ExampleSet
        A client's training examples.
    client : int
        Index of the client, from 0.
    settings : EvaluationSettings
        The validation fraction and the seed.
    overlap : int, default 0
        Number of successors with which an example overlaps, as windows of a text do.
        If above 0, the last examples form the validation set, and the ``overlap``
        examples before them are in neither set.

    Returns
    -------
    train, validation : ExampleSet
        In their original order.

    Raises
    ------
    SettingsError
        If either set is empty.
    """
    n, fraction = len(examples), settings.validation_fraction
    count = int(n * fraction + 0.5)
    kept = n - count - (overlap if count else 0)
    allowed = f"a fraction of client {client}'s {n} training examples that leaves one "
    allowed += "to train on, and one to validate on"
    require(count >= 1 and kept >= 1, "validation-fraction", fraction, allowed)
    order = np.arange(n)
    if not overlap:
        rng = np.random.default_rng([settings.seed, client, VALIDATION])
        order = rng.permutation(n)
    train = examples.subset(np.sort(order[:kept]))
    return train, examples.subset(np.sort(order[n - count :])).without_augmentation()


def changed(task: Task, attributes: Mapping[str, Any]) -> Task:
    """Return a copy of a task with some attributes replaced, which is not tried yet."""
    twin = copy.copy(task)
    vars(twin).pop("accepted_forms", None)
    if not attributes.keys().isdisjoint(("initial_model", "seed")):
        twin.forget_model()
    for name, value in attributes.items():
        # Also in a frozen dataclass; a property of a user's class raises an error.
        object.__setattr__(twin, name, value)
    return twin
