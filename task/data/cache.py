"""Data sets, and the disk cache in which they are stored as ``.npy`` files.

A data set is read and written once, and memory-mapped afterwards, so that all processes
of a machine share one copy. The file `ABOUT` is written last, so a folder without it is
incomplete. Folders whose files are missing or truncated are written again.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from flwr_frl.common.files import atomic_file, write_atomically
from flwr_frl.common.ownership import cache_folder
from flwr_frl.common.settings import (
    Checked,
    PathText,
    SettingsError,
    require,
    setting,
    unknown,
)
from flwr_frl.task.data.images import Pictures

Integers = npt.NDArray[np.int64]

PARTS = ("train", "test")
ABOUT = "about.json"
# Fields of a data set that the file `ABOUT` has.
TEXTS = ("classes", "clients", "notes", "columns")
# Larger integers are probably not classes.
MAX_CLASSES = 100_000


EmnistSplit = Literal["balanced", "letters", "digits", "mnist", "byclass", "bymerge"]


@dataclass(frozen=True)
class DataSettings(Checked):
    """Location of a data set and selection of its classes.

    Parameters
    ----------
    data_dir : str, default ""
        Directory of the data: the root of torchvision's data sets (by default in the
        cache), an image folder, a folder with ``train.npz`` and ``test.npz``, or for
        ``hf`` the folder to read instead of a hub data set.
    cache_dir : str, default ""
        Directory of decoded data sets; by default ``~/.cache/flwr-frl``.
    num_classes : int, default 0
        Number of classes to use, starting from the first; 0 uses all.
    classes : str, default ""
        Comma-separated names of an image folder's classes, for devices that lack some
        of them; by default the names of the class folders.
    emnist_split : {"balanced", "letters", "digits", "mnist", "byclass", "bymerge"}
        Split of EMNIST that the task ``emnist`` uses; by default ``balanced``, with 47
        classes. SRPFL (appendix, "Datasets") uses its first ten classes, the digits:
        ``num-classes=10``.
    image_size : int, default 0
        Side in pixels, at most 4096, to which an image folder's images are resized; 0
        uses the size of the first image.
    """

    data_dir: PathText = setting(
        "", form="a directory", may_differ="on resume", per_device=True
    )
    cache_dir: PathText = setting(
        "", form="a directory", may_differ="always", per_device=True
    )
    num_classes: int = setting(0, ge=0)
    classes: str = setting("", form="names, separated by commas", safe=True)
    emnist_split: EmnistSplit = setting("balanced")
    image_size: int = setting(0, ge=0, le=4096)


@dataclass(frozen=True)
class ImageSet:
    """Labelled images, or rows of a table.

    Parameters
    ----------
    images : ndarray of uint8, shape (n, height, width, channels), or Pictures
        The images, possibly not decoded yet. For a table, its float32 inputs of shape
        (n, width), or (n, width, time) for windows; NaN if missing.
    labels : ndarray of int64, shape (n,)
        Class of each image, from 0; or float32, the number to predict from each row.
    owners : ndarray of int64, shape (n,), optional
        Client of each image, if the data is already split over clients.
    """

    images: Any
    labels: npt.NDArray[Any]
    owners: Integers | None = None

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def __getitem__(self, rows: slice | Integers) -> "ImageSet":
        """Return some of the images; a slice copies none of them."""
        owners = None if self.owners is None else self.owners[rows]
        return ImageSet(self.images[rows], self.labels[rows], owners)


@dataclass(frozen=True)
class Dataset:
    """A training and a test set with the names of their classes.

    Parameters
    ----------
    train, test : ImageSet
        The two sets.
    classes : tuple of str
        Names of the classes, by label; empty if labels are numbers.
    clients : tuple of str, default ()
        Names of the clients if the data is already split over clients.
    notes : tuple of str, default ()
        Notices for users.
    columns : tuple of str, default ()
        Names of a table's input columns.
    """

    train: ImageSet
    test: ImageSet
    classes: tuple[str, ...]
    clients: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()


# Reads a data set from its source.
Read = Callable[[], Dataset]


def named_classes(names: str, found: Sequence[str]) -> tuple[str, ...]:
    """Return the classes of the setting ``classes``; by default those in the data.

    Raises
    ------
    SettingsError
        If a name is repeated, or a class in the data is not named.
    """
    named = [name.strip() for name in names.split(",") if name.strip()]
    unique = len(set(named)) == len(named)
    require(unique, "classes", names, "names without duplicates")
    for name in found if named else ():
        if name not in named:
            raise unknown("class", name, named, code="classes")
    return tuple(named or found)


def stamp(paths: Iterable[Path]) -> str:
    """Return a key that changes when one of some files does."""
    digest = hashlib.sha256()
    for path in paths:
        version = ""
        # Decoding reports broken links.
        with suppress(OSError):
            stat = path.stat()
            version = f"{stat.st_size}-{stat.st_mtime_ns}"
        # Names need not be valid Unicode.
        digest.update(os.fsencode(f"{os.fspath(path)}/{version}\n"))
    return digest.hexdigest()


def cache_root(settings: DataSettings) -> Path:
    """Return the folder of the cache."""
    if settings.cache_dir:
        return Path(settings.cache_dir).expanduser()
    return cache_folder()


def load(key: str, read: Read, settings: DataSettings) -> Dataset:
    """Load the chosen classes of a data set, from the cache if it is there.

    Parameters
    ----------
    key : str
        Identifies the data set's content; may contain names of files.
    read : callable
        Reads the data set from its source.
    settings : DataSettings
        Location of the cache, and number of classes.

    Raises
    ------
    SettingsError
        If the data cannot be read, the cache cannot be written, or the disk is full.
    """
    directory = cache_root(settings) / hashlib.sha256(os.fsencode(key)).hexdigest()[:24]
    try:
        dataset = _mapped(directory)
    # Missing or truncated files
    except (OSError, ValueError, EOFError):
        try:
            _write(read(), directory)
        except OSError as error:
            raise SettingsError(
                f"the data cache {str(directory.parent)!r} cannot be written "
                f"({error}); set cache-dir to a directory with enough space",
                "cache-dir",
            ) from None
        dataset = _mapped(directory)
    total = len(dataset.classes)
    count = settings.num_classes or total
    allowed = f"0 (all) or from 2 to {total}"
    require(count == total or 2 <= count <= total, "num-classes", count, allowed)
    return replace(
        dataset,
        train=_first_classes(dataset.train, count),
        test=_first_classes(dataset.test, count),
        classes=dataset.classes[:count],
    )


def _first_classes(examples: ImageSet, count: int) -> ImageSet:
    """Return the examples of the first classes."""
    if not count:
        return examples
    selected = examples.labels < count
    # Images sorted by class stay memory-mapped: a slice copies nothing.
    leading = bool((np.diff(selected.astype(np.int8)) <= 0).all())
    return examples[slice(int(selected.sum())) if leading else np.flatnonzero(selected)]


def _mapped(directory: Path) -> Dataset:
    """Return the data set in a folder of the cache."""
    about = json.loads((directory / ABOUT).read_text("utf-8"))
    names = ("images", "labels", "owners") if about["clients"] else ("images", "labels")
    train, test = (
        ImageSet(
            *(np.load(directory / f"{part}-{n}.npy", mmap_mode="r") for n in names)
        )
        for part in PARTS
    )
    texts = (tuple(about.get(name, ())) for name in TEXTS)
    return Dataset(train, test, *texts)


def _write(dataset: Dataset, directory: Path) -> None:
    """Write the files of a data set; other processes may write the same ones."""
    for part, examples in zip(PARTS, (dataset.train, dataset.test), strict=True):
        for name, values in vars(examples).items():
            if values is None:
                continue
            with atomic_file(directory / f"{part}-{name}.npy") as file:
                if isinstance(values, Pictures):
                    values.write(file)
                else:
                    np.save(file, np.ascontiguousarray(values), allow_pickle=False)
    about = {name: getattr(dataset, name) for name in TEXTS}
    write_atomically(directory / ABOUT, json.dumps(about).encode())
