"""What a trained image classifier needs to be used where its data is not."""

import json
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from flwr_frl.task.data.images import read_image
from flwr_frl.task.models import SplitModel, build_model, without_memory
from flwr_frl.task.settings import SettingsError, reason_of, require
from flwr_frl.task.tasks.image import ImageTask

# Numbers of a model, 1 GiB, that come with no file.
MOST_NEW = 2**28


class Classifier(nn.Module):
    """A model with its normalisation: from pixels to logits, as in training.

    Parameters
    ----------
    model : SplitModel
        The model.
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
    """Return whether a `ModelCard` says all of a task's model.

    It does not where a subclass of `ImageTask` has a model of its own.
    """
    own = getattr(type(task), "initial_model", None)
    return isinstance(task, ImageTask) and own is ImageTask.initial_model


@dataclass(frozen=True)
class ModelCard:
    """How a model is built, what it is fed and what its outputs mean.

    Parameters
    ----------
    model : str
        Its name, for `build_model`.
    shape : tuple of int
        Channels, height and width of its inputs.
    classes : tuple of str
        Names of its outputs.
    mean, std : tuple of float
        Normalisation per channel, in units of 0 to 255.
    head_layers : int
        How many of the last layers are the head; built-in models only.
    model_head : str
        Dotted name of the head of a torchvision model.
    """

    model: str
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    head_layers: int
    model_head: str

    @classmethod
    def of(cls, task: ImageTask) -> Self:
        """Return the card of a task's model."""
        return cls(
            task.model_name,
            task.shape,
            task.classes,
            tuple(task.mean.tolist()),
            tuple(task.std.tolist()),
            task.head_layers,
            task.model_head,
        )

    def metadata(self) -> dict[str, str]:
        """Return the card as a file keeps it: ``classes`` and ``model``, as JSON."""
        rest = {name: value for name, value in vars(self).items() if name != "classes"}
        return {"classes": json.dumps(self.classes), "model": json.dumps(rest)}

    @classmethod
    def from_metadata(cls, about: Mapping[str, str]) -> Self:
        """Return the card that `metadata` made; `SettingsError` for anything else."""
        try:
            rest = json.loads(about["model"])
            return cls(
                str(rest["model"]),
                tuple(int(n) for n in rest["shape"]),
                tuple(str(name) for name in json.loads(about["classes"])),
                tuple(float(value) for value in rest["mean"]),
                tuple(float(value) for value in rest["std"]),
                int(rest["head_layers"]),
                str(rest["model_head"]),
            )
        except (LookupError, TypeError, ValueError) as error:
            raise SettingsError(
                f"the description of the model is damaged: {error!r}"
            ) from None

    def classifier(self, arrays: Mapping[str, Tensor]) -> Classifier:
        """Return the trained model in evaluation mode; further arrays are passed over.

        Raises `SettingsError` if one is missing, or is not of the model's shape.
        """
        return Classifier(trained(self, arrays), self.mean, self.std)

    def build(self) -> SplitModel:
        """Return a new model, untrained."""
        return build_model(
            self.model, self.shape, len(self.classes), self.head_layers, self.model_head
        )

    @property
    def is_custom(self) -> bool:
        """No: the model has a name."""
        return False

    def __str__(self) -> str:
        """Return what needs the arrays, as an error says it."""
        return (
            f"model {self.model!r} with {len(self.classes)} classes and inputs of "
            f"shape {self.shape}"
        )

    def read(self, paths: Iterable[Path]) -> Tensor:
        """Read images, of any size and colour, as the training data was read.

        Returns uint8 pixels of shape (n, height, width, channels), n >= 1. A file that
        is missing or not an image is a `SettingsError`.
        """
        channels, height, width = self.shape
        images = []
        for path in paths:
            try:
                images.append(read_image(path, channels, (width, height)))
            # A damaged file can raise nearly anything in a decoder.
            except Exception as error:
                reason = reason_of(error)
                raise SettingsError(
                    f"image {str(path)!r} cannot be read: {reason}"
                ) from None
        return torch.from_numpy(np.stack(images))


class Card(Protocol):
    """What a trained model needs to be used; as text, what needs its arrays."""

    @property
    def is_custom(self) -> bool:
        """Whether code from outside of this package makes the model."""

    def build(self) -> SplitModel:
        """Return a new model, untrained."""


def trained(card: Card, arrays: Mapping[str, Tensor]) -> SplitModel:
    """Return a card's model with its arrays; further ones are passed over.

    Raises `SettingsError` if one is missing, or is not of the model's shape.
    """
    for name, wanted in skeleton(card).items():
        check_array(card, name, wanted, arrays)
    model = card.build()
    state = model.state_dict()
    model.load_state_dict({name: arrays[name] for name in state})
    return model


def skeleton(card: Card) -> dict[str, Tensor]:
    """Return the state dict of a card's model, on no device: nothing is allocated.

    A custom model is made as it is: its code may keep what it has made once.
    """
    with nullcontext() if card.is_custom else without_memory():
        return card.build().state_dict()


def check_size(card: Card, arrays: Mapping[str, Tensor]) -> None:
    """Raise `SettingsError` unless a file's model is of the size of its arrays.

    Parameters
    ----------
    card : Card
        What settings of the file make of the model.
    arrays : dict of str to Tensor
        The file's arrays. Those that it lacks may have `MOST_NEW` numbers together.
    """
    new = 0
    for name, wanted in skeleton(card).items():
        if name in arrays:
            check_array(card, name, wanted, arrays)
        else:
            new += wanted.numel()
    require(new <= MOST_NEW, f"the size of {card}", new, f"at most {MOST_NEW:,}")


def check_array(
    card: Card, name: str, wanted: Tensor, arrays: Mapping[str, Tensor]
) -> None:
    """Raise `SettingsError` unless an array is there and of the wanted shape."""
    if name not in arrays:
        raise SettingsError(f"there is no array {name!r} for {card}")
    if arrays[name].shape != wanted.shape:
        raise SettingsError(
            f"array {name!r} is of shape {tuple(arrays[name].shape)}; {card} needs "
            f"{tuple(wanted.shape)}"
        )
