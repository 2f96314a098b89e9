"""The card of an image model: all that is needed to use it without its data.

Devices write it into their state files, and `flwr_frl.predict` into exported models.
"""

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Self, TypeVar

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from flwr_frl.clients.base import Client
from flwr_frl.common.settings import SettingsError
from flwr_frl.task.base import Task
from flwr_frl.task.data.cache import Dataset, ImageSet
from flwr_frl.task.tasks.image import ImageSettings, ImageTask

# Keys of a file's metadata: the card, the names of the classes and the client's class.
CARD, CLASSES, ALGORITHM = "image-model", "classes", "algorithm"
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
    model_head : str
        Dotted name of the head of a torchvision model.
    head_layers : int
        Number of last layers that form the head; built-in models only.
    grey_to_rgb : bool
        Whether grey images become RGB for models that take no others.
    shape : tuple of int
        Height, width and channels of the images.
    classes : tuple of str
        Names of the outputs.
    """

    source: str
    model: Annotated[str, Field(min_length=1)]
    model_head: str
    head_layers: int
    grey_to_rgb: bool
    shape: tuple[Size, Size, Size]
    classes: tuple[str, ...]

    @classmethod
    def of(cls, task: Task) -> Self | None:
        """Return a task's card; None if only the task itself can build its model."""
        if type(task) is not ImageTask or "initial_model" in vars(task):
            return None
        return cls(
            task.source,
            task.model_name,
            task.model_head,
            task.head_layers,
            task.settings.grey_to_rgb,
            task.dataset.train.images.shape[1:],
            tuple(map(str, task.classes)),
        )

    @classmethod
    def read(cls, text: str) -> Self:
        """Return the card that `write` has written; `SettingsError` if damaged."""
        return read_json(cls, text)

    def write(self) -> str:
        """Return the card as JSON."""
        return json.dumps(asdict(self))

    def task(self) -> ImageTask:
        """Return a task that builds the model and reads images, but has no examples."""
        none = np.zeros(0, np.int64)
        images = ImageSet(np.zeros((0, *self.shape), np.uint8), none, none)
        settings = ImageSettings(
            model=self.model,
            model_head=self.model_head,
            head_layers=self.head_layers,
            grey_to_rgb=self.grey_to_rgb,
        )
        data = Dataset(images, images, self.classes)
        return ImageTask(self.source, settings, 0, data)


def read_json(kind: type[T], text: str) -> T:
    """Return a value of a type from a file's metadata; `SettingsError` if damaged."""
    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError:
        message = "the description of the model is damaged"
        raise SettingsError(message, "damaged-card") from None


def about_state(task: Task, kind: type[Client]) -> dict[str, str]:
    """Return the metadata of a client's files.

    They name the algorithm and, for image tasks, the classes and the model.
    """
    about = algorithm_of(kind)
    if isinstance(task, ImageTask):
        about[CLASSES] = json.dumps(task.classes)
    if card := ImageCard.of(task):
        about[CARD] = card.write()
    return about


def algorithm_of(kind: type[Client]) -> dict[str, str]:
    """Return the metadata of a client's files about its algorithm."""
    return {ALGORITHM: f"{kind.__module__}:{kind.__qualname__}"}
