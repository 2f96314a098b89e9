"""Predict with a trained model, export it to a file, and load it again."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flwr_frl.clients.device.card import CARD, card_of, read_card, read_json
from flwr_frl.common.files import write_atomically
from flwr_frl.common.settings import (
    Setting,
    Settings,
    SettingsError,
    is_path,
    printable,
    reading,
    reason_of,
    require,
)
from flwr_frl.predict.file_settings import FileSettings
from flwr_frl.task.base import Task
from flwr_frl.task.data.images import IMAGE_SUFFIXES
from flwr_frl.task.data.tables import DataFrame
from flwr_frl.task.models import SplitModel
from flwr_frl.task.models.frozen import frozen_tensors, new_model
from flwr_frl.task.models.weights import FORMAT, pack_model, read_safetensors
from flwr_frl.task.tasks import build_task, model_settings
from flwr_frl.task.tasks.image import ImageTask
from flwr_frl.task.tasks.table import TableTask

# Values of a model that a file of arrays may lack; 256 MiB of float32.
MAX_MISSING_VALUES = 2**26
# Number of images in memory at a time.
BATCH_SIZE = 64
# Metadata key of an exported model: the settings of its task, if it has no card.
TASK = "task"

FilePath = str | os.PathLike[str]
Inputs = FilePath | Sequence[Any] | NDArray[Any] | Tensor | DataFrame


class Prediction(NamedTuple):
    """Predictions for some inputs.

    Parameters
    ----------
    classes : list of str
        The most probable class of each input; empty if the targets are numbers.
    outputs : ndarray
        Probabilities, of shape (inputs, classes); without classes, the outputs of the
        model.
    """

    classes: list[str]
    outputs: NDArray[np.floating[Any]]


class Predictor:
    """A trained model that can be called: ``classes, probabilities = predictor(x)``.

    Parameters
    ----------
    model : SplitModel
        The model, with the parts ``representation`` and ``head``.
    task : Task
        Reads its inputs.
    settings : mapping, default {}
        Settings of the task; not needed for a built-in image model.
    """

    def __init__(
        self, model: SplitModel, task: Task, settings: Settings | None = None
    ) -> None:
        self.model = model.eval()
        self.task = task
        self._settings = settings or {}

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the probabilities; may be empty."""
        return tuple(map(str, self.task.classes))

    def __call__(self, inputs: Inputs) -> Prediction:
        """Predict.

        Parameters
        ----------
        inputs : str, path, sequence of them, array or data frame
            Image files of any size and folders of images; tables with a header; or
            lines of text, of other tasks. An array holds inputs of the model; for an
            image task uint8 pixels (n, height, width, channels) like those of the
            training, for a table numbers in its units. Nested lists of numbers are
            arrays. For a table, a data frame (pandas, Polars) needs the same columns.

        Returns
        -------
        Prediction
            In the order of the inputs.

        Raises
        ------
        SettingsError
            If an input is missing or unsuitable, or an output is not finite.
        """
        listed: Any = [inputs] if isinstance(inputs, str | os.PathLike) else inputs
        is_frame = isinstance(inputs, DataFrame)
        several: list[tuple[str, str | Tensor]]
        if isinstance(inputs, DataFrame) and isinstance(self.task, TableTask):
            several = list(self.task.rows(inputs))
        elif is_frame or not all(isinstance(x, str | os.PathLike) for x in listed):
            several = [(f"input {i}", row) for i, row in enumerate(self._rows(inputs))]
        else:
            texts = [os.fspath(each) for each in listed]
            if isinstance(self.task, ImageTask):
                texts = list(map(str, files_in(texts)))
            several = [pair for text in texts for pair in self._inputs_of(text)]
        require(len(several) > 0, "inputs", inputs, "one or more")
        parts = [prediction for _, prediction in self._batches(several)]
        classes = [name for part in parts for name in part.classes]
        return Prediction(classes, np.concatenate([part.outputs for part in parts]))

    def _inputs_of(self, text: str) -> Iterator[tuple[str, str | Tensor]]:
        """Yield the inputs that a text names, each with its place."""
        if isinstance(self.task, TableTask) and os.path.isfile(text):
            yield from self._lines(Path(text))
        else:
            yield repr(text), text

    def rows(self, paths: Sequence[FilePath]) -> Iterator[tuple[str, ...]]:
        """Yield the predictions for images, rows of tables or nonempty lines of text.

        Parameters
        ----------
        paths : sequence of paths
            Images, folders of images, tables with a header, or text files whose lines
            the task reads.

        Yields
        ------
        input, class name, probability
            A tuple of text for each image or line. Without classes, it contains the
            input and the outputs.

        Raises
        ------
        SettingsError
            If a file has no lines, or its content does not fit the model.
        """
        several = [pair for path in files_in(paths) for pair in self._lines(path)]
        for places, (classes, outputs) in self._batches(several):
            for i, place in enumerate(places):
                if classes:
                    yield place, printable(classes[i]), f"{outputs[i].max():.4f}"
                else:
                    yield place, *(f"{value:.6g}" for value in outputs[i].flatten())

    def export(self, path: FilePath) -> None:
        """Write the model to one ``.safetensors`` file, for `load_model`.

        It contains all arrays, also the frozen ones, and a checksum.

        Raises
        ------
        SettingsError
            If the file has another suffix, or if the model has more parts than the
            task's, as with some algorithms.
        OSError
            If the file cannot be written.
        """
        path = Path(path)
        valid = path.suffix == ".safetensors"
        require(valid, "export", str(path), "a name that ends with .safetensors")
        tensors = self.model.state_dict()
        more = sorted(tensors.keys() - self.task.initial_state.keys())
        allowed = (
            "none: only the run itself can build a model with more than the task's"
        )
        require(not more, "the model's additional parts", more, allowed, "export")
        copies = {
            # Tied parameters and frozen tensors may share memory.
            name: tensor.clone(memory_format=torch.contiguous_format)
            for name, tensor in {**tensors, **frozen_tensors(self.model)}.items()
        }
        write_atomically(path, pack_model(copies, self._about()))

    def _about(self) -> dict[str, str]:
        if card := card_of(self.task):
            return {"format": FORMAT, CARD: card}
        # The file has the weights. Some values that it lacks are drawn with the seed.
        names = {*model_settings(str(self._settings["task"]))} - {"weights"}
        names = (names | {"task", "seed", "num-clients"}) & self._settings.keys()
        settings = {name: self._settings[name] for name in sorted(names)}
        return {"format": FORMAT, TASK: json.dumps(settings)}

    def _lines(self, path: Path) -> Iterator[tuple[str, str | Tensor]]:
        """Yield each place in a file with an input, or the text for ``task.read``."""
        if isinstance(self.task, TableTask):
            yield from self.task.rows(path)
            return
        if isinstance(self.task, ImageTask) or path.suffix.lower() in IMAGE_SUFFIXES:
            yield str(path), str(path)
            return
        with unusable(repr(str(path))):
            lines = path.read_text(encoding="utf-8-sig").split("\n")
            if not any(map(str.strip, lines)):
                raise ValueError("it has no lines")
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield f"{path}:{number}", line

    def _rows(self, inputs: Any) -> Tensor:
        """Return an array, or nested lists, as the model takes it."""
        with unusable("inputs"):
            is_tensor = isinstance(inputs, Tensor)
            tensor = torch.as_tensor(inputs if is_tensor else np.asarray(inputs))
        if isinstance(self.task, TableTask):
            return self.task.prepared(tensor.numpy())
        if not isinstance(self.task, ImageTask):
            dtype = next(self.model.parameters()).dtype
            return tensor.to(dtype) if tensor.is_floating_point() else tensor
        shape = self.task.dataset.train.images.shape[1:]
        valid = tensor.dtype == torch.uint8 and tensor.shape[1:] == shape
        given, size = (tensor.dtype, tuple(tensor.shape)), ", ".join(map(str, shape))
        require(valid, "inputs", given, f"uint8 pixels of shape (n, {size}), or files")
        return ((tensor - self.task.mean) / self.task.std).permute(0, 3, 1, 2)

    def _batches(
        self, inputs: Sequence[tuple[str, str | Tensor]]
    ) -> Iterator[tuple[tuple[str, ...], Prediction]]:
        """Yield places and predictions of inputs, each with its place."""
        # Texts may differ in length.
        alike = isinstance(self.task, ImageTask | TableTask)
        size = BATCH_SIZE if alike else 1
        for start in range(0, len(inputs), size):
            places, batch = zip(*inputs[start : start + size], strict=True)
            read = []
            for place, value in zip(places, batch, strict=True):
                with unusable(place):
                    is_read = isinstance(value, Tensor)
                    read.append(value if is_read else self.task.read(value))
            with unusable(places[0]), torch.no_grad():
                outputs: Tensor = self.model(torch.stack(read))
            for place, row in zip(places, outputs, strict=True):
                with unusable(place):
                    if not row.isfinite().all():
                        raise ValueError("the model's output is not finite")
            yield places, self._prediction(outputs)

    def _prediction(self, outputs: Tensor) -> Prediction:
        names = self.classes
        if not names:
            if isinstance(self.task, TableTask):
                outputs = self.task.numbers(outputs)
            return Prediction([], outputs.numpy())
        # The last position of a sequence holds the prediction.
        scores = outputs if outputs.ndim == 2 else outputs[..., -1]
        best = [names[int(i)] for i in scores.argmax(1)]
        return Prediction(best, scores.softmax(1).numpy())


def load_model(path: FilePath, **settings: Setting | Path) -> Predictor:
    """Load a model that `Predictor.export` has written.

    Parameters
    ----------
    path : path
        The ``.safetensors`` file.
    **settings
        Settings that the file alone cannot set, with ``_`` in place of ``-``: ``task``
        if the file names an import path or a task that downloads its data, and
        ``data_dir`` if the task reads a folder. A file alone never causes code to run,
        a path to be read or a host to be contacted. Built-in image models need none.

    Returns
    -------
    Predictor
        The model.

    Raises
    ------
    SettingsError
        If the file is missing, damaged or of another kind.
    """
    path = Path(path)
    with reading(path, "model"):
        metadata, arrays = read_safetensors(path)
    valid = metadata.get("format") == FORMAT
    require(valid, "model", str(path), "a file that --export has written")
    of_task: Settings = {}
    if CARD in metadata:
        task: Task = read_card(metadata[CARD]).task()
    else:
        written = read_json(dict[str, Setting], metadata.get(TASK, ""))
        files = FileSettings.of(written, settings)
        files.need_task()
        of_task = files.settings
        task = build_task(of_task, max(0, int(of_task["num-clients"])))
    check_size(task, arrays, of_task)
    model = new_model(task)
    state = {**model.state_dict(), **frozen_tensors(model)}
    check_arrays(state, arrays)
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(arrays[name])
    return Predictor(model, task, of_task)


def files_in(paths: Sequence[FilePath]) -> list[Path]:
    """Return files, with folders replaced by the images in them and in their folders.

    A missing path, or a folder without images, raises `SettingsError`.
    """
    files: list[Path] = []
    for path in paths:
        # os.path, unlike Path, also accepts names that are too long.
        if os.path.isdir(path):
            within = sorted(p for p in Path(path).rglob("*") if p.is_file())
            images = [p for p in within if p.suffix.lower() in IMAGE_SUFFIXES]
            require(len(images) > 0, "folder", str(path), "one with images")
            files += images
        else:
            require(os.path.isfile(path), "file", str(path), "one that exists")
            files.append(Path(path))
    return files


@contextmanager
def unusable(place: str) -> Iterator[None]:
    """Name the input that has no prediction.

    Decoders, custom readers and custom models can raise any exception.
    """
    try:
        yield
    except Exception as error:
        line = f"{place} cannot be predicted from: {reason_of(error)}"
        raise SettingsError(line, "inputs") from None


def check_arrays(wanted: Mapping[str, Tensor], arrays: Mapping[str, Tensor]) -> None:
    """Raise `SettingsError` unless all wanted arrays exist with their shapes."""
    for name, like in wanted.items():
        shape = tuple(arrays[name].shape) if name in arrays else None
        allowed = f"one of shape {tuple(like.shape)} for the model"
        require(shape == tuple(like.shape), f"array {name!r}", shape, allowed, "arrays")


def check_size(task: Task, arrays: Mapping[str, Tensor], settings: Settings) -> None:
    """Raise `SettingsError` if a built-in model is far larger than a file's arrays.

    It allocates no memory. A custom model is built by code that the user has named.
    """
    if is_path(settings.get("task", "")):
        return
    with torch.device("meta"):
        size = sum(value.numel() for value in new_model(task).state_dict().values())
    limit = MAX_MISSING_VALUES + sum(array.numel() for array in arrays.values())
    require(size <= limit, "the model's size", size, f"at most {limit:,}, as its file")
