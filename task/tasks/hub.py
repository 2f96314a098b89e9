"""Classification of images or table rows from Hugging Face's ``datasets``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from flwr_frl.common.settings import require
from flwr_frl.task.base import Task
from flwr_frl.task.data.cache import Dataset
from flwr_frl.task.data.datasets import load
from flwr_frl.task.data.hub import ColumnSettings, HubData
from flwr_frl.task.data.partitions import Columns
from flwr_frl.task.tasks.image import ImageSettings, ImageTask, PartitionedTask

# Default model for columns of numbers, which are not normalised.
TABLE_MODEL = "mlp-2"
OF_IMAGES = ("augment", "augment-all", "grey-to-rgb", "image-size")


@dataclass(frozen=True)
class HubSettings(ImageSettings, ColumnSettings):
    """Settings of a task with a ``datasets`` data set."""


class TableTask(PartitionedTask):
    """Classification of table rows with numeric columns.

    The parameters are those of `PartitionedTask`.
    """

    def __init__(
        self,
        settings: ImageSettings,
        num_clients: int,
        dataset: Dataset,
        columns: Columns | None = None,
    ) -> None:
        super().__init__(settings, num_clients, dataset, columns)
        self.model_name = settings.model or TABLE_MODEL
        self.shape = dataset.train.images.shape[1:]

    @property
    def unused_settings(self) -> Mapping[str, str]:
        """Settings that neither the partition nor a table uses, with reasons."""
        unused = super().unused_settings
        return {**unused, **dict.fromkeys(OF_IMAGES, "there are no images")}


@dataclass(frozen=True)
class FromHub:
    """Make the task of a data set: an `ImageTask`, or a `TableTask` for numbers.

    Parameters
    ----------
    name : str, default ""
        Name or path of the data set (see `HubData`); ``data-dir`` overrides it.
    """

    name: str = ""

    _settings_type: ClassVar[type] = HubSettings

    def __call__(self, settings: HubSettings, num_clients: int) -> Task:
        """Return the task.

        Parameters
        ----------
        settings : HubSettings
            Columns, partition, model and augmentation.
        num_clients : int
            Number of clients; 0 gives client 0 the whole data set.

        Raises
        ------
        SettingsError
            If the data, its columns, the partition or the model is invalid.
        """
        allowed = "empty: the data set names its own"
        require(not settings.classes, "classes", settings.classes, allowed)
        data = HubData(self.name, settings)
        dataset = load(data.key, data.read, settings)
        if dataset.train.images.ndim == 4:
            # The defaults of image folders apply.
            name = "image-folder"
            return ImageTask(name, settings, num_clients, dataset, data.columns)
        return TableTask(settings, num_clients, dataset, data.columns)
