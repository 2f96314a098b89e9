"""The built-in data sets of images, and where they are read from."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from flwr_frl.common.settings import (
    Checked,
    PathText,
    SettingsError,
    need,
    reason_of,
    require,
    setting,
    unknown,
)
from flwr_frl.task.data.arrays import array_files, client_files
from flwr_frl.task.data.cache import Dataset, ImageSet, Read, load_cached
from flwr_frl.task.data.folders import image_folder

EmnistSplit = Literal["balanced", "letters", "digits", "mnist", "byclass", "bymerge"]


@dataclass(frozen=True)
class DataSettings(Checked):
    """Location of a data set and selection of its classes.

    Parameters
    ----------
    data_dir : str, default ""
        Directory of the data: the root of torchvision's data sets (by default in the
        cache), an image folder, PFLlib's folder, a folder with ``train.npz`` and
        ``test.npz``, or for ``hf`` the folder to read instead of a hub data set.
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
        "", form="a directory", fallback="", may_differ="always", per_device=True
    )
    num_classes: int = setting(0, ge=0)
    classes: str = setting("", form="names, separated by commas", safe=True)
    emnist_split: EmnistSplit = setting("balanced")
    image_size: int = setting(0, ge=0, le=4096)


def load_dataset(name: str, settings: DataSettings) -> Dataset:
    """Load a built-in data set.

    Parameters
    ----------
    name : str
        A key of `SOURCES`.
    settings : DataSettings
        Location and selection.

    Returns
    -------
    Dataset
        The data set, memory-mapped from the cache.

    Raises
    ------
    SettingsError
        If the data is missing, empty or unreadable, or the cache cannot be written.
    """
    if name not in SOURCES:
        raise unknown("task", name, SOURCES)
    return load(*SOURCES[name](settings), settings)


def load(key: str, read: Read, settings: DataSettings) -> Dataset:
    """Load the chosen classes of a data set through the cache; see `load_cached`."""
    dataset = load_cached(cache_root(settings), key, read)
    chosen, total = settings.num_classes, len(dataset.classes)
    if chosen in (0, total):
        return dataset
    allowed = f"0 (all) or from 2 to {total}"
    require(2 <= chosen <= total, "num-classes", chosen, allowed)

    def select(part: ImageSet) -> ImageSet:
        selected = part.labels < chosen
        # Images sorted by class stay memory-mapped: a slice copies nothing.
        leading = bool((np.diff(selected.astype(np.int8)) <= 0).all())
        return part[slice(int(selected.sum())) if leading else np.flatnonzero(selected)]

    train, test = select(dataset.train), select(dataset.test)
    return replace(dataset, train=train, test=test, classes=dataset.classes[:chosen])


def cache_root(settings: DataSettings) -> Path:
    """Return the folder of the cache."""
    if settings.cache_dir:
        return Path(settings.cache_dir).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "flwr-frl"


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


def _torchvision(name: str) -> Callable[..., tuple[str, Read]]:
    """Return the source of a data set that torchvision downloads."""

    def source(settings: DataSettings) -> tuple[str, Read]:
        root = cache_root(settings) / "torchvision"
        if settings.data_dir:
            root = Path(settings.data_dir).expanduser()
            require(root.is_dir(), "data-dir", settings.data_dir, "an existing folder")
        options = {"split": settings.emnist_split} if name == "EMNIST" else {}

        def read() -> Dataset:
            try:
                from torchvision import datasets
            except (ImportError, RuntimeError) as error:
                raise SettingsError(
                    f"the data set {name} needs torchvision, which cannot be imported "
                    f"({error}); install torch and torchvision of the same kind of "
                    "build",
                    "missing-package",
                ) from None
            try:
                kind, place = getattr(datasets, name), str(root)
                train = kind(place, train=True, download=True, **options)
                test = kind(place, train=False, download=True, **options)
            # Damaged files raise nearly any exception.
            except Exception as error:
                raise SettingsError(
                    f"{name} is not in {str(root)!r} and could not be downloaded: "
                    f"{reason_of(error)}",
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

    return source


def _image_folder(settings: DataSettings) -> tuple[str, Read]:
    names = [name.strip() for name in settings.classes.split(",") if name.strip()]
    unique = len(set(names)) == len(names)
    require(unique, "classes", settings.classes, "names without duplicates")
    return image_folder(settings.data_dir, settings.image_size, names)


def _arrays(settings: DataSettings) -> tuple[str, Read]:
    return array_files(settings.data_dir)


def _pfllib(settings: DataSettings) -> tuple[str, Read]:
    return client_files(settings.data_dir)


# Each returns the key of a data set, and a function that reads it.
SOURCES: dict[str, Callable[[DataSettings], tuple[str, Read]]] = {
    "digits": _digits,
    "mnist": _torchvision("MNIST"),
    "emnist": _torchvision("EMNIST"),
    "femnist": _image_folder,
    "cifar10": _torchvision("CIFAR10"),
    "cifar100": _torchvision("CIFAR100"),
    "image-folder": _image_folder,
    "arrays": _arrays,
    "pfllib": _pfllib,
}
