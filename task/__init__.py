"""Tasks: data, split models, local training and metrics. Never imports flwr."""

from typing import TYPE_CHECKING

from flwr_frl.common.lazy import attach

if TYPE_CHECKING:
    from flwr_frl.common.settings import SettingsError as SettingsError
    from flwr_frl.common.settings import setting as setting
    from flwr_frl.task.base import ExampleTask as ExampleTask
    from flwr_frl.task.base import Task as Task
    from flwr_frl.task.examples import ExampleSet as ExampleSet
    from flwr_frl.task.models import SplitModel as SplitModel
    from flwr_frl.task.models import build_model as build_model
    from flwr_frl.task.tasks import build_task as build_task
    from flwr_frl.task.tasks.image import ImageTask as ImageTask
    from flwr_frl.task.tasks.linear import LinearTask as LinearTask
    from flwr_frl.task.tasks.linear import (
        principal_angle_distance as principal_angle_distance,
    )
    from flwr_frl.task.training import SGD as SGD
    from flwr_frl.task.training import evaluate as evaluate
    from flwr_frl.task.training import train as train
else:
    __all__, __getattr__ = attach(__name__, __file__)

if __name__ == "task":
    # Imported by its short name in a checkout: alias the modules, do not copy them.
    from flwr_frl.common.short_names import alias

    alias(__name__)
