"""Image classification."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from flwr_frl.task.base import BaseTask
from flwr_frl.task.data.datasets import Dataset, DataSettings, load_dataset
from flwr_frl.task.data.images import read_image
from flwr_frl.task.data.partitions import Columns, Indices, PartitionSettings, partition
from flwr_frl.task.devices import seeded
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import MODELS, SplitModel, build_model
from flwr_frl.task.models.weights import load_weights
from flwr_frl.task.settings import Free, Place, Range, SettingsError
from flwr_frl.task.training import Loss

DEFAULT_MODELS = {
    "digits": "digits-cnn",
    "mnist": "digits-cnn",
    "emnist": "mlp",
    "femnist": "mlp",
    "cifar10": "cifar10-cnn",
    "cifar100": "cifar100-cnn",
    "image-folder": "cifar10-cnn",
    "arrays": "cifar10-cnn",
}

# Means and standard deviations for values of 0 to 1; the CIFAR ones are those of the
# authors' code.
RGB = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
GREY = ((0.1307,), (0.3081,))
NORMALIZATION = {"cifar100": ((0.507, 0.487, 0.441), (0.267, 0.256, 0.276))}

# Digits and letters must not be mirrored, and a crop can make another one of them.
HANDWRITTEN = ("digits", "mnist", "emnist", "femnist")
# Images of which it is seen whether all are grey.
SEEN = 64
# The CNNs for CIFAR take no smaller images, and are slow with larger ones.
SMALL, LARGE = 16, 64
# Bytes of a client's images that are copied into memory; more are read as they are
# needed. What is copied is remembered of 16 clients, and of more up to so many bytes.
COPIED = 8 * 2**20
FEWEST_REMEMBERED, REMEMBERED = 16, 128 * 2**20


@dataclass(frozen=True)
class ImageSettings(DataSettings, PartitionSettings):
    """Data, partition, model and augmentation.

    Parameters
    ----------
    model : str, default ""
        A built-in model or any classification model of torchvision; the data set's own
        by default.
    model_head : str, default ""
        Dotted name of a torchvision model's head; its last linear layer by default.
    head_layers : int, default 0
        How many of a built-in model's last layers are the head; 0 leaves it to the
        algorithm (LG-FedAvg has 2, the others 1).
    weights : str, default ""
        What the model begins with: a ``.pth`` or ``.safetensors`` file, or the name of
        torchvision's weights for it (``DEFAULT``); the head stays new where its shape
        differs.
    grey_to_rgb : bool, default True
        Whether grey images become RGB where the model takes nothing else, as all of
        torchvision's.
    augment : bool, default True
        Whether natural colour images get a random crop and flip in training.
    augment_all : bool, default False
        Whether grey images and handwriting are augmented as well.
    """

    model: Annotated[str, Free("a model's name")] = ""
    model_head: Annotated[str, Free("a submodule's name")] = ""
    head_layers: Annotated[int, Range("[0, inf)")] = 0
    weights: Annotated[str, Place("a file or a name")] = ""
    grey_to_rgb: Annotated[bool, Free()] = True
    augment: Annotated[bool, Free()] = True
    augment_all: Annotated[bool, Free()] = False


def _has_own_model(kind: type["ImageTask"]) -> bool:
    """Return whether a subclass makes its model without what the settings name."""
    make = kind.initial_model
    # One that calls super() makes something of a built-in model.
    code = getattr(make, "__code__", None)
    changes = "__class__" in getattr(code, "co_freevars", ())
    return make is not ImageTask.initial_model and not changes


class ImageTask(BaseTask):
    """Image classification with one data set that is split over clients.

    Parameters
    ----------
    name : str
        Of the data set.
    settings : ImageSettings
        How it is used.
    num_clients : int
        Number of clients; 0 gives client 0 the whole data set (a device with its own
        folder).
    dataset : Dataset, optional
        The data set, where it is at hand.
    columns : callable, optional
        Returns what else is known of its examples, for `partition`.

    Raises
    ------
    SettingsError
        If the data, the partition or the model is not to be had.
    """

    settings_type: ClassVar[type] = ImageSettings

    def __init__(
        self,
        name: str,
        settings: ImageSettings,
        num_clients: int,
        dataset: Dataset | None = None,
        columns: Columns | None = None,
    ) -> None:
        self.source = name
        self.settings = settings
        self.dataset = dataset or load_dataset(name, settings)
        self._columns = columns
        self.classes = self.dataset.classes
        self.num_classes = len(self.classes)
        self.natural = name not in HANDWRITTEN and _coloured(self.dataset.train.images)
        self.augment = settings.augment and (self.natural or settings.augment_all)
        self.seed = settings.seed
        self.train, self.test = self._partition(settings, num_clients)
        height, width, channels = self.dataset.train.images.shape[1:]
        self._own_model = _has_own_model(type(self))
        named = "" if self._own_model else settings.model
        self.model_name = named or default_model(name, height, width)
        notes = list(self.dataset.notes)
        if not (named or self._own_model) and max(height, width) > LARGE:
            size = (
                "image-size=32" if name == "image-folder" else "a model, resnet18 say"
            )
            notes.append(
                f"images of {width} x {height} are large for the default model "
                f"{self.model_name}, and rounds take long: set {size}"
            )
        if channels == 1 and settings.grey_to_rgb and self.model_name not in MODELS:
            notes.append(
                f"grey images become RGB, as {self.model_name} takes no others"
            )
            channels = 3
        self.notes = tuple(notes)
        mean, std = NORMALIZATION.get(name, RGB if channels == 3 else GREY)
        self.mean, self.std = torch.tensor(mean) * 255, torch.tensor(std) * 255
        self.shape = (channels, height, width)
        # 0 leaves it to the algorithm; without one, the last layer is the head.
        self.head_layers = settings.head_layers or 1
        self.model_head = settings.model_head
        self.loss: Loss = nn.functional.cross_entropy
        # Of the clients that were here last: cutting a client's images out takes time.
        # With test-partition "all" there is one test set for everybody.
        own = self.test[:1] if self.test[-1] is self.test[0] else self.test
        self._trained_on = lru_cache(self._remembered(self.train))(
            partial(self._cut, training=True)
        )
        self._tested_on = lru_cache(self._remembered(own))(
            partial(self._cut, training=False)
        )

    def _partition(
        self, settings: ImageSettings, num_clients: int
    ) -> tuple[Indices, Indices]:
        train, test = self.dataset.train, self.dataset.test
        if num_clients == 0:
            return [np.arange(len(train))], [np.arange(len(test))]
        natural = self.client_names = self.dataset.clients
        if not natural:
            numbers = self.num_classes, num_clients
            labels = train.labels, test.labels
            return partition(*labels, *numbers, settings, self._columns)
        if num_clients > len(natural):
            raise SettingsError(
                f"num-clients is {num_clients}; the data is split over {len(natural)} "
                f"clients, {natural[0]} to {natural[-1]}"
            )
        parts = [_by_owner(part.owners, num_clients) for part in (train, test)]
        for name, own in zip(natural, parts[0], strict=False):
            if len(own) == 0:
                raise SettingsError(f"client {name!r} has no training images")
        return parts[0], parts[1]

    @property
    def unused_settings(self) -> Mapping[str, str]:
        """What the partition, the images and a model of one's own do not use."""
        idle = self.settings.unused()
        if self.dataset.clients:
            names = ["partition", "classes-per-client", "dirichlet-alpha", "size-sigma"]
            names += ["test-partition", "partitioner-arguments"]
            idle = dict.fromkeys(names, "the data is already split over its clients")
        if self.source not in ("image-folder", "femnist"):
            idle["classes"] = "only an image folder has class folders"
        if self.source != "emnist":
            idle["emnist-split"] = "only EMNIST has these splits"
        if self.settings.augment and not self.augment:
            idle["augment"] = "grey images and handwriting need augment-all=true"
        if self.source == "digits":
            idle["data-dir"] = "the digits come with scikit-learn"
        if self._own_model:
            names = ["model", "model-head", "head-layers", "weights"]
            idle |= dict.fromkeys(names, "the task has a model of its own")
        return idle

    def read(self, line: str) -> torch.Tensor:
        """Return the image in a file, as the model gets it: a line is its path."""
        channels, height, width = self.shape
        pixels = torch.from_numpy(read_image(Path(line), channels, (width, height)))
        return ((pixels - self.mean) / self.std).permute(2, 0, 1)

    def initial_model(self) -> SplitModel:
        """Return a new model with the seed's initial values, or those of `weights`."""
        with seeded(self.seed):
            model = build_model(
                self.model_name,
                self.shape,
                self.num_classes,
                self.head_layers,
                self.model_head,
            )
        if self.settings.weights:
            load_weights(model, self.settings.weights, self.model_name)
        return model

    def check(self, client: int) -> None:
        """Try what a subclass has of its own.

        Ours are known to fit: `build_model` has tried the one shape that images have.
        """
        if type(self) is not ImageTask:
            super().check(client)

    def train_examples(self, client: int) -> ExampleSet:
        """Return a client's training images, read from the cache."""
        return self._trained_on(client)

    def test_examples(self, client: int) -> ExampleSet:
        """Return a client's test images, never augmented."""
        shared = self.test[client] is self.test[0]
        return self._tested_on(0 if shared else client)

    def _remembered(self, part: Indices) -> int:
        """Return of how many clients, be they the largest ones, images are kept."""
        image = self.dataset.train.images[:1].nbytes
        sizes = sorted((len(chosen) * image for chosen in part), reverse=True)
        kept = np.searchsorted(np.cumsum(sizes), REMEMBERED, side="right")
        return max(FEWEST_REMEMBERED, int(kept))

    def _cut(self, client: int, training: bool) -> ExampleSet:
        images = self.dataset.train if training else self.dataset.test
        chosen = (self.train if training else self.test)[client]
        few = len(chosen) * images.images[:1].nbytes <= COPIED
        pixels = as_tensor(images.images[chosen] if few else images.images)
        if self.shape[0] > pixels.shape[-1]:
            pixels = pixels.expand(-1, -1, -1, self.shape[0])
        return ExampleSet(
            pixels,
            torch.from_numpy(images.labels[chosen]),
            self.mean,
            self.std,
            self.augment and training,
            None if few else torch.from_numpy(chosen),
        )


def as_tensor(pixels: npt.NDArray[np.uint8]) -> torch.Tensor:
    """Return an array as a tensor on the same memory, which nobody writes to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(pixels)


def _by_owner(owners: npt.NDArray[np.int64], count: int) -> Indices:
    """Return the indices of the first owners' images, each's ascending."""
    order = np.argsort(owners, kind="stable")
    bounds = np.searchsorted(owners[order], np.arange(count + 1))
    return [order[start:end] for start, end in pairwise(bounds)]


def _coloured(images: npt.NDArray[np.uint8]) -> bool:
    """Return whether the first images are not all grey; as RGB they may be, too."""
    first = images[:SEEN]
    return images.shape[-1] == 3 and bool((first != first[..., :1]).any())


def default_model(name: str, height: int, width: int) -> str:
    """Return a data set's default model, a smaller one for small images."""
    if name in ("image-folder", "arrays") and min(height, width) < SMALL:
        return "digits-cnn"
    return DEFAULT_MODELS[name]
