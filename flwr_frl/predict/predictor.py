"""Predict from images, or from lines of text files, with a trained model."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flwr_frl.clients.device.card import ModelCard
from flwr_frl.common.settings import Settings, SettingsError, printable, reason_of
from flwr_frl.predict.loading import Model, load_model, load_run
from flwr_frl.task.data.images import IMAGE_SUFFIXES, images_in

# Number of images in memory at a time.
BATCH_SIZE = 64

# Access that reading a folder requires.
READ = os.R_OK | os.X_OK
# Path of a file or a folder.
FilePath = str | os.PathLike[str]


class Prediction(NamedTuple):
    """Classes and probabilities of some images.

    Parameters
    ----------
    classes : list of str
        The most probable class of each image.
    probabilities : ndarray of float32
        Shape (images, classes), 0 to 1.
    """

    classes: list[str]
    probabilities: NDArray[np.float32]


class Predictor:
    """A trained image model that can be called: ``predictor(images)``.

    Parameters
    ----------
    classifier : Classifier
        The model.
    card : ModelCard
        Its card; `SettingsError` if the model does not take images.
    """

    def __init__(self, classifier: Model, card: ModelCard) -> None:
        if card.images is None:
            raise SettingsError(
                f"the model of {card} does not take images; use `load_model` or "
                "`load_run`, and `predict`"
            )
        self.classifier, self.card, self.images = classifier, card, card.images

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of all classes, in the order of the probabilities."""
        return self.card.classes

    def __call__(
        self, images: FilePath | Sequence[FilePath] | NDArray[np.uint8]
    ) -> Prediction:
        """Classify images.

        Parameters
        ----------
        images : path, sequence of paths, or ndarray of uint8
            Image files of any size and folders of images, sorted by name, or pixels
            (n, height, width, channels) of the model's input size.

        Returns
        -------
        Prediction
            ``classes`` and ``probabilities``, in the order of the images.

        Raises
        ------
        SettingsError
            If a file is missing or is not an image, the pixels have another type or
            shape, or outputs are not finite.
        """
        if isinstance(images, np.ndarray):
            return self.classify(self._checked(images))
        paths = [images] if isinstance(images, str | os.PathLike) else images
        return self.classify(files_in([Path(path) for path in paths]))

    def classify(self, images: Sequence[Path] | Tensor) -> Prediction:
        """Classify image files, or pixels as the model takes them, batch by batch."""
        batches = [np.zeros((0, len(self.classes)), np.float32)]
        with torch.no_grad():
            for start in range(0, len(images), BATCH_SIZE):
                batch = images[start : start + BATCH_SIZE]
                if not isinstance(batch, Tensor):
                    batch = self.images.read_pixels(batch)
                outputs: Tensor = self.classifier(batch)
                finite = outputs.isfinite().all(1)
                if not finite.all():
                    number = start + int(finite.int().argmin())
                    is_pixels = isinstance(images, Tensor)
                    place = f"image {number}" if is_pixels else str(images[number])
                    raise _not_finite(place)
                batches.append(outputs.softmax(1).numpy())
        probabilities = np.concatenate(batches)
        labels = probabilities.argmax(1) if len(probabilities) else []
        return Prediction([self.classes[int(i)] for i in labels], probabilities)

    def _checked(self, pixels: NDArray[np.uint8]) -> Tensor:
        channels, height, width = self.images.shape
        shape = (height, width, channels)
        if pixels.ndim != 4 or pixels.shape[1:] != shape or pixels.dtype != np.uint8:
            raise SettingsError(
                f"images are {pixels.dtype} of shape {pixels.shape}; they must be "
                f"uint8 of shape (n, {height}, {width}, {channels}), or files"
            )
        return torch.from_numpy(np.ascontiguousarray(pixels))


def files_in(paths: Sequence[Path]) -> list[Path]:
    """Expand folders to the images in them.

    A folder without images is replaced by its subfolders with images, such as the class
    folders of a data set; those that cannot be read are skipped. A missing or
    unreadable path, or a folder without any image, raises `SettingsError`.
    """
    files: list[Path] = []
    for path in paths:
        # os.path, unlike Path, also accepts names that are too long.
        if os.path.isdir(path):
            try:
                within = [] if _has_images(path) else sorted(path.iterdir())
            except OSError as error:
                raise SettingsError(f"{str(path)!r} cannot be read: {error}") from None
            readable = [p for p in within if os.path.isdir(p) and os.access(p, READ)]
            folders = [p for p in readable if _has_images(p)]
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
    path: FilePath,
    client: str = "",
    state_dir: FilePath = "",
    data_dir: FilePath = "",
    task: str = "",
    algorithm: str = "",
    named: Settings | None = None,
) -> Predictor:
    """Load a trained image model as a function.

    Parameters
    ----------
    path : path
        A ``.safetensors`` file that ``--export`` has written, or a run's
        ``DIR/ALGORITHM``.
    client, state_dir, algorithm : str, default ""
        As for `load_run`; ``client`` selects whose model of a run is loaded.
    data_dir, task, named
        As for `load_run` and `load_model`.

    Returns
    -------
    Predictor
        ``classes, probabilities = predictor(images)``.

    Raises
    ------
    SettingsError
        If there is no such model, or it does not take images.
    """
    path, data_dir = Path(path), str(data_dir)
    if path.is_dir() or client:
        places = str(state_dir), data_dir
        loaded = load_run(path, client, *places, task, algorithm=algorithm, named=named)
    else:
        loaded = load_model(path, task, data_dir, named)
    return Predictor(*loaded)


def predict(
    model: Model, card: ModelCard, files: Sequence[Path]
) -> Iterator[tuple[str, ...]]:
    """Predict from images, or from each nonempty line of text files.

    Parameters
    ----------
    model, card
        A model in evaluation mode and its card, as `load_run` returns them.
    files : sequence of Path
        Image files, or text files whose lines the task reads, each a table row or a
        text. A task without an image model receives the path of an image as a line.

    Yields
    ------
    input, class name, probability
        A tuple for each image or line. Without classes, it contains the input and the
        outputs.

    Raises
    ------
    SettingsError
        If a file is empty or cannot be read, if the task or the model rejects an input,
        or if outputs are not finite.
    """
    if card.images is not None:
        predictor = Predictor(model, card)
        for start in range(0, len(files), BATCH_SIZE):
            batch = files[start : start + BATCH_SIZE]
            for path, name, row in zip(batch, *predictor.classify(batch), strict=True):
                yield str(path), name, f"{row.max():.4f}"
        return
    for path in files:
        if path.suffix.lower() in IMAGE_SUFFIXES:
            yield str(path), *_outputs(model, card, str(path), str(path))
            continue
        try:
            lines = path.read_text(encoding="utf-8-sig").split("\n")
        except (OSError, ValueError) as error:
            raise SettingsError(f"{str(path)!r} cannot be read: {error}") from None
        if not any(map(str.strip, lines)):
            raise SettingsError(f"{str(path)!r} has nothing to predict from")
        for number, line in enumerate(lines, 1):
            if line.strip():
                place = f"{path}:{number}"
                yield place, *_outputs(model, card, line, place)


def _outputs(model: Model, card: ModelCard, line: str, place: str) -> tuple[str, ...]:
    """Return the class name and its probability for a line, or the outputs."""
    try:
        with torch.no_grad():
            outputs: Tensor = model(card.task.read(line)[None])[0]
    # A custom reader or model can raise any exception.
    except Exception as error:
        reason = reason_of(error)
        raise SettingsError(f"{place} cannot be predicted from: {reason}") from None
    if not outputs.isfinite().all():
        raise _not_finite(place)
    if not card.classes:
        return tuple(f"{value:.6g}" for value in outputs.flatten().tolist())
    # The last position of a sequence holds the prediction.
    scores = outputs if outputs.ndim == 1 else outputs[:, -1]
    if scores.ndim != 1:
        shape = tuple(outputs.shape)
        text = f"the model's output has shape {shape}; expected a score per class"
        raise SettingsError(f"{place} cannot be predicted from: {text}")
    probability, label = scores.softmax(0).max(0)
    return printable(card.classes[int(label)]), f"{float(probability):.4f}"


def _not_finite(place: str) -> SettingsError:
    return SettingsError(
        f"{place} cannot be predicted from: the model's output is not finite"
    )
