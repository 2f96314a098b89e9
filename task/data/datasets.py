"""The data sets of image tasks, and where they are read from.

- ``digits`` is installed with scikit-learn, and torchvision downloads MNIST, EMNIST and
  CIFAR.
- ``image-folder`` and ``femnist`` read folders of images.
- ``arrays`` reads ``train.npz`` and ``test.npz``, each with ``images`` (uint8, of shape
  (n, height, width) or (n, height, width, channels)) and ``labels`` (n integers from
  0). An array of strings ``classes`` in ``train.npz`` names the classes; by default
  they are "0", "1", … up to the largest label in ``train.npz``.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flwr_frl.common.settings import SettingsError, need, reading, reason_of, require
from flwr_frl.task.data.cache import (
    MAX_CLASSES,
    PARTS,
    Dataset,
    DataSettings,
    ImageSet,
    Integers,
    Read,
    cache_root,
    load,
    named_classes,
    stamp,
)
from flwr_frl.task.data.images import (
    FORM,
    IMAGE_SUFFIXES,
    INSPECTED,
    Pictures,
    common_shape,
)
from flwr_frl.task.data.images import Source as Picture

ARRAYS_FORM = (
    "train.npz and test.npz, each with images (uint8, n x height x width or n x height "
    "x width x channels) and labels (integers from 0), of one shape and the same "
    "classes in both, and in train.npz optionally the classes' names"
)
LAYOUT = "train/<class>/* and test/<class>/*, or <client>/train/<class>/*"


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


def image_folder(settings: DataSettings) -> tuple[str, Read]:
    """Return the key of an image folder, and a function that reads it.

    Parameters
    ----------
    settings : DataSettings
        ``data_dir`` has ``train/<class>/*`` and ``test/<class>/*``, or
        ``<client>/train/<class>/*`` and ``<client>/test/<class>/*``. Folders of
        ``classes`` may be missing or empty. By default every folder with images is a
        class.

    Raises
    ------
    SettingsError
        If the directory or a part of it is missing or empty, or if a folder's name is
        not among ``classes``.
    """
    data_dir, size = settings.data_dir, settings.image_size
    root = Path(data_dir).expanduser()
    exists = bool(data_dir) and root.is_dir()
    require(exists, "data-dir", data_dir, f"a directory with {LAYOUT}")
    client = "" if (root / "train").is_dir() else "*/"
    parts = [
        sorted(
            path
            for path in root.glob(f"{client}{part}/*/*")
            if path.suffix.lower() in IMAGE_SUFFIXES
        )
        for part in PARTS
    ]
    require(all(parts), "data-dir", data_dir, f"a directory with images in {LAYOUT}")
    paths = [path for part in parts for path in part]
    labels = sorted({path.parts[-2] for path in paths})
    classes = named_classes(settings.classes, labels)
    clients = tuple(sorted({path.parts[-4] for path in paths})) if client else ()

    def read() -> Dataset:
        some = paths[:: -(-len(paths) // INSPECTED)]
        shape = common_shape(map(_picture, some), size)
        train, test = (
            ImageSet(
                Pictures(map(_picture, part), len(part), shape),
                _numbered((path.parts[-2] for path in part), classes),
                _numbered((path.parts[-4] for path in part), clients)
                if clients
                else None,
            )
            for part in parts
        )
        return Dataset(train, test, classes, clients)

    key = f"{root.resolve()}/{size}/{(clients, classes)}{FORM}/{stamp(paths)}"
    return key, read


def _numbered(names: Iterable[str], known: Sequence[str]) -> Integers:
    """Return the place of each name among the known ones."""
    places = {name: i for i, name in enumerate(known)}
    return np.array([places[name] for name in names])


def _picture(path: Path) -> Picture:
    from PIL import Image

    return str(path), partial(Image.open, path)


def array_files(settings: DataSettings) -> tuple[str, Read]:
    """Return the key of ``train.npz`` and ``test.npz``, and a function that reads them.

    Raises
    ------
    SettingsError
        If a file is missing; later, if it is unreadable or an array is invalid.
    """
    root = Path(settings.data_dir).expanduser()
    paths = [root / f"{part}.npz" for part in PARTS]
    exist = bool(settings.data_dir) and all(path.is_file() for path in paths)
    require(exist, "data-dir", settings.data_dir, f"a directory with {ARRAYS_FORM}")

    def read() -> Dataset:
        with reading(root, "data-dir", ARRAYS_FORM):
            (train, names), (test, _) = map(_read_images, paths)
            classes = names or tuple(map(str, range(int(train.labels.max()) + 1)))
            for part in (train, test):
                _check(part.images.shape[1:] == train.images.shape[1:])
                _check(part.labels.max() < len(set(classes)) == len(classes))
            return Dataset(train, test, classes)

    return f"arrays/2/{root.resolve()}/{stamp(paths)}", read


def _read_images(path: Path) -> tuple[ImageSet, tuple[str, ...]]:
    """Return the images of a file, and the names of the classes if it has them."""
    # A pickle could run any code.
    with np.load(path, allow_pickle=False) as file:
        images, labels = file["images"], file["labels"]
        names = file["classes"] if "classes" in file else np.empty(0, np.str_)
    images = images[..., None] if images.ndim == 3 else images
    _check(images.dtype == np.uint8 and images.ndim == 4 and 0 not in images.shape)
    # Channels first are a frequent mistake.
    _check(images.shape[1] not in (1, 3) or images.shape[3] <= 4)
    _check((names.dtype.kind, names.ndim) == ("U", 1))
    _check(labels.dtype.kind in "iu" and labels.shape == images.shape[:1])
    # As many names of classes would fill the memory.
    _check(0 <= labels.min() <= labels.max() < MAX_CLASSES)
    return ImageSet(images, labels.astype(np.int64)), tuple(map(str, names))


def _check(valid: bool) -> None:
    if not valid:
        raise ValueError("its arrays do not fit")


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
}
