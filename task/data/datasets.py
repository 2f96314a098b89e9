"""The data sets of image tasks, and where they are read from."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flwr_frl.common.settings import SettingsError, need, reason_of, require
from flwr_frl.task.data.arrays import array_files, client_files
from flwr_frl.task.data.cache import (
    Dataset,
    DataSettings,
    ImageSet,
    Read,
    cache_root,
    load,
)
from flwr_frl.task.data.folders import image_folder


def load_dataset(name: str, settings: DataSettings) -> Dataset:
    """Load a data set of `SOURCES`, memory-mapped from the cache.

    Raises
    ------
    SettingsError
        If the data is missing, empty or unreadable, or the cache cannot be written.
    """
    return load(*SOURCES[name].find(settings), settings)


def _digits(_: DataSettings) -> tuple[str, Read]:
    """Return scikit-learn's 1,797 digits (8 x 8 pixels), every fifth for testing."""

    def read() -> Dataset:
        need("sklearn", "simulation", "the task 'digits'")
        from sklearn.datasets import load_digits

        digits = load_digits()
        # Values range from 0 to 16.
        images = np.minimum(digits.images * 16, 255).astype(np.uint8)[..., None]
        everything = ImageSet(images, digits.target.astype(np.int64))
        tested = np.arange(len(images)) % 5 == 4
        train, test = (everything[np.flatnonzero(at)] for at in (~tested, tested))
        return Dataset(train, test, tuple("0123456789"))

    return "digits/2", read


def _torchvision(name: str, settings: DataSettings) -> tuple[str, Read]:
    """Return a data set that torchvision downloads."""
    root = cache_root(settings) / "torchvision"
    if settings.data_dir:
        root = Path(settings.data_dir).expanduser()
        require(root.is_dir(), "data-dir", settings.data_dir, "an existing folder")
    options = {"split": settings.emnist_split} if name == "EMNIST" else {}

    def read() -> Dataset:
        try:
            from torchvision import datasets

            kind, place = getattr(datasets, name), str(root)
            train = kind(place, train=True, download=True, **options)
            test = kind(place, train=False, download=True, **options)
        # Damaged files raise nearly any exception, and so does a torchvision that was
        # built for another torch.
        except Exception as error:
            raise SettingsError(
                f"{name} is not in {str(root)!r} and could not be downloaded by "
                f"torchvision: {reason_of(error)}",
                "data-dir",
            ) from None
        # Labels of EMNIST's letters begin with 1, after an unused class.
        first = int(np.min(np.asarray(train.targets)))
        parts = []
        for part in (train, test):
            images = np.asarray(part.data)
            images = images[..., None] if images.ndim == 3 else images
            labels = np.asarray(part.targets, np.int64) - first
            parts.append(ImageSet(images, labels))
        return Dataset(parts[0], parts[1], tuple(train.classes[first:]))

    return f"{name}/2/{options}/{root.resolve()}", read


class Source(NamedTuple):
    """Where a data set is from.

    Parameters
    ----------
    find : callable
        Returns the key of the data set, and a function that reads it.
    settings : tuple of str
        The `DataSettings` that it reads, besides those that all do.
    """

    find: Callable[[DataSettings], tuple[str, Read]]
    settings: tuple[str, ...] = ("data-dir",)


FOLDER = Source(image_folder, ("data-dir", "classes", "image-size"))
SOURCES = {
    "digits": Source(_digits, ()),
    "mnist": Source(partial(_torchvision, "MNIST")),
    "emnist": Source(partial(_torchvision, "EMNIST"), ("data-dir", "emnist-split")),
    "femnist": FOLDER,
    "cifar10": Source(partial(_torchvision, "CIFAR10")),
    "cifar100": Source(partial(_torchvision, "CIFAR100")),
    "image-folder": FOLDER,
    "arrays": Source(array_files),
    "pfllib": Source(client_files),
}
