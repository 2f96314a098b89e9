"""Data sets, and the disk cache in which they are stored as ``.npy`` files.

A data set is read and written once, and memory-mapped afterwards, so that all processes
of a machine share one copy. Folders appear in the cache all at once. Those whose files
are missing or have another size are written again.
"""

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flwr_frl.common.files import sync
from flwr_frl.common.settings import SettingsError
from flwr_frl.task.data.images import Pictures

Integers = npt.NDArray[np.int64]

PARTS = ("train", "test")
ABOUT = "about.json"
# Prefix of unfinished folders. It must not match the files of other programs.
PARTIAL = ".flwr-frl-partial-"
# Seconds since its last change after which a partial folder counts as abandoned.
PARTIAL_AGE = 3600.0


@dataclass(frozen=True)
class ImageSet:
    """Labelled images, or rows of a table.

    Parameters
    ----------
    images : ndarray of uint8, shape (n, height, width, channels), or Pictures
        The images, possibly not decoded yet. For a table, its float32 inputs of shape
        (n, width).
    labels : ndarray of int64, shape (n,)
        Class of each image, from 0.
    owners : ndarray of int64, shape (n,), optional
        Client of each image, if the data is already split over clients.
    """

    images: Any
    labels: Integers
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
        Names of the classes, by label.
    clients : tuple of str, default ()
        Names of the clients if the data is already split over clients.
    notes : tuple of str, default ()
        Notices for users.
    """

    train: ImageSet
    test: ImageSet
    classes: tuple[str, ...]
    clients: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


# Reads a data set from its source.
Read = Callable[[], Dataset]
# A client's x_train, y_train, x_test and y_test.
ClientArrays = tuple[npt.NDArray[Any], ...]


def from_clients(clients: Mapping[str, ClientArrays]) -> Dataset:
    """Return the data set of clients' arrays; classes are counted.

    Parameters
    ----------
    clients : mapping of str to tuple of ndarray
        For each client x_train, y_train, x_test and y_test. Inputs have the same shape
        for all clients that have any.
    """
    parts = []
    for first in (0, 2):
        pairs = [arrays[first : first + 2] for arrays in clients.values()]
        owners = np.repeat(np.arange(len(pairs)), [len(labels) for _, labels in pairs])
        inputs = np.concatenate([inputs for inputs, labels in pairs if len(labels)])
        labels = np.concatenate([labels for _, labels in pairs])
        parts.append(ImageSet(inputs, labels, owners))
    count = 1 + int(max(part.labels.max() for part in parts))
    return Dataset(parts[0], parts[1], tuple(map(str, range(count))), tuple(clients))


def stamp(paths: Iterable["Path | os.DirEntry[str]"]) -> str:
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


def load_cached(cache: Path, key: str, read: Read) -> Dataset:
    """Load a data set from the cache, after reading it from its source if necessary.

    Parameters
    ----------
    cache : Path
        Folder of the cache.
    key : str
        Identifies the data set's content; may contain names of files.
    read : callable
        Returns the data set.

    Raises
    ------
    SettingsError
        If the data cannot be read, the cache cannot be written, or the disk is full.
    """
    directory = cache / hashlib.sha256(os.fsencode(key)).hexdigest()[:24]
    if not _is_complete(directory):
        _store(read, directory)
    about = json.loads((directory / ABOUT).read_text("utf-8"))
    parts = []
    for part in PARTS:
        arrays = {
            name: np.load(path, mmap_mode="r", allow_pickle=False)
            for name in ("images", "labels", "owners")
            if (path := directory / f"{part}-{name}.npy").exists()
        }
        parts.append(ImageSet(**arrays))
    texts = (tuple(about[name]) for name in ("classes", "clients", "notes"))
    return Dataset(parts[0], parts[1], *texts)


def _is_complete(directory: Path) -> bool:
    """Return whether a folder has all of its files in their full size."""
    try:
        sizes = json.loads((directory / ABOUT).read_text("utf-8"))["sizes"].items()
        return all((directory / n).stat().st_size == size for n, size in sizes)
    except (OSError, ValueError, KeyError):
        return False


def _store(read: Read, directory: Path) -> None:
    cache, partial = directory.parent, None
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(cache)
        partial = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=cache))
        _write(read(), partial)
        if not _is_complete(directory):
            # Processes that read a damaged folder keep its files until they end.
            shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)
        sync(cache)
    except OSError as error:
        # Another process may have stored the same data set first.
        if not _is_complete(directory):
            raise SettingsError(
                f"the data cache {str(cache)!r} cannot be written ({error}); set "
                "cache-dir to a directory with enough space",
                "cache-dir",
            ) from None
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def _write(dataset: Dataset, directory: Path) -> None:
    """Write the files of a data set, and flush all of them to disk."""
    for part, examples in zip(PARTS, (dataset.train, dataset.test), strict=True):
        for name, values in vars(examples).items():
            if values is None:
                continue
            with (directory / f"{part}-{name}.npy").open("wb") as file:
                if isinstance(values, Pictures):
                    values.write(file)
                else:
                    np.save(file, np.ascontiguousarray(values), allow_pickle=False)
    about = {
        "classes": dataset.classes,
        "clients": dataset.clients,
        "notes": dataset.notes,
        "sizes": {path.name: path.stat().st_size for path in directory.iterdir()},
    }
    (directory / ABOUT).write_text(json.dumps(about), "utf-8")
    for path in [*directory.iterdir(), directory]:
        sync(path)


def _remove_abandoned(cache: Path) -> None:
    """Remove the partial folders of processes that were killed."""
    for path in cache.glob(f"{PARTIAL}*"):
        with suppress(OSError):
            newest = max(p.stat().st_mtime for p in (path, *path.iterdir()))
            if time.time() - newest > PARTIAL_AGE:
                shutil.rmtree(path)
