"""Tasks by name or import path."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from flwr_frl.common.errors import require, unknown
from flwr_frl.common.run_cache import TASKS_AT_A_TIME, run_cache
from flwr_frl.common.settings import (
    Setting,
    Settings,
    build,
    declared,
    is_path,
    load,
    made_by,
)
from flwr_frl.task.base import BaseTask, ExampleTask, Task
from flwr_frl.task.data.datasets import SOURCES
from flwr_frl.task.devices import seeded
from flwr_frl.task.held_out import EvaluationSettings, changed, with_evaluation
from flwr_frl.task.models.adapters import AdapterSettings, with_adapters
from flwr_frl.task.tasks.image import ImageTask
from flwr_frl.task.tasks.linear import FromLinearTable, LinearTask, TransferTask
from flwr_frl.task.tasks.multi_task import MultiTaskSetup
from flwr_frl.task.tasks.table import FromTable
from flwr_frl.task.tasks.text import TextTask, TransformerText

# The name of a task, and the settings that it reads with their values.
TaskKey = tuple[str, tuple[tuple[str, Setting], ...]]

# The functions that make the tasks, by the names in `flwr_frl.task.names`.
TASKS: dict[str, Callable[..., Task]] = {
    **{name: partial(ImageTask, name) for name in SOURCES},
    "table": FromTable(),
    "text-folder": TextTask,
    "hf-text": partial(TransformerText, ""),
    "linear": LinearTask,
    "linear-table": FromLinearTable(),
    "transfer": TransferTask,
    "qcqp": partial(MultiTaskSetup, "qcqp"),
    "multi-task-logistic": partial(MultiTaskSetup, "logistic"),
}


def task_maker(name: str) -> Callable[..., Task]:
    """Return the function or class that makes a task.

    Parameters
    ----------
    name : str
        A key of `TASKS`, ``hf:`` followed by the name of a Hugging Face data set,
        ``hf-text:`` followed by that of a transformer, or the import path of a
        function or class.

    Returns
    -------
    callable
        Returns a `Task`. Its arguments are its declared settings and, optionally,
        ``num_clients``: the number of clients that share the data, or 0 on a device
        that uses its own data as client 0.

    Raises
    ------
    SettingsError
        If there is no such task, or it cannot be imported.
    """
    if is_path(name):
        maker: Callable[..., Task] = load(name, "task")
        require(callable(maker), "task", name, "a function that returns a task")
        return maker
    if name.startswith("hf:"):
        return FromTable(name.removeprefix("hf:"))
    if name.startswith("hf-text:"):
        return partial(TransformerText, name.removeprefix("hf-text:"))
    if name not in TASKS:
        raise unknown("task", name, TASKS, others="package.module:function")
    return TASKS[name]


def build_task(
    settings: Settings, num_clients: int, statistics: tuple[float, ...] = ()
) -> Task:
    """Return the task for some settings; equal settings give the same object.

    Parameters
    ----------
    settings : mapping
        ``task``, the settings that it declares, and those of `AdapterSettings` and
        `EvaluationSettings`. Others are ignored.
    num_clients : int
        Number of clients that share the data; 0 gives all of it to client 0.
    statistics : tuple of float, default ()
        Statistics of the columns of all devices' tables (`BaseTask.column_statistics`).

    Returns
    -------
    Task
        The task.

    Raises
    ------
    SettingsError
        If a setting is unknown or invalid.
    """
    return built_task(task_key(settings), num_clients, statistics)


def task_key(settings: Settings) -> TaskKey:
    """Return the settings that `build_task` reads."""
    name = str(settings["task"])
    names = sorted({*model_settings(name), *declared(EvaluationSettings)})
    return name, tuple((n, settings[n]) for n in names if n in settings)


def task_defaults(settings: Settings) -> dict[str, Setting]:
    """Return the defaults of settings that a task declares, or its data determine.

    Raises `SettingsError` if the data cannot be read.
    """
    maker = task_maker(str(settings["task"]))
    own: Any = getattr(made_by(maker), "defaults", {})
    return dict(
        own(build(own.__self__._settings_type, settings)) if callable(own) else own
    )


@run_cache(maxsize=16)
def model_settings(name: str) -> frozenset[str]:
    """Return the names of the settings of a task and of its model's adapters."""
    return frozenset({*declared(task_maker(name)), *declared(AdapterSettings)})


@run_cache(maxsize=TASKS_AT_A_TIME)
def built_task(
    key: TaskKey, num_clients: int, statistics: tuple[float, ...] = ()
) -> Task:
    """Return the task of a `task_key`; see `build_task`."""
    name, settings = key
    maker, arguments = task_maker(name), dict[str, Any]()
    ours = {"num_clients": num_clients, "column_statistics": statistics}
    for argument in inspect.signature(maker).parameters.keys() & ours.keys():
        arguments[argument] = ours[argument]
    evaluation = build(EvaluationSettings, dict(settings))
    # A custom task may split its data at random, which all processes must do alike.
    with seeded(evaluation.seed):
        task = build(maker, dict(settings), **arguments)
    allowed = "a function that returns a task, such as an ExampleTask"
    require(isinstance(task, BaseTask), "task", name, allowed)
    if isinstance(task, ExampleTask) and task.seed is None:
        # A copy: the user's function may return the same object for all seeds, with
        # models of an earlier seed already built.
        task = changed(task, {"seed": evaluation.seed})
    task = with_adapters(task, build(AdapterSettings, dict(settings)))
    return with_evaluation(task, evaluation)
