"""The model card: everything needed to use a trained model elsewhere.

Devices write it into their state files, and `flwr_frl.predict` into the models
that it exports.
"""

import json
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Self, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from flwr_frl.clients.base import Client
from flwr_frl.clients.device.file_settings import LARGEST, followed
from flwr_frl.common.settings import (
    Settings,
    SettingsError,
    is_path,
    reason_of,
    require,
)
from flwr_frl.task.base import BaseTask, Task
from flwr_frl.task.data.images import read_image
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.held_out import changed
from flwr_frl.task.models import SplitModel, build_model, without_memory
from flwr_frl.task.models.frozen import frozen_tensors, new_model
from flwr_frl.task.tasks import build_task, model_settings
from flwr_frl.task.tasks.image import ImageTask
from flwr_frl.task.training import Loss

# Maximum number of model values that a file of arrays may lack; 1 GiB of float32.
MAX_MISSING_VALUES = 2**28
# Settings that only initialise a model: a trained model gets every array from a file.
INITIAL_ONLY = ("weights",)


def initial_only(settings: Settings) -> tuple[str, ...]:
    """Return the settings that a trained model does not need.

    With adapters, the frozen backbone has the ``weights``, and no file contains it.
    """
    return () if settings.get("adapters", "none") != "none" else INITIAL_ONLY


class Classifier(nn.Module):
    """An image model with its normalisation: maps pixels to logits.

    Parameters
    ----------
    model : SplitModel
        The model; takes normalised images (n, channels, height, width).
    mean, std : sequence of float
        Per channel, in units of 0 to 255.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, model: SplitModel, mean: Iterable[float], std: Iterable[float]
    ) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", torch.tensor(list(mean)))
        self.register_buffer("std", torch.tensor(list(std)))
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (n, classes) of uint8 images (n, height, width, channels)."""
        inputs = (images.float() - self.mean) / self.std
        logits: Tensor = self.model(inputs.permute(0, 3, 1, 2))
        return logits


def is_built_by_name(task: object) -> TypeGuard[ImageTask]:
    """Return whether `ImageModel` describes a task's model completely.

    This is not the case if a subclass of `ImageTask` overrides `initial_model`, or if
    the model has adapters.
    """
    if not isinstance(task, ImageTask):
        return False
    return getattr(task.initial_model, "__func__", None) is ImageTask.initial_model


@dataclass(frozen=True)
class ImageModel(BaseTask):
    """A named image classifier, as a task without examples.

    Parameters
    ----------
    model : str
        Name of the model, for `build_model`.
    shape : tuple of int
        Channels, height and width of an input.
    classes : tuple of str
        Names of the outputs.
    mean, std : tuple of float
        Normalisation per channel, in units of 0 to 255.
    head_layers : int
        Number of last layers that form the head; built-in models only.
    model_head : str
        Dotted name of the head of a torchvision model.
    grey : bool
        Whether images lose their colours, as the training images are grey.
    """

    model: str
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    head_layers: int = 1
    model_head: str = ""
    grey: bool = False

    @property
    def loss(self) -> Loss:
        """The loss of the training: cross-entropy."""
        return nn.functional.cross_entropy

    def initial_model(self) -> SplitModel:
        """Return a new model, untrained."""
        return build_model(
            self.model, self.shape, len(self.classes), self.head_layers, self.model_head
        )

    def train_examples(self, client: int) -> ExampleSet:
        """Raise `SettingsError`: the card of a model has no examples."""
        raise SettingsError("a model card has no examples; build the task instead")

    test_examples = train_examples

    def read_pixels(self, paths: Iterable[Path]) -> Tensor:
        """Read images of any size and colour mode as the training data was read.

        Parameters
        ----------
        paths : iterable of Path
            At least one image file.

        Returns
        -------
        Tensor of uint8
            Pixels (n, height, width, channels), with one channel if they are `grey`.

        Raises
        ------
        SettingsError
            If a file is missing or is not an image.
        """
        _, height, width = self.shape
        channels, images = 1 if self.grey else self.shape[0], []
        for path in paths:
            try:
                images.append(read_image(path, channels, (width, height)))
            # Decoders raise almost any exception on a damaged file.
            except Exception as error:
                line = f"image {str(path)!r} cannot be read: {reason_of(error)}"
                raise SettingsError(line) from None
        return torch.from_numpy(np.stack(images))


@dataclass(frozen=True)
class ModelCard:
    """How a trained model is built, what it takes and what its outputs mean.

    Parameters
    ----------
    task : Task
        Builds the model and reads its inputs: an `ImageModel` if the model has a name,
        otherwise the task of the training.
    settings : mapping, default {}
        ``task`` and the settings that it declares; empty for an `ImageModel`.
    num_clients : int, default 0
        Number of clients that share the task's examples; 0 for a device's own data.
    """

    task: Task
    settings: Settings = field(default_factory=dict)
    num_clients: int = 0

    @classmethod
    def of(cls, task: ImageTask) -> Self:
        """Return the card of an image task whose model `is_built_by_name`."""
        mean, std = tuple(task.mean.tolist()), tuple(task.std.tolist())
        name, shape, classes = task.model_name, task.shape, task.classes
        head, grey = (task.head_layers, task.model_head), task.is_grey
        return cls(ImageModel(name, shape, classes, mean, std, *head, grey))

    @classmethod
    def of_device(cls, task: Task, settings: Settings) -> Self:
        """Return the card of a device's task, which was built from the settings."""
        if is_built_by_name(task):
            return cls.of(task)
        return cls.from_settings(settings, 0)

    @classmethod
    def from_settings(
        cls, settings: Settings, num_clients: int, partition: str = ""
    ) -> Self:
        """Build a task and return its card, with an `ImageModel` if that suffices.

        Parameters
        ----------
        settings : mapping
            ``task`` and the settings that it declares; others are ignored.
        num_clients : int
            Number of clients to build the task for; 0 on a device.
        partition : str, default ""
            Import path of the partition that split the examples. If the settings have
            another one, by which `followed` has replaced it, reading a client's
            examples raises `SettingsError`.
        """
        name = str(settings["task"])
        # Files lack some values drawn at random, which the seed must reproduce.
        names = {*model_settings(name), "seed"} - {*initial_only(settings)}
        chosen = {n: settings[n] for n in sorted(names & settings.keys())}
        chosen = {"task": name, **chosen}
        task = build_task(chosen, num_clients)
        if is_built_by_name(task):
            return cls.of(task)
        if reason := getattr(task, "untrainable", ""):
            raise SettingsError(f"task {name!r} has nothing to predict; {reason}")
        if num_clients and is_path(partition) and chosen.get("partition") != partition:
            task = without_examples(task, unknown_split(partition))
        return cls(task, chosen, num_clients)

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, str], named: Settings | None = None
    ) -> Self:
        """Return the card from a file's metadata, which `metadata` has returned.

        Parameters
        ----------
        metadata : mapping of str to str
            The file's metadata; keys that are not part of a card are ignored.
        named : mapping, optional
            Settings that the user names, for `followed`.

        Raises
        ------
        SettingsError
            If the metadata are damaged, or a setting must be named by the user.
        """
        try:
            if "model" in metadata:
                content = json.loads(metadata["model"])
                image_model = ImageModel(
                    str(content["model"]),
                    tuple(int(n) for n in content["shape"]),
                    tuple(str(name) for name in json.loads(metadata["classes"])),
                    tuple(float(value) for value in content["mean"]),
                    tuple(float(value) for value in content["std"]),
                    int(content["head_layers"]),
                    str(content["model_head"]),
                    bool(content["grey"]),
                )
                return cls(image_model)
            content = json.loads(metadata["task"])
            settings = dict(content["settings"])
            num_clients = int(content["clients"])
            settings["task"] = str(settings["task"])
        except (LookupError, TypeError, ValueError) as error:
            raise SettingsError(
                f"the description of the model is damaged: {error!r}"
            ) from None
        allowed = f"from 0 to {LARGEST:,}"
        require(0 <= num_clients <= LARGEST, "clients", num_clients, allowed)
        usable = followed(settings, named or {})
        usable.need_task(without=INITIAL_ONLY)
        partition = str(settings.get("partition", ""))
        return cls.from_settings(usable.settings, num_clients, partition)

    def metadata(self) -> dict[str, str]:
        """Return the card as metadata of a file: JSON texts by key."""
        if self.images is None:
            content = {"settings": self.settings, "clients": self.num_clients}
            return {"task": json.dumps(content)}
        values = {f.name: getattr(self.images, f.name) for f in fields(self.images)}
        classes = values.pop("classes")
        return {"classes": json.dumps(classes), "model": json.dumps(values)}

    @property
    def images(self) -> ImageModel | None:
        """The image model; None if the card has the task of the training instead."""
        return self.task if isinstance(self.task, ImageModel) else None

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the outputs, in their order; empty if they are numbers."""
        return self.task.classes

    def __str__(self) -> str:
        """Name the model in an error message."""
        if self.images is None:
            return f"task {self.settings['task']!r}"
        return (
            f"model {self.images.model!r} with {len(self.classes)} classes and inputs "
            f"of shape {self.images.shape}"
        )

    def wrap(self, model: SplitModel) -> Classifier | SplitModel:
        """Return a model in evaluation mode, with its normalisation if it has one."""
        if self.images is None:
            return model.eval()
        return Classifier(model, self.images.mean, self.images.std)

    def load(self, arrays: Mapping[str, Tensor]) -> Classifier | SplitModel:
        """Return the trained model in evaluation mode; other arrays are ignored.

        Raises `SettingsError` if an array is missing or has another shape than in the
        model.
        """
        for name, wanted in self.skeleton().items():
            self.check_array(name, wanted, arrays)
        model = new_model(self.task)
        model.load_state_dict({name: arrays[name] for name in model.state_dict()})
        for name, frozen in frozen_tensors(model).items():
            if name in arrays:
                self.check_array(name, frozen, arrays)
                frozen.copy_(arrays[name])
        return self.wrap(model)

    def skeleton(self) -> dict[str, Tensor]:
        """Return the model's state dict without allocating memory for its values.

        Custom models are built as usual, because their code may cache what it builds.
        """
        is_custom = is_path(self.settings.get("task", ""))
        with nullcontext() if is_custom else without_memory():
            return new_model(self.task).state_dict()

    def check_size(self, arrays: Mapping[str, Tensor]) -> None:
        """Raise `SettingsError` unless the model is as large as a file's arrays.

        Arrays that the file lacks may have `MAX_MISSING_VALUES` values together.
        """
        missing = 0
        for name, wanted in self.skeleton().items():
            if name in arrays:
                self.check_array(name, wanted, arrays)
            else:
                missing += wanted.numel()
        allowed = f"at most {MAX_MISSING_VALUES:,}"
        require(missing <= MAX_MISSING_VALUES, f"the size of {self}", missing, allowed)

    def check_array(
        self, name: str, wanted: Tensor, arrays: Mapping[str, Tensor]
    ) -> None:
        """Raise `SettingsError` unless an array exists and has the wanted shape."""
        if name not in arrays:
            raise SettingsError(f"there is no array {name!r} for {self}")
        if arrays[name].shape != wanted.shape:
            raise SettingsError(
                f"array {name!r} is of shape {tuple(arrays[name].shape)}; {self} needs "
                f"{tuple(wanted.shape)}"
            )


def without_examples(task: Task, error: SettingsError) -> Task:
    """Return a copy of a task that raises an error when its examples are read."""

    def refuse(client: int) -> ExampleSet:
        raise error

    return changed(task, {"train_examples": refuse, "test_examples": refuse})


def unknown_split(partition: str) -> SettingsError:
    """Return the error for examples that only unnamed code can assign to clients."""
    return SettingsError(
        f"its clients' examples were split by {partition!r}, whose code runs only if "
        "you name it: by --run-config 'partition=...', or partition=... of load_run"
    )


def about_state(task: Task, kind: type[Client]) -> dict[str, str]:
    """Return the metadata of a client's files.

    They name the algorithm and, for image tasks, the classes and the named model.
    """
    card = dict[str, str]()
    if isinstance(task, ImageTask):
        card = ModelCard.of(task).metadata()
        if not is_built_by_name(task):
            del card["model"]
    return {**card, **algorithm_of(kind)}


def algorithm_of(kind: type[Client]) -> dict[str, str]:
    """Return the metadata of a client's files about its algorithm."""
    return {"algorithm": f"{kind.__module__}:{kind.__qualname__}"}
