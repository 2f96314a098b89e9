"""Predict with a trained model, export it to a file, and load it again."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flwr_frl.clients.device.card import CARD, card_of, read_card
from flwr_frl.common.errors import SettingsError, reading, reason_of, require
from flwr_frl.common.files import write_atomically
from flwr_frl.task.base import Task
from flwr_frl.task.data.datasets import IMAGE_SUFFIXES
from flwr_frl.task.data.tables import DataFrame
from flwr_frl.task.models import SplitModel
from flwr_frl.task.models.frozen import new_model
from flwr_frl.task.models.weights import FORMAT, pack_model, read_safetensors
from flwr_frl.task.tasks.image import ImageTask
from flwr_frl.task.tasks.table import TableTask

# Values of a model that a file of arrays may lack; 256 MiB of float32.
MAX_MISSING_VALUES = 2**26
# Number of images in memory at a time.
BATCH_SIZE = 64

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
    """

    def __init__(self, model: SplitModel, task: Task) -> None:
        self.model = model.eval()
        self.task = task

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
        several = list(self._inputs_of(inputs))
        require(len(several) > 0, "inputs", inputs, "one or more")
        # Texts may differ in length.
        size = BATCH_SIZE if isinstance(self.task, ImageTask | TableTask) else 1
        batches = (several[i : i + size] for i in range(0, len(several), size))
        outputs = torch.cat([self._outputs(batch) for batch in batches])
        if names := self.classes:
            best = [names[int(i)] for i in outputs.argmax(1)]
            return Prediction(best, outputs.softmax(1).numpy())
        if isinstance(self.task, TableTask):
            outputs = self.task.numbers(outputs)
        return Prediction([], outputs.numpy())

    def _inputs_of(self, inputs: Any) -> Iterable[tuple[str, str | Tensor]]:
        """Return the inputs, each with its place."""
        if isinstance(inputs, DataFrame) and isinstance(self.task, TableTask):
            return self.task.rows(inputs)
        listed = [inputs] if isinstance(inputs, str | os.PathLike) else inputs
        if not all(isinstance(each, str | os.PathLike) for each in listed):
            return [(f"input {i}", row) for i, row in enumerate(self._rows(inputs))]
        if isinstance(self.task, TableTask):
            return chain.from_iterable(map(self.task.rows, files_in(listed)))
        if isinstance(self.task, ImageTask):
            return [(str(path), str(path)) for path in files_in(listed)]
        return [(repr(text), text) for text in map(os.fspath, listed)]

    def export(self, path: FilePath) -> None:
        """Write the model to one ``.safetensors`` file, for `load_model`.

        It contains all arrays, what using them needs, and a checksum.

        Raises
        ------
        SettingsError
            If the model is not a built-in one of images or of a table, which the file
            could not describe.
        OSError
            If the file cannot be written.
        """
        tensors, card = self.model.state_dict(), card_of(self.task)
        more = sorted(tensors.keys() - self.task.initial_state.keys())
        allowed = "a built-in model of images or of a table, without additional parts"
        valid = card != "" and not more
        require(valid, "the model", type(self.task).__name__, allowed, "export")
        arrays = {name: tensor.contiguous() for name, tensor in tensors.items()}
        about = {"format": FORMAT, CARD: card}
        write_atomically(Path(path), pack_model(arrays, about))

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

    def _outputs(self, batch: Sequence[tuple[str, str | Tensor]]) -> Tensor:
        """Return the model's outputs for some inputs, each with its place."""
        read: list[Tensor] = []
        for place, each in batch:
            with unusable(place):
                read.append(self.task.read(each) if isinstance(each, str) else each)
        with unusable(batch[0][0]), torch.no_grad():
            outputs: Tensor = self.model(torch.stack(read))
        for (place, _), row in zip(batch, outputs, strict=True):
            with unusable(place):
                if not row.isfinite().all():
                    raise ValueError("the model's output is not finite")
        # The last position of a sequence holds the prediction.
        return outputs[..., -1] if self.classes and outputs.ndim > 2 else outputs


def load_model(path: FilePath) -> Predictor:
    """Load a model that `Predictor.export` has written.

    The file alone is needed. It cannot cause code to run, a path to be read or a host
    to be contacted.

    Parameters
    ----------
    path : path
        The ``.safetensors`` file.

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
    valid = metadata.get("format") == FORMAT and CARD in metadata
    require(valid, "model", str(path), "a file that Predictor.export has written")
    task = read_card(metadata[CARD]).task()
    check_size(task, arrays)
    model = new_model(task)
    check_arrays(model.state_dict(), arrays)
    model.load_state_dict(arrays, strict=False)
    return Predictor(model, task)


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


def check_arrays(wanted: Mapping[str, Tensor], arrays: Mapping[str, Any]) -> None:
    """Raise `SettingsError` unless all wanted arrays exist with their shapes."""
    for name, like in wanted.items():
        shape = tuple(arrays[name].shape) if name in arrays else None
        allowed = f"one of shape {tuple(like.shape)} for the model"
        require(shape == tuple(like.shape), f"array {name!r}", shape, allowed, "arrays")


def check_size(task: Task, arrays: Mapping[str, Any]) -> None:
    """Raise `SettingsError` if a model is far larger than a file's arrays.

    It allocates no memory.
    """
    with torch.device("meta"):
        size = sum(value.numel() for value in new_model(task).state_dict().values())
    limit = MAX_MISSING_VALUES + sum(prod(array.shape) for array in arrays.values())
    require(size <= limit, "the model's size", size, f"at most {limit:,}, as its file")
