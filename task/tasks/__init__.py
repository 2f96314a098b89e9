"""Tasks by name, or by an import path."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from flwr_frl.task.base import ExampleTask, Task
from flwr_frl.task.data.datasets import SOURCES
from flwr_frl.task.held_out import EvaluationSettings, changed, with_evaluation
from flwr_frl.task.run_cache import TASKS_AT_A_TIME, run_cache
from flwr_frl.task.settings import (
    Setting,
    Settings,
    SettingsError,
    build,
    declared,
    is_path,
    load,
    unknown,
)
from flwr_frl.task.tasks.hub import FromHub
from flwr_frl.task.tasks.image import ImageTask
from flwr_frl.task.tasks.linear import LinearTask
from flwr_frl.task.tasks.multi_task import MultiTaskSetup
from flwr_frl.task.tasks.text import TextTask
from flwr_frl.task.tasks.transfer import TransferTask

TASKS: dict[str, Callable[..., Task]] = {
    **{name: partial(ImageTask, name) for name in SOURCES},
    "hf": FromHub(),
    "text-folder": TextTask,
    "linear": LinearTask,
    "transfer": TransferTask,
    "qcqp": partial(MultiTaskSetup, "qcqp"),
    "multi-task-logistic": partial(MultiTaskSetup, "logistic"),
}
# Tasks whose data are drawn, or come with a package.
GENERATED = ("digits", "linear", "transfer", "qcqp", "multi-task-logistic")
# Tasks whose data lie in data-dir and are never downloaded, as all others' are.
IN_FOLDERS = ("image-folder", "femnist", "arrays", "text-folder", "hf")


def task_maker(name: str) -> Callable[..., Task]:
    """Return what `build_task` calls to make a task.

    Parameters
    ----------
    name : str
        A key of `TASKS`, ``hf:`` with the name or folder of a data set of Hugging
        Face, or the import path of a function or class of one's own. It is
        called with its declared settings and, where it has such an argument, with
        ``num_clients``: how many clients share the data, 0 on a device that has its
        own as client 0. It returns a `Task`.

    Raises
    ------
    SettingsError
        If there is no such task, or it cannot be imported.
    """
    if is_path(name):
        maker = load(name, "task")
        if callable(maker):
            made: Callable[..., Task] = maker
            return made
        raise SettingsError(
            f"task {name!r} names {maker!r}; it must be a function that returns a task"
        )
    if name.startswith("hf:"):
        return FromHub(name.removeprefix("hf:"))
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    return TASKS[name]


def build_task(settings: Settings, num_clients: int) -> Task:
    """Return the task that the settings name, the same object for the same settings.

    Parameters
    ----------
    settings : mapping
        ``task``, the settings that it declares, and those of `EvaluationSettings`.
    num_clients : int
        Number of clients that share the data; 0 gives all of it to client 0.

    Returns
    -------
    Task
        The task.

    Raises
    ------
    SettingsError
        If a setting is unknown or impossible.
    """
    name = str(settings["task"])
    given = tuple((n, settings[n]) for n in _setting_names(name) if n in settings)
    return _build(name, given, num_clients)


def reads_data_dir(task: Task, name: str) -> bool:
    """Return whether the task of a name has its data from ``data-dir``."""
    idle: Mapping[str, str] = getattr(task, "unused_settings", {})
    return "data-dir" in declared(task_maker(name)) and "data-dir" not in idle


@run_cache(maxsize=16)
def _setting_names(name: str) -> list[str]:
    return sorted({*declared(task_maker(name)), *declared(EvaluationSettings)})


@run_cache(maxsize=TASKS_AT_A_TIME)
def _build(
    name: str, settings: tuple[tuple[str, Setting], ...], num_clients: int
) -> Task:
    maker, given = task_maker(name), dict[str, Any]()
    if "num_clients" in inspect.signature(maker).parameters:
        given["num_clients"] = num_clients
    taken = {setting.argument for setting in declared(maker).values()}
    for argument in inspect.signature(maker).parameters.values():
        known = argument.name in (*taken, *given, "settings")
        if (
            argument.default is argument.empty
            and not known
            and (argument.kind not in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD))
        ):
            raise SettingsError(
                f"task {name!r} needs the argument {argument.name!r}, which it does "
                "not declare as a setting"
            )
    task = build(maker, dict(settings), **given)
    # Asked of the class first: an instance would make its models for an answer.
    missing = [
        part
        for part in TASK_PARTS
        if not hasattr(type(task), part) and not hasattr(task, part)
    ]
    if missing:
        raise SettingsError(
            f"task {name!r} made a {type(task).__name__} without {missing[0]!r}; it "
            "must be a Task, for example an ExampleTask"
        )
    evaluation = build(EvaluationSettings, dict(settings))
    if isinstance(task, ExampleTask) and task.seed is None:
        # A copy: the function may return the same task for each seed, and have made
        # its models.
        task = changed(task, {"seed": evaluation.seed})
        for made in ("initial_state", "scratch_model"):
            vars(task).pop(made, None)
    return with_evaluation(task, evaluation)


# What every algorithm asks a task for.
TASK_PARTS = (
    "initial_model",
    "initial_state",
    "scratch_model",
    "train_examples",
    "test_examples",
    "loss",
    "classes",
    "metrics",
    "check",
    "read",
)
