"""Classification of images or table rows from files or Hugging Face's hub."""

from dataclasses import dataclass
from typing import ClassVar

from flwr_frl.task.base import Task
from flwr_frl.task.data.cache import load
from flwr_frl.task.data.tables import ColumnSettings, table_files
from flwr_frl.task.tasks.image import ImageSettings, ImageTask, PartitionedTask


@dataclass(frozen=True)
class HubSettings(ImageSettings, ColumnSettings):
    """Settings of a task with a table."""


@dataclass(frozen=True)
class FromHub:
    """Make the task of a table: an `ImageTask`, or a `PartitionedTask` for numbers.

    Parameters
    ----------
    name : str, default ""
        Name or path of the data set (see `table_files`); ``data-dir`` overrides it.
    """

    name: str = ""

    _settings_type: ClassVar[type] = HubSettings

    def __call__(self, settings: HubSettings, num_clients: int) -> Task:
        """Return the task; with 0 clients, client 0 has the whole data set."""
        dataset = load(*table_files(self.name, settings), settings)
        if dataset.train.images.ndim == 4:
            # The defaults of image folders apply.
            return ImageTask("image-folder", settings, num_clients, dataset)
        return PartitionedTask(settings, num_clients, dataset)
