"""Labelled images and tables, read once and memory-mapped from a disk cache."""

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

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
from flwr_frl.task.data.cache import (
    Arrays,
    Build,
    ensure_built,
    require_space,
    save_arrays,
)
from flwr_frl.task.data.folders import PARTS, ImageFolder
from flwr_frl.task.data.images import Source, write_images
from flwr_frl.task.data.npz import Part, read_arrays, version_of
from flwr_frl.task.data.pfllib import PFLlibFolder

Images = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]

EmnistSplit = Literal["balanced", "letters", "digits", "mnist", "byclass", "bymerge"]


@dataclass(frozen=True)
class ImageSet:
    """Labelled images, in memory or memory-mapped.

    Parameters
    ----------
    images : ndarray of uint8, shape (n, height, width, channels)
        The images. For a table, its float32 inputs of shape (n, width).
    labels : ndarray of int64, shape (n,)
        Class of each image, from 0.
    owners : ndarray of int64, shape (n,)
        Client of each image if the data is already split over clients, else -1.
    """

    images: Images
    labels: Integers
    owners: Integers

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def __getitem__(self, rows: slice | Integers) -> "ImageSet":
        """Return some of the images; a slice copies none of them."""
        return ImageSet(self.images[rows], self.labels[rows], self.owners[rows])


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
        Notices for users, such as images converted to grey.
    """

    train: ImageSet
    test: ImageSet
    classes: tuple[str, ...]
    clients: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


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
    """Load a data set.

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
    return load_cached(*SOURCES[name](settings), settings)


def load_cached(key: str, build: Build, settings: DataSettings) -> Dataset:
    """Load a data set from the cache, after building it if necessary.

    Parameters
    ----------
    key : str
        Identifies the data set's content; may contain names of files.
    build : callable
        Writes its files.
    settings : DataSettings
        Location and selection.

    Raises
    ------
    SettingsError
        If the data cannot be read or the cache cannot be written.
    """
    directory = _cache_root(settings) / sha256(os.fsencode(key)).hexdigest()[:24]
    ensure_built(directory, build)
    try:
        dataset = _open(directory)
    except FileNotFoundError:
        # Another process had moved the folder aside to check it for damage.
        ensure_built(directory, build)
        dataset = _open(directory)
    return _select_classes(dataset, settings.num_classes)


def _cache_root(settings: DataSettings) -> Path:
    if settings.cache_dir:
        return Path(settings.cache_dir).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "flwr-frl"


def save_dataset(
    directory: Path,
    arrays: Arrays,
    classes: tuple[str, ...],
    clients: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
    sources: Mapping[str, Iterable[Source]] | None = None,
    shape: tuple[int, ...] = (),
) -> None:
    """Write all files of a data set.

    Parameters
    ----------
    directory : Path
        An empty folder.
    arrays : dict of str to ndarray
        For each of `PARTS`: ``PART-labels``, ``PART-images`` unless there are sources,
        and ``PART-owners`` if the data is split over clients.
    classes, clients, notes : tuple of str
        As in `Dataset`.
    sources : mapping of str to iterable of Source, optional
        Images of each part, which are decoded.
    shape : tuple of int, optional
        Height, width and channels of decoded images.

    Raises
    ------
    OSError
        If the disk has too little space.
    """
    counts = {part: len(arrays[f"{part}-labels"]) for part in PARTS}
    unowned = {f"{part}-owners": np.full(n, -1) for part, n in counts.items()}
    arrays = {**unowned, **arrays}
    pixels = sum(counts.values()) * math.prod(shape) if sources else 0
    require_space(directory, pixels + sum(a.nbytes for a in arrays.values()))
    if sources:
        notes += write_images(directory, sources, counts, shape)
    texts = {"classes": classes, "clients": clients, "notes": notes}
    as_arrays = {name: np.array(text, np.str_) for name, text in texts.items()}
    save_arrays(directory, {**as_arrays, **arrays})


def _open(directory: Path) -> Dataset:
    def array(name: str) -> Any:
        return np.load(directory / f"{name}.npy", mmap_mode="r", allow_pickle=False)

    train, test = (
        ImageSet(*(array(f"{part}-{name}") for name in ("images", "labels", "owners")))
        for part in PARTS
    )
    texts = ("classes", "clients", "notes")
    return Dataset(train, test, *(tuple(map(str, array(text))) for text in texts))


def _select_classes(dataset: Dataset, num_classes: int) -> Dataset:
    total = len(dataset.classes)
    if num_classes in (0, total):
        return dataset
    allowed = f"0 (all) or from 2 to {total}"
    require(2 <= num_classes <= total, "num-classes", num_classes, allowed)

    def select(part: ImageSet) -> ImageSet:
        selected = part.labels < num_classes
        # Images sorted by class stay memory-mapped: a slice copies nothing.
        leading = bool((np.diff(selected.astype(np.int8)) <= 0).all())
        return part[slice(int(selected.sum())) if leading else np.flatnonzero(selected)]

    return replace(
        dataset,
        train=select(dataset.train),
        test=select(dataset.test),
        classes=dataset.classes[:num_classes],
    )


def _in_memory(load: Callable[[], tuple[Part, Part, tuple[str, ...]]]) -> Build:
    """Return a function that writes a data set that fits into memory.

    ``load`` returns the images and labels of both parts, and the classes.
    """

    def build(directory: Path) -> None:
        *parts, classes = load()
        arrays: Arrays = {}
        for name, (images, labels) in zip(PARTS, parts, strict=True):
            arrays[f"{name}-images"] = np.ascontiguousarray(images)
            arrays[f"{name}-labels"] = labels.astype(np.int64)
        save_dataset(directory, arrays, classes)

    return build


def _digits(_: DataSettings) -> tuple[str, Build]:
    """Return scikit-learn's 1,797 digits (8 x 8 pixels), every fifth for testing."""

    def load() -> tuple[Part, Part, tuple[str, ...]]:
        need("sklearn", "simulation", "the task 'digits'")
        from sklearn.datasets import load_digits

        digits = load_digits()
        # Values range from 0 to 16.
        images = np.minimum(digits.images * 16, 255).astype(np.uint8)[..., None]
        test = np.arange(len(images)) % 5 == 4
        train_part, test_part = (
            (images[at], digits.target[at]) for at in (~test, test)
        )
        return train_part, test_part, tuple("0123456789")

    return "digits/1", _in_memory(load)


def _torchvision(
    name: str, **options: str
) -> Callable[[DataSettings], tuple[str, Build]]:
    """Return the source of a data set that torchvision downloads."""

    def source(settings: DataSettings) -> tuple[str, Build]:
        if settings.data_dir:
            root = Path(settings.data_dir).expanduser()
            require(root.is_dir(), "data-dir", settings.data_dir, "an existing folder")
        else:
            root = _cache_root(settings) / "torchvision"

        def load() -> tuple[Part, Part, tuple[str, ...]]:
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
                train, test = (
                    getattr(datasets, name)(
                        str(root), train=train, download=True, **options
                    )
                    for train in (True, False)
                )
            # Damaged files raise nearly any exception.
            except Exception as error:
                raise SettingsError(
                    f"{name} is not in {str(root)!r} and could not be downloaded: "
                    f"{reason_of(error)}",
                    "data-dir",
                ) from None
            # Labels of EMNIST's letters begin with 1, after an unused class.
            first = int(np.min(np.asarray(train.targets)))
            train_part = _from_torchvision(train, first)
            test_part = _from_torchvision(test, first)
            return train_part, test_part, tuple(train.classes[first:])

        return f"{name}/{options}/{root.resolve()}", _in_memory(load)

    return source


def _from_torchvision(dataset: Any, first: int) -> Part:
    images = np.asarray(dataset.data)
    if images.ndim == 3:
        images = images[..., None]
    return images, np.asarray(dataset.targets) - first


def _emnist(settings: DataSettings) -> tuple[str, Build]:
    return _torchvision("EMNIST", split=settings.emnist_split)(settings)


def _image_folder(settings: DataSettings) -> tuple[str, Build]:
    """Return a directory's ``train/<class>/*`` or ``<client>/train/<class>/*``."""
    names = [name.strip() for name in settings.classes.split(",") if name.strip()]
    unique = len(set(names)) == len(names)
    require(unique, "classes", settings.classes, "names without duplicates")
    folder = ImageFolder(settings.data_dir, settings.image_size, names)

    def build(directory: Path) -> None:
        arrays = {f"{part}-labels": folder.labels(part) for part in PARTS}
        arrays |= {f"{part}-owners": folder.owners(part) for part in PARTS}
        sources = {part: folder.sources(part) for part in PARTS}
        names, shape = (folder.classes, folder.clients), folder.shape()
        save_dataset(directory, arrays, *names, sources=sources, shape=shape)

    return folder.key, build


def _arrays(settings: DataSettings) -> tuple[str, Build]:
    """Return a directory's ``train.npz`` and ``test.npz``."""
    data_dir = settings.data_dir
    return version_of(data_dir), _in_memory(lambda: read_arrays(data_dir))


def _pfllib(settings: DataSettings) -> tuple[str, Build]:
    """Return PFLlib's folders, ``{train,test}/<client>.npz``."""
    folder = PFLlibFolder(settings.data_dir)
    return folder.key, lambda to: save_dataset(to, *folder.read(), folder.clients)


# Each returns the key of a data set, and a function that writes its files.
SOURCES: dict[str, Callable[[DataSettings], tuple[str, Build]]] = {
    "digits": _digits,
    "mnist": _torchvision("MNIST"),
    "emnist": _emnist,
    "femnist": _image_folder,
    "cifar10": _torchvision("CIFAR10"),
    "cifar100": _torchvision("CIFAR100"),
    "image-folder": _image_folder,
    "arrays": _arrays,
    "pfllib": _pfllib,
}
