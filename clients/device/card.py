"""The card of a model of images or of a table: all that using it without data needs.

Devices write it into their state files, and `flwr_frl.predict` into exported models.
"""

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from flwr_frl.clients.base import Client
from flwr_frl.common.errors import SettingsError, require
from flwr_frl.task.base import Task
from flwr_frl.task.data.datasets import Dataset, ImageSet
from flwr_frl.task.tasks.image import ImageSettings, ImageTask, PartitionedTask
from flwr_frl.task.tasks.table import Scaling, TableSettings, TableTask

# Keys of a file's metadata: the card, the names of the classes and the client's class.
CARD, CLASSES, ALGORITHM = "model-card", "classes", "algorithm"
Size = Annotated[int, Field(ge=1, le=10**5)]


@dataclass(frozen=True, kw_only=True)
class Card:
    """How a model is built and what its outputs mean.

    Parameters
    ----------
    model : str
        Name of the model, for `build_model`.
    head_layers : int
        Number of last layers that form the head; built-in models only.
    classes : tuple of str
        Names of the outputs; empty if they are numbers.
    """

    model: Annotated[str, Field(min_length=1)]
    head_layers: int
    classes: tuple[str, ...]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings with which a task builds the model."""
        return {"model": self.model, "head_layers": self.head_layers}


@dataclass(frozen=True, kw_only=True)
class ImageCard(Card):
    """The card of an image model.

    Parameters
    ----------
    source : str
        Name of the data set, which determines the normalisation.
    shape : tuple of int
        Height, width and channels of the images.
    """

    source: str
    shape: tuple[Size, Size, Size]

    def task(self) -> ImageTask:
        """Return a task that builds the model and reads images, but has no examples."""
        none = np.zeros(0, np.int64)
        images = ImageSet(np.zeros((0, *self.shape), np.uint8), none, none)
        data = Dataset(images, images, self.classes)
        return ImageTask(self.source, ImageSettings(**self.settings), 0, data)


@dataclass(frozen=True, kw_only=True)
class TableCard(Card):
    """The card of the model of a table.

    Parameters
    ----------
    shape : tuple of int
        Number of inputs, and of the rows of a window if there are windows.
    stride : int
        Rows between two windows; 0 for windows that do not overlap.
    columns : tuple of str
        Names of the columns.
    missing : str
        Treatment of missing numbers: ``error`` or ``mean``.
    scaling : Scaling
        The scaling of inputs and labels.
    client_column : str
        Name of the column of clients, if there is one.
    client : str
        Name of the only client whose rows are read; "" reads all.
    """

    shape: Annotated[tuple[Size, ...], Field(min_length=1, max_length=2)]
    stride: Annotated[int, Field(ge=0)]
    columns: Annotated[tuple[str, ...], Field(min_length=1)]
    missing: Literal["error", "mean"]
    scaling: Scaling
    client_column: str
    client: str

    def task(self) -> TableTask:
        """Return a task that builds the model and reads tables, but has no examples."""
        widths = {len(self.scaling.mean), len(self.scaling.factor or self.scaling.mean)}
        allowed = f"{self.shape[0]}, the number of inputs"
        valid = widths == {self.shape[0]}
        require(valid, "the number of means", widths, allowed, "damaged-card")
        none = np.zeros(0, np.int64)
        rows = ImageSet(np.zeros((0, *self.shape), np.float32), none, none)
        window = self.shape[1] if len(self.shape) == 2 else 0
        rest = {"stride": self.stride, "missing": self.missing, **self.settings}
        how = TableSettings(window=window, **rest)
        column = self.client_column
        data = Dataset(rows, rows, self.classes, (), (), self.columns, column)
        return TableTask(how, 0, data, self.scaling, self.client)


def card_of(task: Task, client: int = 0) -> str:
    """Return the card of a client's model as JSON; "" if only the task can build it."""
    if type(task) not in (ImageTask, TableTask) or "initial_model" in vars(task):
        return ""
    built: Any = task
    card = {
        "model": built.model_name,
        "head_layers": built.head_layers,
        "classes": tuple(map(str, built.classes)),
    }
    if isinstance(task, TableTask):
        how = task.settings
        card |= {"shape": task.shape, "columns": task.columns, "stride": how.stride}
        card |= {"missing": how.missing, "scaling": asdict(task.scaling(client))}
        card |= {"client_column": task.dataset.client_column, "client": task.client}
    else:
        card |= {"source": built.source, "shape": built.dataset.train.images.shape[1:]}
    return json.dumps(card)


def read_card(text: str) -> ImageCard | TableCard:
    """Return the card that `card_of` has written; `SettingsError` if damaged."""
    cards: TypeAdapter[ImageCard | TableCard] = TypeAdapter(ImageCard | TableCard)
    try:
        return cards.validate_json(text)
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
