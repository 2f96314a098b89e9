"""What is learned: data, split models, local training, metrics. Never imports flwr."""

from importlib import import_module
from typing import Any

# Imported on first use, so that a server can use `task.settings` without torch.
_HOMES = {
    "ExampleSet": "task.examples",
    "ExampleTask": "task.base",
    "ImageTask": "task.tasks.image",
    "LinearTask": "task.tasks.linear",
    "SGD": "task.training",
    "Choice": "task.settings",
    "Free": "task.settings",
    "Range": "task.settings",
    "SettingsError": "task.settings",
    "SplitModel": "task.models",
    "Task": "task.base",
    "build_model": "task.models",
    "build_task": "task.tasks",
    "evaluate": "task.training",
    "principal_angle_distance": "task.tasks.linear",
    "train": "task.training",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
