"""What of a client's training examples does not train: a validation set, and more."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch

from flwr_frl.task.base import Metric, Task
from flwr_frl.task.calls import EVALUATION_BATCH
from flwr_frl.task.checks import try_batch
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.metrics import named_metrics
from flwr_frl.task.settings import Checked, Choice, Free, Range, Seed, SettingsError

# Of the clients that were here last, as a task of images remembers them.
REMEMBERED = 32
# Tells these draws from others of the same seed.
VALIDATION, FEWER = 0x7A11D, 0xFE3E5


@dataclass(frozen=True)
class EvaluationSettings(Checked):
    """What a client's model is tested on, and what is measured.

    Parameters
    ----------
    validation_fraction : float, default 0
        Share of each client's training examples that it does not train on, drawn by
        seed and client: its validation set.
    evaluate_on : {"test", "validation"}, default "test"
        The examples of every evaluation: a client's test set, or with
        ``validation-fraction`` its validation set, so that no choice sees the test set.
    metrics : str, default ""
        What is measured besides loss and accuracy, with commas between:
        ``balanced-accuracy`` and ``macro-f1`` (scikit-learn's) where the task names its
        classes, and import paths ``package.module:function`` of functions of all
        outputs and targets of a client that return a number.
    seed : int, default 0
        Fixes who is in the validation sets.
    """

    validation_fraction: Annotated[float, Range("[0, 1)")] = 0.0
    evaluate_on: Annotated[str, Choice("test", "validation")] = "test"
    metrics: Annotated[str, Free("names or import paths, with commas between")] = ""
    seed: Annotated[int, Seed] = 0

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if self.evaluate_on == "validation" and not self.validation_fraction:
            raise SettingsError(
                "evaluate-on is 'validation'; it must be test unless "
                "validation-fraction is above 0"
            )


def examined(task: Task, settings: EvaluationSettings) -> Task:
    """Return a task with the settings' validation sets and metrics.

    Without any it is the same object.
    """
    named = named_metrics(settings.metrics, task)
    if not settings.validation_fraction and not named:
        return task

    @lru_cache(maxsize=REMEMBERED)
    def parts(client: int) -> tuple[ExampleSet, ExampleSet]:
        overlap = int(getattr(task, "overlap", 0))
        return split(task.train_examples(client), client, settings, overlap)

    own: dict[str, Any] = {}
    if settings.validation_fraction:
        own = {"train_examples": lambda client: parts(client)[0], "held_out": True}
    if settings.evaluate_on == "validation":
        own["test_examples"] = lambda client: parts(client)[1]
    twin = changed(task, {**own, "metrics": {**task.metrics, **named}})

    def check(client: int) -> None:
        task.check(client)
        if settings.validation_fraction:
            parts(client)
        tested = twin.test_examples(client)
        if named and len(tested) > 0:
            try_batch(twin, next(tested.batches(EVALUATION_BATCH)))

    return changed(twin, {"check": check})


def split(
    examples: ExampleSet, client: int, settings: EvaluationSettings, overlap: int = 0
) -> tuple[ExampleSet, ExampleSet]:
    """Split training examples into those that train and those that validate.

    Parameters
    ----------
    examples : ExampleSet
        A client's training examples.
    client : int
        The client, from 0.
    settings : EvaluationSettings
        The share, and the seed.
    overlap : int, default 0
        How many of its successors an example has parts in common with, as windows of a
        text have. If any, the last examples validate, and so many before them are in
        neither set.

    Returns
    -------
    train, validation : ExampleSet
        In their former order.

    Raises
    ------
    SettingsError
        If there is nothing to train or nothing to validate on.
    """
    n, fraction = len(examples), settings.validation_fraction
    count = int(n * fraction + 0.5)
    kept = n - count - (overlap if count else 0)
    if count < 1 or kept < 1:
        raise SettingsError(
            f"validation-fraction is {fraction}: of client {client}'s {n} training "
            f"examples it leaves {max(kept, 0)} to train on and {count} to validate "
            "on; it must leave at least 1 of each"
        )
    if overlap:
        order = np.arange(n)
    else:
        order = np.random.default_rng([settings.seed, client, VALIDATION]).permutation(
            n
        )
    train, validation = np.sort(order[:kept]), np.sort(order[n - count :])
    return chosen(examples, train), chosen(examples, validation).without_augmentation()


def fewer(task: Task, client: int, share: float, seed: int) -> Task:
    """Return a task in which a client has only a share of its training examples.

    At least one is left. Which ones follows from seed and client; a smaller share is a
    part of a larger one.
    """
    if share >= 1:
        return task
    examples = task.train_examples(client)
    n = len(examples)
    order = np.random.default_rng([seed, client, FEWER]).permutation(n)
    few = chosen(examples, np.sort(order[: max(1, int(n * share + 0.5))]))
    return changed(task, {"train_examples": lambda other: few})


def chosen(examples: ExampleSet, which: npt.NDArray[np.int64]) -> ExampleSet:
    """Return those examples whose numbers are given; no input is copied."""
    at = torch.from_numpy(which)
    rows = at if examples.rows is None else examples.rows[at]
    return replace(examples, targets=examples.targets[at], rows=rows)


def changed(task: Task, attributes: Mapping[str, Any]) -> Task:
    """Return a copy of a task with some attributes of its own."""
    twin = copy.copy(task)
    vars(twin).update(attributes)
    for name, value in attributes.items():
        # A property of somebody's own class would go before it.
        if getattr(twin, name) is not value:
            raise SettingsError(
                f"{type(task).__name__}.{name} is a property; it must be a method or "
                "an attribute where validation-fraction, metrics or new-clients is set"
            )
    return twin


__all__ = [
    "EvaluationSettings",
    "Metric",
    "changed",
    "chosen",
    "examined",
    "fewer",
    "split",
]
