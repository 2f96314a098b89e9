"""The card of a model of images or of a table: all that using it without data needs.

Devices write it into their state files, and `flwr_frl.predict` into exported models.
"""

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Literal, Self, TypeVar

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from flwr_frl.clients.base import Client
from flwr_frl.common.settings import SettingsError, require
from flwr_frl.task.base import Task
from flwr_frl.task.data.datasets import Dataset, ImageSet
from flwr_frl.task.tasks.image import ImageSettings, ImageTask, PartitionedTask
from flwr_frl.task.tasks.table import Scaling, TableSettings, TableTask

# Keys of a file's metadata: the card, the names of the classes and the client's class.
CARD, CLASSES, ALGORITHM = "model-card", "classes", "algorithm"
T = TypeVar("T")
Size = Annotated[int, Field(ge=1, le=10**5)]


@dataclass(frozen=True)
class ImageCard:
    """How an image model is built, what it takes and what its outputs mean.

    Parameters
    ----------
    source : str
        Name of the data set, which determines the normalisation.
    model : str
        Name of the model, for `build_model`.
    head_layers : int
        Number of last layers that form the head; built-in models only.
    shape : tuple of int
        Height, width and channels of the images.
    classes : tuple of str
        Names of the outputs.
    """

    source: str
    model: Annotated[str, Field(min_length=1)]
    head_layers: int
    shape: tuple[Size, Size, Size]
    classes: tuple[str, ...]

    @classmethod
    def of(cls, task: ImageTask) -> Self:
        """Return the card of a task."""
        return cls(
            task.source,
            task.model_name,
            task.head_layers,
            task.dataset.train.images.shape[1:],
            tuple(map(str, task.classes)),
        )

    def task(self) -> ImageTask:
        """Return a task that builds the model and reads images, but has no examples."""
        none = np.zeros(0, np.int64)
        images = ImageSet(np.zeros((0, *self.shape), np.uint8), none, none)
        settings = ImageSettings(model=self.model, head_layers=self.head_layers)
        data = Dataset(images, images, self.classes)
        return ImageTask(self.source, settings, 0, data)


@dataclass(frozen=True)
class TableCard:
    """How the model of a table is built, what it takes and what its outputs mean.

    Parameters
    ----------
    model, head_layers
        As in `ImageCard`.
    shape : tuple of int
        Number of inputs, and of the rows of a window if there are windows.
    stride : int
        Rows between two windows; 0 for windows that do not overlap.
    classes, columns : tuple of str
        Names of the outputs, empty if they are numbers, and of the columns.
    missing : str
        Treatment of missing numbers: ``error`` or ``mean``.
    scaling : Scaling
        The scaling of inputs and labels.
    """

    model: Annotated[str, Field(min_length=1)]
    head_layers: int
    shape: Annotated[tuple[Size, ...], Field(min_length=1, max_length=2)]
    stride: Annotated[int, Field(ge=0)]
    classes: tuple[str, ...]
    columns: Annotated[tuple[str, ...], Field(min_length=1)]
    missing: Literal["error", "mean"]
    scaling: Scaling

    @classmethod
    def of(cls, task: TableTask, client: int) -> Self:
        """Return the card of a client's model."""
        return cls(
            task.model_name,
            task.head_layers,
            task.shape,
            task.settings.stride,
            task.classes,
            task.columns,
            task.settings.missing,
            task.scaling(client),
        )

    def task(self) -> TableTask:
        """Return a task that builds the model and reads tables, but has no examples."""
        widths = {len(self.scaling.mean), len(self.scaling.factor or self.scaling.mean)}
        allowed = f"{self.shape[0]}, the number of inputs"
        valid = widths == {self.shape[0]}
        require(valid, "the number of means", widths, allowed, "damaged-card")
        none = np.zeros(0, np.int64)
        rows = ImageSet(np.zeros((0, *self.shape), np.float32), none, none)
        settings = TableSettings(
            model=self.model,
            head_layers=self.head_layers,
            stride=self.stride,
            missing=self.missing,
        )
        data = Dataset(rows, rows, self.classes, columns=self.columns)
        return TableTask(settings, 0, data, self.scaling)


def card_of(task: Task, client: int = 0) -> str:
    """Return the card of a client's model as JSON; "" if only the task can build it."""
    card: ImageCard | TableCard | None = None
    if "initial_model" not in vars(task):
        if type(task) is ImageTask:
            card = ImageCard.of(task)
        elif type(task) is TableTask:
            card = TableCard.of(task, client)
    return json.dumps(asdict(card)) if card else ""


def read_card(text: str) -> ImageCard | TableCard:
    """Return the card that `card_of` has written; `SettingsError` if damaged."""
    card: ImageCard | TableCard = read_json(ImageCard | TableCard, text)  # type: ignore[arg-type]
    return card


def read_json(kind: type[T], text: str) -> T:
    """Return a value of a type from a file's metadata; `SettingsError` if damaged."""
    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError:
        message = "the description of the model is damaged"
        raise SettingsError(message, "damaged-card") from None


def about_state(task: Task, client: int, kind: type[Client]) -> dict[str, str]:
    """Return the metadata of a client's files.

    They name the algorithm and, for tasks of images and tables, the classes and the
    model.
    """
    about = algorithm_of(kind)
    if isinstance(task, PartitionedTask):
        about[CLASSES] = json.dumps(task.classes)
    if card := card_of(task, client):
        about[CARD] = card
    return about


def algorithm_of(kind: type[Client]) -> dict[str, str]:
    """Return the metadata of a client's files about its algorithm."""
    return {ALGORITHM: f"{kind.__module__}:{kind.__qualname__}"}
