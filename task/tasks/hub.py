"""Classification of images or table rows from Hugging Face's ``datasets``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch

from flwr_frl.common.settings import require
from flwr_frl.task.base import ExampleTask, Task
from flwr_frl.task.data.datasets import Dataset, ImageSet, load_cached
from flwr_frl.task.data.hub import ColumnSettings, HubData
from flwr_frl.task.data.partitions import (
    Columns,
    Indices,
    PartitionSettings,
    Parts,
    partition,
)
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import build_model
from flwr_frl.task.tasks.image import ImageSettings, ImageTask, as_tensor

# Default model for columns of numbers, which are not normalised.
TABLE_MODEL = "mlp-2"


@dataclass(frozen=True)
class HubSettings(ImageSettings, ColumnSettings):
    """Settings of a task with a ``datasets`` data set."""


@dataclass(frozen=True, eq=False)
class TableTask(ExampleTask):
    """Classification of table rows with numeric columns."""

    notes: tuple[str, ...] = ()
    unused: Mapping[str, str] = field(default_factory=dict)

    @property
    def unused_settings(self) -> Mapping[str, str]:
        """Settings that neither the partition nor a table uses, with reasons."""
        return self.unused


@dataclass(frozen=True)
class FromHub:
    """Make the task of a data set: an `ImageTask`, or a `TableTask` for numbers.

    Parameters
    ----------
    name : str, default ""
        Name or path of the data set (see `HubData`); ``data-dir`` overrides it.
    """

    name: str = ""

    settings_type: ClassVar[type] = HubSettings

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
        dataset = load_cached(data.key, data.write, settings)
        if dataset.train.images.ndim == 4:
            # The defaults of image folders apply.
            name = "image-folder"
            return ImageTask(name, settings, num_clients, dataset, data.columns)
        return _table(dataset, settings, num_clients, data.columns)


def _table(
    dataset: Dataset, settings: HubSettings, num_clients: int, columns: Columns
) -> TableTask:
    train, test = dataset.train, dataset.test
    classes, width = dataset.classes, train.images.shape[1]
    parts = Parts([np.arange(len(train))], [np.arange(len(test))])
    if num_clients:
        labels = train.labels, test.labels
        parts = partition(*labels, num_clients, settings, columns)
    model, head = settings.model or TABLE_MODEL, settings.head_layers or 1
    return TableTask(
        model=lambda: build_model(
            model, (width,), len(classes), head, settings.model_head
        ),
        train=_sets(train, parts.train, parts.names, len(classes), settings),
        test=_sets(test, parts.test, parts.names, len(classes), settings),
        classes=classes,
        seed=settings.seed,
        weights=settings.weights,
        notes=dataset.notes,
        unused=settings.unused()
        | dict.fromkeys(
            ("augment", "augment-all", "grey-to-rgb", "image-size"),
            "there are no images",
        ),
    )


def _sets(
    part: ImageSet,
    of_clients: Indices,
    names: tuple[str, ...],
    num_classes: int,
    settings: PartitionSettings,
) -> list[ExampleSet] | dict[str, ExampleSet]:
    """Return each client's rows of a memory-mapped table; they are read when needed.

    By name, if the clients have names.
    """
    inputs, counts = as_tensor(part.images), (num_classes, len(of_clients))
    sets = [
        ExampleSet(
            inputs,
            torch.from_numpy(settings.labels(part.labels[rows], client, *counts)),
            rows=torch.from_numpy(rows),
        )
        for client, rows in enumerate(of_clients)
    ]
    return dict(zip(names, sets, strict=True)) if names else sets
