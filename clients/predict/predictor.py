"""A trained model as a function, for programs of one's own."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from flwr_frl.clients.device.card import Classifier, ModelCard
from flwr_frl.clients.predict.loading import BATCH, load_model, load_run
from flwr_frl.task.data.images import IMAGE_SUFFIXES, images_in
from flwr_frl.task.settings import Settings, SettingsError

# A file or a folder.
Place = str | os.PathLike[str]


class Prediction(NamedTuple):
    """What `Predictor` says of some images.

    Parameters
    ----------
    classes : list of str
        The likeliest class of each image.
    probabilities : ndarray
        Of each image and each of the predictor's ``classes``.
    """

    classes: list[str]
    probabilities: NDArray[np.float32]


class Predictor:
    """A trained image model: ``classifier(images)`` is a `Prediction`.

    Parameters
    ----------
    classifier : Classifier
        The model.
    card : ModelCard
        What its inputs and outputs are.
    """

    def __init__(self, classifier: Classifier, card: ModelCard) -> None:
        self.classifier, self.card = classifier, card

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of all classes, in the order of the probabilities."""
        return self.card.classes

    def __call__(
        self, images: Place | Sequence[Place] | NDArray[np.uint8]
    ) -> Prediction:
        """Classify images.

        Parameters
        ----------
        images : path, sequence of paths, or ndarray of uint8
            Image files of any size and folders of them, each in the order of names, or
            pixels (n, height, width, channels) as the model takes them. What is no
            image is a `SettingsError`.

        Returns
        -------
        Prediction
            ``classes`` and ``probabilities``, in the images' order.
        """
        if isinstance(images, np.ndarray):
            count, source = len(images), self._pixels(images)
            batches = (source[i : i + BATCH] for i in range(0, count, BATCH))
        else:
            places = [images] if isinstance(images, str | os.PathLike) else images
            files = files_in([Path(place) for place in places])
            starts = range(0, len(files), BATCH)
            batches = (self.card.read(files[i : i + BATCH]) for i in starts)
        with torch.no_grad():
            found = [self.classifier(batch).softmax(1).numpy() for batch in batches]
        empty = np.zeros((0, len(self.classes)), np.float32)
        probabilities = np.concatenate([empty, *found])
        best = probabilities.argmax(1) if len(probabilities) else []
        return Prediction([self.classes[int(i)] for i in best], probabilities)

    def _pixels(self, images: NDArray[np.uint8]) -> torch.Tensor:
        channels, height, width = self.card.shape
        shape = (height, width, channels)
        if images.ndim != 4 or images.shape[1:] != shape or images.dtype != np.uint8:
            raise SettingsError(
                f"images are {images.dtype} of shape {images.shape}; they must be "
                f"uint8 of shape (n, {height}, {width}, {channels}), or files"
            )
        return torch.from_numpy(np.ascontiguousarray(images))


def files_in(places: Sequence[Path]) -> list[Path]:
    """Return files, and for a folder the images in it; one must be there.

    Where it has only folders, as the classes of a data set, the images are in those.
    """
    files: list[Path] = []
    for path in places:
        # Of a name that is too long, too.
        if os.path.isdir(path):
            within = [] if _has_images(path) else sorted(path.iterdir())
            folders = [p for p in within if os.path.isdir(p) and _has_images(p)]
            for folder in folders or [path]:
                files += [Path(entry.path) for entry in images_in(folder)]
        elif os.path.isfile(path):
            files.append(path)
        else:
            raise SettingsError(f"there is no file or folder {str(path)!r}")
    return files


def _has_images(folder: Path) -> bool:
    return any(p.suffix.lower() in IMAGE_SUFFIXES for p in folder.iterdir())


def load(
    path: Place,
    client: str = "",
    state_dir: Place = "",
    data_dir: Place = "",
    task: str = "",
    algorithm: str = "",
    named: Settings | None = None,
) -> Predictor:
    """Load a trained image model to be called.

    Parameters
    ----------
    path : path
        A ``.safetensors`` that ``--export`` has written, or a run's ``DIR/ALGORITHM``.
    client : str, default ""
        Of a run, whose model it shall be: see `load_run`, also for the rest.
    state_dir, data_dir : path, default ""
        Of a device.
    task : str, default ""
        As for `load_model`.
    algorithm : str, default ""
        As for `load_run`.
    named : mapping, optional
        As for `load_model`.

    Returns
    -------
    Predictor
        ``classes, probabilities = predictor(images)``.

    Raises
    ------
    SettingsError
        If there is no such model, or it is not one of images.
    """
    place = Path(path)
    run = place.is_dir() or client
    model, card = (
        load_run(
            *(place, client, str(state_dir), str(data_dir), task),
            algorithm=algorithm,
            named=named,
        )
        if run
        else load_model(place, task, str(data_dir), named)
    )
    if not isinstance(model, Classifier) or not isinstance(card, ModelCard):
        raise SettingsError(
            f"{str(place)!r} is no model of images; `load_model`, `load_run` and "
            "`predict` are for all tasks"
        )
    return Predictor(model, card)
