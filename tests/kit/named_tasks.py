"""Tasks from settings."""

from collections.abc import Mapping
from typing import Any

from flwr_frl.common.settings import resolve
from flwr_frl.task.base import Task
from flwr_frl.task.tasks import build_task


def dashed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by their names; ``_`` stands for ``-``."""
    return {name.replace("_", "-"): value for name, value in settings.items()}


def task_of(name: str, num_clients: int, **settings: Any) -> Task:
    """Build a task as a run with these settings does."""
    return build_task(resolve({"task": name, **dashed(settings)}), num_clients)
