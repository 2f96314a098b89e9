"""Classification of images from a data set that is split over clients."""

import warnings
from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from flwr_frl.common.settings import PathText, setting
from flwr_frl.task.base import BaseTask
from flwr_frl.task.data.datasets import Dataset, DataSettings, load_dataset, read_image
from flwr_frl.task.data.partitions import CLUSTERED, PartitionSettings, partition
from flwr_frl.task.devices import seeded
from flwr_frl.task.examples import ExampleSet, Loss
from flwr_frl.task.models import MODELS, SplitModel, build_model
from flwr_frl.task.models.weights import load_weights

# Default models of some data sets.
DEFAULT_MODELS = {
    "mnist": "digits-cnn",
    "emnist": "mlp",
    "femnist": "mlp",
    "cifar100": "cifar100-cnn",
}

# Means and standard deviations of pixels in [0, 1]; those of CIFAR-100 are from the
# code of FedRep's authors.
RGB = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
GREY = ((0.1307,), (0.3081,))
CIFAR100 = ((0.507, 0.487, 0.441), (0.267, 0.256, 0.276))

# Flipping or cropping a character can turn it into another one.
HANDWRITTEN = ("digits", "mnist", "emnist", "femnist")
# Number of images that decide whether a data set is grey.
INSPECTED = 64
# The CNNs for CIFAR need images of at least SMALL pixels.
SMALL = 16
# A client's images are copied into memory up to this size in bytes; larger sets are
# read from the memory-mapped file batch by batch.
COPIED = 8 * 2**20
# Copies are cached for at least FEWEST_CACHED clients, and for more up to CACHED bytes.
FEWEST_CACHED, CACHED = 16, 128 * 2**20


@dataclass(frozen=True)
class ImageSettings(DataSettings, PartitionSettings):
    """Data, partition, model and augmentation of an image task.

    Parameters
    ----------
    model : str, default ""
        A built-in model or any classification model of torchvision, whose head is its
        last linear layer; by default a model that suits the data set.
    head_layers : int, default 0
        Number of a built-in model's last layers that form the head; 0 uses the
        algorithm's default (2 for LG-FedAvg, 1 for others).
    weights : str, default ""
        Initial weights: a ``.pth`` or ``.safetensors`` file. A head of another shape is
        initialised randomly.
    augment : bool, default True
        Whether natural colour images are randomly cropped and flipped in training.
    """

    model: str = setting("", form="a model's name", safe=True)
    head_layers: int = setting(0, ge=0)
    weights: PathText = setting("", form="a file", per_device=True)
    augment: bool = setting(True)


class PartitionedTask(BaseTask):
    """A task with a model by name, on a data set that is split over clients.

    Parameters
    ----------
    settings : ImageSettings
        Partition and model.
    num_clients : int
        Number of clients; 0 gives client 0 the whole data set, as on a device with its
        own data set.
    dataset : Dataset
        The data set.
    """

    model_name: str

    def __init__(self, settings: Any, num_clients: int, dataset: Dataset) -> None:
        self.settings, self.dataset, self.seed = settings, dataset, settings.seed
        self.classes, self.notes = dataset.classes, dataset.notes
        # Numbers are predicted with one output.
        self.num_classes = len(self.classes) or 1
        self.shape: tuple[int, ...] = dataset.train.images.shape[1:]
        # 0 means that the algorithm sets no default either.
        self.head_layers = settings.head_layers or 1
        self.loss: Loss = nn.functional.cross_entropy
        self.train, self.test = partition(dataset, num_clients, settings)
        self.client_names = dataset.clients if num_clients else ()
        if dataset.clients:
            reason = "the data is already split over its clients"
            self.unused_settings = {"partition": reason}
        # Selecting a client's examples takes time, so those of recent ones are cached,
        # as many as fit even if all are the largest.
        largest = max(map(len, self.train)) * int(dataset.train.images[:1].nbytes)
        clients = max(FEWEST_CACHED, CACHED // max(1, largest))
        self._examples = lru_cache(2 * clients)(self._select)

    def initial_model(self) -> SplitModel:
        """Return a new model with initial values from the seed or from ``weights``."""
        with seeded(self.seed):
            model = build_model(
                self.model_name, self.shape, self.num_classes, self.head_layers
            )
        if self.settings.weights:
            load_weights(model, self.settings.weights, self.model_name)
        return model

    def train_examples(self, client: int) -> ExampleSet:
        """Return a client's training examples."""
        return self._examples(client, True)

    def test_examples(self, client: int) -> ExampleSet:
        """Return a client's test examples, which are never augmented."""
        return self._examples(client, False)

    @abstractmethod
    def _select(self, client: int, training: bool) -> ExampleSet:
        """Return the training or the test examples of a client."""

    def _labels(self, labels: npt.NDArray[Any], client: int) -> npt.NDArray[Any]:
        """Return labels as a client sees them."""
        shift = self.settings.label_shift(client, len(self.train))
        # A data set that comes split over clients is not partitioned.
        if self.dataset.clients or not shift:
            return labels
        return np.asarray((labels + shift) % self.num_classes)


class ImageTask(PartitionedTask):
    """Classification of images from one data set that is split over clients.

    Subclasses may override `initial_model` to change the model that the settings name.

    Parameters
    ----------
    name : str
        Name of the data set, a key of `flwr_frl.task.data.datasets.SOURCES`.
    settings : ImageSettings
        Data, partition, model and augmentation.
    num_clients : int
        Number of clients; 0 gives client 0 the whole data set, as on a device with its
        own data set.
    dataset : Dataset, optional
        The data set, if it is already loaded.

    Raises
    ------
    SettingsError
        If the data, the partition or the model is invalid.
    """

    _settings_type: ClassVar[type] = ImageSettings
    mean: torch.Tensor
    std: torch.Tensor

    def __init__(
        self,
        name: str,
        settings: ImageSettings,
        num_clients: int,
        dataset: Dataset | None = None,
    ) -> None:
        loaded = dataset or load_dataset(name, settings)
        super().__init__(settings, num_clients, loaded)
        self.source = name
        images = loaded.train.images
        height, width, channels = images.shape[1:]
        natural = name not in HANDWRITTEN and _coloured(images)
        self.augment = settings.augment and natural
        # Whether the images are grey, also if the model takes RGB.
        self.is_grey = channels == 1
        # Small images need a small model.
        usual = "cifar10-cnn" if min(height, width) >= SMALL else "digits-cnn"
        self.model_name = settings.model or DEFAULT_MODELS.get(name, usual)
        if channels == 1 and self.model_name not in MODELS:
            # torchvision's models take no others.
            channels = 3
        usual_statistics = RGB if channels == 3 else GREY
        mean, std = CIFAR100 if name == "cifar100" else usual_statistics
        self.mean, self.std = (
            torch.tensor(values).expand(channels) * 255 for values in (mean, std)
        )
        self.shape = (channels, height, width)

    def test_examples(self, client: int) -> ExampleSet:
        """Return a client's test examples, which are never augmented."""
        permuted = self.settings.partition == CLUSTERED
        # With test-partition "all", a single test set serves all clients.
        is_shared = self.test[client] is self.test[0] and not permuted
        return super().test_examples(0 if is_shared else client)

    def _select(self, client: int, training: bool) -> ExampleSet:
        part = self.dataset.train if training else self.dataset.test
        rows = (self.train if training else self.test)[client]
        copied = len(rows) * part.images[:1].nbytes <= COPIED
        inputs = as_tensor(part.images[rows] if copied else part.images)
        if self.shape[0] > inputs.shape[-1]:
            inputs = inputs.expand(-1, -1, -1, self.shape[0])
        return ExampleSet(
            inputs,
            torch.from_numpy(self._labels(part.labels[rows], client)),
            self.mean,
            self.std,
            self.augment and training,
            None if copied else torch.from_numpy(rows),
        )

    def read(self, line: str) -> torch.Tensor:
        """Return the normalised image of a file; the line is its path."""
        _, height, width = self.shape
        channels = 1 if self.is_grey else self.shape[0]
        pixels = torch.from_numpy(read_image(Path(line), channels, (width, height)))
        return ((pixels - self.mean) / self.std).permute(2, 0, 1)

    def check(self, client: int) -> None:
        """Try a custom or adapted model, metrics, or a validation set.

        `build_model` has tried built-in models on the images' single shape.
        """
        is_tried = type(self) is ImageTask and "initial_model" not in vars(self)
        if self.held_out or self.metrics or not is_tried:
            super().check(client)


def as_tensor(pixels: npt.NDArray[np.uint8]) -> torch.Tensor:
    """Return a tensor that shares a read-only array's memory; do not write to it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(pixels)


def _coloured(images: npt.NDArray[np.uint8]) -> bool:
    """Return whether some of the images have colours; RGB images may be grey."""
    some = images[:: max(1, len(images) // INSPECTED)]
    return images.shape[-1] == 3 and bool((some != some[..., :1]).any())
