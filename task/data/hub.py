"""Data sets of Hugging Face's ``datasets``: of its hub, or of a folder or file.

They are read once, into the cache, from which `Dataset` is mapped; ``datasets`` itself,
which takes a second to import, is then needed no more.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from flwr_frl.task.data.cache import pixel_file
from flwr_frl.task.data.columns import (
    MAX_CLASSES,
    Values,
    choose,
    classes_of,
    numbers_of,
)
from flwr_frl.task.data.datasets import DataSettings, need_space, save
from flwr_frl.task.data.folders import FORM, SEEN
from flwr_frl.task.data.images import about_faded, channels_of, pixels_of, upright
from flwr_frl.task.settings import Free, Place, Range, SettingsError, need, require

# Fixes who tests where nobody else has said it.
HELD_OUT = 0x4E1D
# What `save_to_disk` writes.
SAVED = ("dataset_dict.json", "state.json")


@dataclass(frozen=True)
class ColumnSettings(DataSettings):
    """Which columns and splits of a data set are used.

    Parameters
    ----------
    input_columns : str, default ""
        The column with the images, or those with numbers, with commas between (``*``:
        all of them but the label); by default the only one of images or lists.
    label_column : str, default ""
        The column with the classes; by default the only one that names its classes, or
        one called ``label``, ``labels``, ``target`` or ``class``.
    train_split : str, default "train"
        The split that trains.
    test_split : str, default ""
        The split that tests; by default ``test`` or ``validation``. Where there is
        none, a part of the training split is held out.
    test_fraction : float, default 0.2
        The share that is held out; for all seeds the same examples.
    data_subset : str, default ""
        Name of the data set's configuration, where it has several.
    """

    input_columns: Annotated[str, Free("columns, with commas between")] = ""
    label_column: Annotated[str, Free("a column")] = ""
    train_split: Annotated[str, Free("a split")] = "train"
    test_split: Annotated[str, Free("a split")] = ""
    test_fraction: Annotated[float, Range("(0, 1)")] = 0.2
    data_subset: Annotated[str, Free("a configuration")] = ""


class Read(NamedTuple):
    """What of a data set is used.

    Parameters
    ----------
    parts : dict of str to datasets.Dataset
        The examples for ``train`` and ``test``.
    inputs : list of str
        Columns.
    labels : dict of str to ndarray of int64
        Class of each example.
    classes, notes : tuple of str
        As in `Dataset`.
    """

    parts: dict[str, Any]
    inputs: list[str]
    labels: dict[str, Values]
    classes: tuple[str, ...]
    notes: tuple[str, ...]


class HubData:
    """A data set and the columns of it that are used.

    Parameters
    ----------
    name : str
        Its name on the hub, or a folder: one that ``save_to_disk`` made, one of images
        (``train/<class>/*``), or one of Parquet, CSV or JSON files; or such a file.
    settings : ColumnSettings
        What of it is used; ``data_dir`` stands in for the name.
    """

    def __init__(self, name: str, settings: ColumnSettings) -> None:
        self.settings = settings
        self.name = settings.data_dir or name
        require(bool(self.name), "task", "hf", "hf:NAME, or have a data-dir")
        require(
            Place().permits(self.name), "task", f"hf:{self.name}", "a name or a path"
        )
        self.path = Path(self.name).expanduser()
        if self.name.startswith((".", "/", "~")) and not self.path.exists():
            raise SettingsError(f"{self.name!r} is no data set: there is no such path")

    @property
    def key(self) -> str:
        """What changes with the data and the choice of columns.

        Of a data set of the hub it is the name alone.
        """
        own = self.settings
        chosen = own.input_columns, own.label_column, own.train_split, own.test_split
        more = own.test_fraction, own.data_subset, own.image_size
        found = [self.name]
        if self.path.exists():
            files = sorted(p for p in self.path.rglob("*") if p.is_file())
            found = [str(self.path.resolve())]
            for path in files or [self.path]:
                stat = path.stat()
                found.append(f"{path}/{stat.st_size}/{stat.st_mtime_ns}")
        digest = hashlib.sha256("\n".join(found).encode(errors="surrogateescape"))
        return f"hf/1{FORM}/{digest.hexdigest()}/{chosen}/{more}"

    def write(self, directory: Path) -> None:
        """Write the files of the data set, as `Dataset` has them."""
        found = self._read
        import datasets

        first = found.inputs[0]
        images = isinstance(found.parts["train"].features[first], datasets.Image)
        arrays: dict[str, Values] = {}
        for part, codes in found.labels.items():
            arrays[f"{part}-labels"] = codes
            arrays[f"{part}-owners"] = np.full_like(codes, -1)
            if not images:
                rows = found.parts[part]
                numbers = [numbers_of(rows, own, self.name) for own in found.inputs]
                arrays[f"{part}-images"] = np.concatenate(numbers, axis=1)
        need_space(directory, sum(array.nbytes for array in arrays.values()))
        notes = found.notes
        if images:
            notes += self._write_images(directory, first)
        save(directory, {**arrays, "notes": np.array(notes, np.str_)}, found.classes)

    def columns(self) -> Any:
        """Return all but the inputs of the examples, those for training first."""
        found, below = self._read, self.settings.num_classes or MAX_CLASSES
        import datasets

        kept = []
        for part, codes in found.labels.items():
            others = found.parts[part].remove_columns(found.inputs)
            kept.append(others.select(np.flatnonzero(codes < below)))
        return datasets.concatenate_datasets(kept)

    # What is read.

    @cached_property
    def _read(self) -> Read:
        need("datasets", "hf", f"the data set {self.name!r}")
        import datasets

        datasets.disable_progress_bars()
        try:
            parts, notes = self._split(self._load())
        except SettingsError:
            raise
        # Somebody's data, or the network: it can be anything.
        except Exception as error:
            raise SettingsError(
                f"the data set {self.name!r} cannot be loaded: {type(error).__name__}: "
                f"{' '.join(str(error).split())}"
            ) from error
        for part, rows in parts.items():
            if len(rows) == 0:
                raise SettingsError(f"{self.name!r} has no examples to {part}")
        inputs, label = choose(parts["train"].features, self.settings, self.name)
        labels, classes = classes_of(parts, label, self.name)
        return Read(parts, inputs, labels, classes, notes)

    def _load(self) -> dict[str, Any]:
        """Return the splits by name."""
        import datasets

        own = self.settings
        where, options = self.name, dict[str, Any]()
        if own.cache_dir:
            cache = Path(own.cache_dir).expanduser() / "huggingface"
            options["cache_dir"] = str(cache)
        if self.path.is_file():
            where, options["data_files"] = str(self.path.parent), self.path.name
        elif self.path.exists():
            where = str(self.path)
        if any((self.path / name).exists() for name in SAVED):
            found = datasets.load_from_disk(where)
        else:
            found = datasets.load_dataset(where, own.data_subset or None, **options)
        single = isinstance(found, datasets.Dataset)
        return {own.train_split: found} if single else dict(found)

    def _split(self, splits: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the examples that train and those that test, and what to say."""
        own = self.settings
        known = f"one of {', '.join(splits)}"
        require(own.train_split in splits, "train-split", own.train_split, known)
        require(own.test_split in ("", *splits), "test-split", own.test_split, known)
        train = splits[own.train_split]
        usual = [name for name in ("test", "validation") if name in splits]
        others = [name for name in usual if name != own.train_split]
        if name := own.test_split or next(iter(others), ""):
            test = splits[name]
            if test.features != train.features:
                test = test.cast(train.features)
            return {"train": train, "test": test}, ()
        n = len(train)
        count = max(1, round(n * own.test_fraction))
        few = f"such that of {n} examples some train"
        require(count < n, "test-fraction", own.test_fraction, few)
        order = np.random.default_rng(HELD_OUT).permutation(n)
        parts = {"train": order[count:], "test": order[:count]}
        note = (
            f"{self.name!r} has no test split: {count} of the {n} examples of "
            f"{own.train_split!r} are held out for testing"
        )
        return {part: train.select(np.sort(at)) for part, at in parts.items()}, (note,)

    def _write_images(self, directory: Path, name: str) -> tuple[str, ...]:
        """Write the pixels of each part, one image after the other; return notes."""
        from rich.progress import Progress

        parts, size = self._read.parts, self.settings.image_size
        seen = islice(self._images("train", name), SEEN)
        # The first decides the size; a single one with colours makes it 3 channels.
        sizes, counts = zip(*((i.size, channels_of(i)) for i in seen), strict=True)
        channels = max(counts)
        width, height = (size, size) if size else sizes[0]
        shape = (height, width, channels)
        total = sum(map(len, parts.values()))
        need_space(directory, total * int(np.prod(shape)))
        faded: list[str] = []
        with Progress(transient=True) as bar:
            task = bar.add_task("Decoding images (once)", total=total)
            for part, rows in parts.items():
                with pixel_file(directory, part, len(rows), shape) as file:
                    for i, image in enumerate(self._images(part, name)):
                        place = f"image {i} of {part!r} of {self.name!r}"
                        if channels_of(image) > channels:
                            faded.append(place)
                        try:
                            pixels = pixels_of(image, channels, (width, height))
                        except SettingsError as error:
                            raise SettingsError(f"{place}: {error}") from None
                        file.write(np.ascontiguousarray(pixels).data)
                        bar.advance(task)
        return about_faded(len(faded), total, next(iter(faded), ""))

    def _images(self, part: str, name: str) -> Iterator[Any]:
        """Yield the images of a part, decoded."""
        rows = iter(self._read.parts[part].select_columns([name]))
        for i in range(len(self._read.parts[part])):
            try:
                image = upright(next(rows)[name])
            # A damaged file can raise nearly anything in a decoder.
            except Exception as error:
                raise SettingsError(
                    f"image {i} of {part!r} of {self.name!r} cannot be read: "
                    f"{type(error).__name__}: {' '.join(str(error).split())}"
                ) from None
            yield image
