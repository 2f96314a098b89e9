"""Validation sets, subsets of training examples, and metrics by name."""

import pytest
import torch
from refusals import assert_says, code_of
from torch import nn

from flwr_frl.task.base import ExampleTask
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.held_out import EvaluationSettings, split, with_evaluation
from flwr_frl.task.metrics import METRICS
from flwr_frl.task.models import SplitModel


def examples(n: int, **more) -> ExampleSet:
    """Return examples whose inputs and targets are their index."""
    return ExampleSet(torch.arange(n).float()[:, None], torch.arange(n), **more)


def numbers(found: ExampleSet) -> list[int]:
    """Return the indices of examples, checking that inputs and targets agree."""
    inputs, targets = next(found.batches(1000))
    assert inputs[:, 0].tolist() == targets.tolist()
    return targets.tolist()


def task_of(*sizes: int, **more) -> ExampleTask:
    return ExampleTask(
        lambda: SplitModel(nn.Identity(), nn.Linear(1, 10)),
        [examples(n) for n in sizes],
        [examples(2) for _ in sizes],
        classes=tuple("abcdefghij"),
        **more,
    )


def test_split_is_a_partition():
    settings = EvaluationSettings(validation_fraction=0.3, seed=4)
    train, validation = split(examples(10), 2, settings)
    assert (len(train), len(validation)) == (7, 3)
    assert sorted(numbers(train) + numbers(validation)) == list(range(10))
    # The split is determined by the seed and the client.
    again = split(examples(10), 2, settings)
    assert [numbers(part) for part in again] == [numbers(train), numbers(validation)]
    parts = [split(examples(10), client, settings)[1] for client in range(8)]
    assert len({tuple(numbers(part)) for part in parts}) > 4
    other = EvaluationSettings(validation_fraction=0.3, seed=5)
    assert numbers(split(examples(10), 2, other)[1]) != numbers(validation)


def test_rows_of_larger_inputs_and_no_augmentation():
    rows = torch.tensor([9, 3, 5, 7])
    data = ExampleSet(torch.arange(10).float()[:, None], rows, rows=rows)
    settings = EvaluationSettings(validation_fraction=0.5)
    train, validation = split(data, 0, settings)
    assert sorted(numbers(train) + numbers(validation)) == [3, 5, 7, 9]
    assert train.inputs is data.inputs
    images = ExampleSet(torch.zeros(4, 2, 2, 1), torch.arange(4), augment=True)
    assert [part.augment for part in split(images, 0, settings)] == [True, False]


def test_last_of_overlapping_examples_validate():
    settings = EvaluationSettings(validation_fraction=0.2)
    train, validation = split(examples(10), 0, settings, overlap=3)
    # Two examples validate; the three before them overlap with these and are dropped.
    assert numbers(validation) == [8, 9]
    assert numbers(train) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("n", "fraction"), [(2, 0.2), (4, 0.9)])
def test_an_empty_part_of_a_split_is_an_error(n, fraction):
    settings = EvaluationSettings(validation_fraction=fraction)
    task = with_evaluation(task_of(10, n), settings)
    task.check(0)
    assert_says(f"client 1's {n} training examples", task.check, 1)


def test_task_with_a_validation_fraction():
    task = task_of(10)
    assert with_evaluation(task, EvaluationSettings()) is task
    on_test = with_evaluation(task, EvaluationSettings(validation_fraction=0.4))
    assert len(on_test.train_examples(0)) == 6
    assert numbers(on_test.test_examples(0)) == [0, 1]
    settings = EvaluationSettings(validation_fraction=0.4, evaluate_on="validation")
    validated = with_evaluation(task, settings)
    assert numbers(validated.train_examples(0)) == numbers(on_test.train_examples(0))
    both = validated.train_examples(0), validated.test_examples(0)
    assert sorted(numbers(both[0]) + numbers(both[1])) == list(range(10))
    # The original task is unchanged.
    assert len(task.train_examples(0)) == 10
    assert code_of(EvaluationSettings, evaluate_on="validation") == "evaluate-on"


def test_balanced_accuracy_and_macro_f1():
    # Class 0: 2 of 3 are found; class 1: 1 of 1; class 2 is predicted once, but absent.
    outputs = torch.eye(3)[[0, 0, 2, 1]]
    targets = torch.tensor([0, 0, 0, 1])
    assert METRICS["balanced-accuracy"](outputs, targets) == pytest.approx(5 / 6)
    # F1 of class 0: 2·2/(2·2 + 0 + 1) = 0.8; of class 1: 1; of class 2: 0.
    assert METRICS["macro-f1"](outputs, targets) == pytest.approx(1.8 / 3)
    # Targets that cross-entropy ignores do not count.
    ignored = torch.cat([targets, torch.tensor([-100])])
    accuracy = METRICS["balanced-accuracy"](torch.eye(3)[[0, 0, 2, 1, 1]], ignored)
    assert accuracy == pytest.approx(5 / 6)


def mean_output(outputs, targets):
    return outputs.mean()


def test_metrics_by_name_and_by_path():
    settings = EvaluationSettings(metrics=f"macro-f1, {__name__}:mean_output")
    task = with_evaluation(task_of(3, metrics={"own": mean_output}), settings)
    assert list(task.metrics) == ["own", "macro-f1", "mean_output"]
    task.check(0)


def nothing(outputs, targets):
    return None


@pytest.mark.parametrize(
    ("metrics", "classes", "line"),
    [
        ("macro-f2", "abc", "unknown metric 'macro-f2'"),
        ("nowhere:metric", "abc", "metrics 'nowhere:metric' cannot be imported"),
        ("flwr_frl.task.metrics:METRICS", "abc", "expected a function"),
        ("macro-f1", "", "a task with classes"),
        (f"{__name__}:nothing", "abc", "metric 'nothing' fails: float() argument"),
    ],
)
def test_invalid_metrics_are_an_error(metrics, classes, line):
    task = task_of(3)
    object.__setattr__(task, "classes", tuple(classes))
    settings = EvaluationSettings(metrics=metrics)
    assert_says(line, lambda: with_evaluation(task, settings).check(0))
