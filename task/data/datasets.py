"""Data sets: where they are read from, and the cache in which they are stored.

- ``digits`` is installed with scikit-learn, and torchvision downloads MNIST, EMNIST and
  CIFAR.
- ``image-folder`` and ``femnist`` read folders of images.

A data set is read and written once, as ``.npy`` files that are memory-mapped
afterwards, so that all processes of a machine share one copy. Image files are decoded
when they are written. The file `ABOUT` is written last, so a folder without it is
incomplete. Folders whose files are missing or truncated are written again.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from flwr_frl.common.errors import (
    SettingsError,
    need,
    reading,
    reason_of,
    require,
    unknown,
)
from flwr_frl.common.files import atomic_file, write_atomically
from flwr_frl.common.settings import Checked, PathText, setting
from flwr_frl.task.names import DOWNLOADED, TASKS

Integers = npt.NDArray[np.int64]
Pixels = npt.NDArray[np.uint8]
Shape = tuple[int, int, int]
Open = Callable[[Any], Image.Image]

PARTS = ("train", "test")
ABOUT = "about.json"

# Version of decoded images; a change invalidates those in the cache.
FORM = "/5"
# Number of images that decide whether a data set is grey.
INSPECTED = 200
# Modes of grey images, besides those of 16 bits.
GREY = ("1", "L", "LA", "La")
# Bytes of decoded images held in memory at once.
BLOCK = 16 * 2**20
IMAGE_SUFFIXES = frozenset(
    (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
)
LAYOUT = "train/<class>/* and test/<class>/*, or <client>/train/<class>/*"

EmnistSplit = Literal["balanced", "letters", "digits", "mnist", "byclass", "bymerge"]
# The tasks with which the settings of EMNIST and of image folders have no effect.
NOT_EMNIST = {"task": tuple(name for name in TASKS if name != "emnist")}
NO_FOLDER = {"task": ("digits", "linear-table", *DOWNLOADED)}


@dataclass(frozen=True)
class DataSettings(Checked):
    """Location of a data set and selection of its classes.

    Parameters
    ----------
    data_dir : str, default ""
        Directory of the data: the root of torchvision's data sets (by default in the
        cache), an image folder, or for ``hf`` the folder to read instead of a hub data
        set.
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
    emnist_split: EmnistSplit = setting("balanced", unused_if=NOT_EMNIST)
    image_size: int = setting(0, ge=0, le=4096, unused_if=NO_FOLDER)


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
    client_column : str, default ""
        Name of a table's column of clients, if there is one.
    """

    train: ImageSet
    test: ImageSet
    classes: tuple[str, ...]
    clients: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    client_column: str = ""


# Decoding of image files


def upright(image: Image.Image) -> Image.Image:
    """Load an image and rotate it in place as its EXIF orientation demands."""
    image.load()
    # Damaged EXIF data must not make an image unreadable.
    with suppress(Exception):
        ImageOps.exif_transpose(image, in_place=True)
    return image


def pixels_of(image: Image.Image, channels: int, size: tuple[int, int]) -> Pixels:
    """Return the pixels of an image, upright, resized and converted.

    Parameters
    ----------
    image : PIL.Image.Image
        The image. Images of 16 bits are reduced to their upper 8.
    channels : {1, 3}
        Grey or RGB.
    size : tuple of int
        Width and height in pixels.

    Returns
    -------
    ndarray of uint8, shape (height, width, channels)
        The pixels.

    Raises
    ------
    ValueError
        If pixels have 32 bits: their range is unknown.
    """
    image = upright(image)
    if image.mode in ("I", "F"):
        raise ValueError("its pixels are numbers of 32 bits; expected 8 or 16 bits")
    if image.mode.startswith("I;16"):
        # Pillow's conversion clips values above 255 to white.
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    converted = image.convert("L" if channels == 1 else "RGB")
    if converted.size != size:
        converted = converted.resize(size)
    return np.array(converted).reshape(size[1], size[0], channels)


def read_image(path: Path, channels: int, size: tuple[int, int]) -> Pixels:
    """Return `pixels_of` a file. Damaged files raise nearly any exception."""
    with Image.open(path) as image:
        return pixels_of(image, channels, size)


class Pictures:
    """Images that are decoded when they are written to the cache.

    Parameters
    ----------
    sources : sequence
        Their files, or other names.
    opened : callable
        Returns the image of a source, which need not be decoded.
    shape : tuple of int
        Height, width and channels to which they are converted.
    """

    def __init__(self, sources: Sequence[Any], opened: Open, shape: Shape) -> None:
        self.sources, self.opened, self.shape = sources, opened, shape

    @classmethod
    def of_parts(cls, parts: Sequence[Any], opened: Open, size: int) -> list[Self]:
        """Return the images of the parts of a data set, with one shape for all.

        There are 3 channels if any of some images has colours. ``size`` is the side in
        pixels; 0 keeps the size of the first readable image.
        """
        first, channels = None, 1
        sources = [source for part in parts for source in part]
        for source in sources[:: -(-len(sources) // INSPECTED)]:
            # Damaged files raise nearly any exception; `write` reports them.
            with suppress(Exception), opened(source) as image:
                first = first or upright(image).size
                is_grey = image.mode in GREY or image.mode.startswith("I;16")
                channels = channels if is_grey else 3
        width, height = (size, size) if size else first or (1, 1)
        return [cls(part, opened, (height, width, channels)) for part in parts]

    def write(self, file: BinaryIO) -> None:
        """Decode the images in threads, and write them as an ``.npy`` file.

        Raises
        ------
        SettingsError
            If an image cannot be read.
        """
        from rich.progress import Progress

        shape = len(self.sources), *self.shape
        header = {"descr": "|u1", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        size = max(1, BLOCK // int(np.prod(self.shape)))
        with (
            ThreadPoolExecutor(os.cpu_count()) as pool,
            Progress(transient=True) as bar,
        ):
            task = bar.add_task("Decoding images (once)", total=len(self.sources))
            # `map` decodes ahead, so blocks bound the memory.
            for start in range(0, len(self.sources), size):
                block = self.sources[start : start + size]
                for pixels in pool.map(self._decoded, block):
                    file.write(np.ascontiguousarray(pixels).data)
                bar.advance(task, len(block))

    def _decoded(self, source: Any) -> Pixels:
        height, width, channels = self.shape
        with reading(f"image {source}", "data-dir"), self.opened(source) as image:
            return pixels_of(image, channels, (width, height))


# The cache

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
    require(len(set(named)) == len(named), "classes", names, "names without duplicates")
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
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flwr-frl"


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
    total, count = len(dataset.classes), settings.num_classes
    if count in (0, total):
        return dataset
    allowed = f"0 (all) or from 2 to {total}"
    require(2 <= count < total, "num-classes", count, allowed)
    return replace(
        dataset,
        train=_first_classes(dataset.train, count),
        test=_first_classes(dataset.test, count),
        classes=dataset.classes[:count],
    )


def _first_classes(examples: ImageSet, count: int) -> ImageSet:
    """Return the examples of the first classes."""
    selected = examples.labels < count
    # Images sorted by class stay memory-mapped: a slice copies nothing.
    leading = bool((np.diff(selected.astype(np.int8)) <= 0).all())
    return examples[slice(int(selected.sum())) if leading else np.flatnonzero(selected)]


def _mapped(directory: Path) -> Dataset:
    """Return the data set in a folder of the cache."""
    about = json.loads((directory / ABOUT).read_text("utf-8"))
    names = ("images", "labels", "owners") if about["clients"] else ("images", "labels")
    train, test = (
        # A mapping that can be written counts as memory, which may be smaller.
        ImageSet(
            *(np.load(directory / f"{part}-{n}.npy", mmap_mode="r") for n in names)
        )
        for part in PARTS
    )
    # JSON has no tuples.
    for name, value in about.items():
        about[name] = tuple(value) if isinstance(value, list) else value
    return Dataset(train, test, **about)


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
    about = {n: v for n, v in vars(dataset).items() if n not in PARTS}
    write_atomically(directory / ABOUT, json.dumps(about).encode())


# Sources of data sets


def load_dataset(name: str, settings: DataSettings) -> Dataset:
    """Load a data set of `SOURCES`, memory-mapped from the cache.

    Raises
    ------
    SettingsError
        If the data is missing, empty or unreadable, or the cache cannot be written.
    """
    return load(*SOURCES[name](settings), settings)


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

    return "digits/3", read


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
            parts.append(ImageSet(images, np.asarray(part.targets, np.int64) - first))
        return Dataset(parts[0], parts[1], tuple(train.classes[first:]))

    return f"{name}/3/{options}/{root.resolve()}", read


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
        decoded = Pictures.of_parts(parts, Image.open, size)
        train, test = (
            ImageSet(
                images,
                _numbered((path.parts[-2] for path in part), classes),
                _numbered((path.parts[-4] for path in part), clients)
                if clients
                else None,
            )
            for part, images in zip(parts, decoded, strict=True)
        )
        return Dataset(train, test, classes, clients)

    return f"{root.resolve()}/{size}/{(clients, classes)}{FORM}/{stamp(paths)}", read


def _numbered(names: Iterable[str], known: Sequence[str]) -> Integers:
    """Return the place of each name among the known ones."""
    places = {name: i for i, name in enumerate(known)}
    return np.array([places[name] for name in names])


# For each data set, a function that returns its key, and a function that reads it.
SOURCES: dict[str, Callable[[DataSettings], tuple[str, Read]]] = {
    "digits": _digits,
    "mnist": partial(_torchvision, "MNIST"),
    "emnist": partial(_torchvision, "EMNIST"),
    "femnist": image_folder,
    "cifar10": partial(_torchvision, "CIFAR10"),
    "cifar100": partial(_torchvision, "CIFAR100"),
    "image-folder": image_folder,
}
