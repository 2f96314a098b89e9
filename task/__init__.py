"""Tasks: data, split models, local training and metrics. Never imports flwr."""

from flwr_frl.common.lazy import attach

_MODULES = {
    "common.errors": ("SettingsError",),
    "common.settings": ("setting",),
    "task.base": ("ExampleTask", "Task"),
    "task.examples": ("ExampleSet",),
    "task.models": ("SplitModel", "build_model"),
    "task.saddle_point": ("Proximity",),
    "task.tasks": ("build_task",),
    "task.tasks.image": ("ImageTask",),
    "task.tasks.linear": ("LinearTask", "principal_angle_distance"),
    "task.training.local_training": ("evaluate", "train"),
    "task.training.sgd": ("SGD",),
}


def _import_paths() -> list[str]:
    pairs = [(module, name) for module, names in _MODULES.items() for name in names]
    return [f"flwr_frl.{module}:{name}" for module, name in pairs]


public_names, __getattr__ = attach(__name__, _import_paths)
