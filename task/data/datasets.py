"""Labelled images as arrays: read once, decoded once, shared through a disk cache."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from flwr_frl.task.data.cache import (
    PARTIAL,
    is_whole,
    pixel_file,
    remove_partial,
    seal,
    sync,
)
from flwr_frl.task.data.folders import PARTS, ImageFolder
from flwr_frl.task.data.npz import find_arrays
from flwr_frl.task.settings import (
    Checked,
    Choice,
    Free,
    Place,
    Range,
    SettingsError,
    need,
    reason_of,
    require,
    unknown,
)

Images = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]

Arrays = dict[str, npt.NDArray[Any]]
# Writes the files of a data set into an empty directory.
Build = Callable[[Path], None]

EMNIST_SPLITS = ("balanced", "letters", "digits", "mnist", "byclass", "bymerge")
# An unwritable cache costs decoding time, not the run; a full disk is an error.
SPACE_MARGIN = 1.02


@dataclass(frozen=True)
class ImageSet:
    """Labelled images, in memory or memory-mapped.

    Parameters
    ----------
    images : ndarray of uint8, shape (n, height, width, channels)
        The images.
    labels : ndarray of int64, shape (n,)
        Class of each image, from 0.
    owners : ndarray of int64, shape (n,)
        Client of each image where the data is already split over clients, else -1.
    """

    images: Images
    labels: Integers
    owners: Integers

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)


@dataclass(frozen=True)
class Dataset:
    """A training and a test set with the names of their classes.

    Parameters
    ----------
    train, test : ImageSet
        The two sets.
    classes : tuple of str
        Names of the classes, by label.
    clients : tuple of str
        Names of the clients, where the data is already split over clients.
    notes : tuple of str
        What a user should know of how it was read.
    """

    train: ImageSet
    test: ImageSet
    classes: tuple[str, ...]
    clients: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class DataSettings(Checked):
    """Where a data set is and what of it is used.

    Parameters
    ----------
    data_dir : str, default ""
        Where the data is: the root of torchvision's data sets (default: the cache), an
        image folder, a folder with ``train.npz`` and ``test.npz``, or for ``hf`` the
        folder that is read in place of the data set's name.
    cache_dir : str, default ""
        Where decoded images are kept; ``~/.cache/flwr-frl`` by default.
    num_classes : int, default 0
        Keep only the first so many classes; 0 keeps all.
    classes : str, default ""
        Names of an image folder's classes, with commas between, where a device may lack
        some of them; by default those of its class folders.
    emnist_split : {"balanced", "letters", "digits", "mnist", "byclass", "bymerge"}
        Which of EMNIST's data sets ``emnist`` is; by default ``balanced``, with 47
        classes. The first ten, which SRPFL uses (appendix, "Datasets"), are the digits:
        ``num-classes=10``.
    image_size : int, default 0
        Side in pixels to which the images of a folder are brought, at most 4096; 0
        takes that of the first image.
    """

    data_dir: Annotated[str, Place("a directory")] = ""
    cache_dir: Annotated[str, Place("a directory")] = ""
    num_classes: Annotated[int, Range("[0, inf)")] = 0
    classes: Annotated[str, Free("names with commas between")] = ""
    emnist_split: Annotated[str, Choice(*EMNIST_SPLITS)] = "balanced"
    image_size: Annotated[int, Range("[0, 4096]")] = 0


def load_dataset(name: str, settings: DataSettings) -> Dataset:
    """Load a data set.

    Parameters
    ----------
    name : str
        A key of `SOURCES`.
    settings : DataSettings
        Where it is and what of it is used.

    Returns
    -------
    Dataset
        The data set, memory-mapped from the cache: processes share one copy.

    Raises
    ------
    SettingsError
        If the data is missing, empty or unreadable, or the cache does not fit on its
        disk.
    """
    if name not in SOURCES:
        raise unknown("task", name, SOURCES)
    return stored(*SOURCES[name](settings), settings)


def stored(key: str, build: Build, settings: DataSettings) -> Dataset:
    """Return the data set of a key from the cache, which is built where it is not.

    Raises `SettingsError` as `load_dataset`.
    """
    directory = _cache_root(settings) / hashlib.sha256(key.encode()).hexdigest()[:24]
    try:
        dataset = _repaired(build, directory)
    except FileNotFoundError:
        # Another process had it aside, to see whether it is damaged.
        dataset = _repaired(build, directory)
    return _keep_classes(dataset, settings.num_classes)


def _repaired(build: Build, directory: Path) -> Dataset:
    if directory.exists() and not is_whole(directory):
        # Damaged, or of a version that wrote no checksums.
        _remove(directory)
    if not directory.exists():
        _store(build, directory)
    return _open(directory)


def _cache_root(settings: DataSettings) -> Path:
    if settings.cache_dir:
        return Path(settings.cache_dir).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "flwr-frl"


def _store(build: Build, directory: Path) -> None:
    """Have a data set written as ``.npy`` files: wholly, or nothing stays behind."""
    partial: Path | None = None
    cache = directory.parent
    made = [path for path in (cache, *cache.parents) if not path.exists()]
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        remove_partial(cache)
        partial = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=cache))
        build(partial)
        seal(partial)
        partial.rename(directory)
        sync(cache)
    except OSError as error:
        # Another process may have stored the same data first: that is as good.
        if not directory.exists():
            raise SettingsError(
                f"the data cache {str(directory.parent)!r} cannot be written "
                f"({error}); set cache-dir to a directory with enough space"
            ) from None
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
        if not directory.exists():
            for path in made:
                with suppress(OSError):
                    path.rmdir()


def _remove(directory: Path) -> None:
    """Remove a damaged folder of the cache at once, whoever else may be reading it."""
    aside = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=directory.parent))
    # Another process may have removed it first, and have made it again since then.
    with suppress(OSError):
        moved = directory.rename(aside / directory.name)
        if is_whole(moved):
            moved.rename(directory)
    shutil.rmtree(aside, ignore_errors=True)


def need_space(directory: Path, num_bytes: int) -> None:
    """Raise `OSError` unless so many bytes, and a margin, are free."""
    needed, free = int(num_bytes * SPACE_MARGIN), shutil.disk_usage(directory).free
    if free < needed:
        raise OSError(f"{needed:,} bytes are needed, {free:,} are free")


def save(
    directory: Path,
    arrays: Arrays,
    classes: tuple[str, ...],
    clients: tuple[str, ...] = (),
) -> None:
    """Write the files of a data set besides those of its images."""
    names = {
        "classes": np.array(classes, np.str_),
        "clients": np.array(clients, np.str_),
    }
    for name, array in {**names, **arrays}.items():
        with (directory / f"{name}.npy").open("wb") as file:
            np.save(file, array, allow_pickle=False)


def _in_memory(load: Callable[[], Dataset]) -> Build:
    """Return what writes a data set that fits into memory."""

    def build(directory: Path) -> None:
        dataset = load()
        arrays: Arrays = {}
        for name, part in (("train", dataset.train), ("test", dataset.test)):
            arrays[f"{name}-images"] = part.images
            arrays[f"{name}-labels"] = part.labels
            arrays[f"{name}-owners"] = part.owners
        need_space(directory, sum(array.nbytes for array in arrays.values()))
        save(directory, arrays, dataset.classes, dataset.clients)

    return build


def _open(directory: Path) -> Dataset:
    def array(name: str) -> Any:
        return np.load(directory / f"{name}.npy", mmap_mode="r", allow_pickle=False)

    train, test = (
        ImageSet(*(array(f"{part}-{name}") for name in ("images", "labels", "owners")))
        for part in ("train", "test")
    )
    kinds = ["classes", "clients"]
    if (directory / "notes.npy").exists():
        kinds.append("notes")
    return Dataset(train, test, *(tuple(map(str, array(kind))) for kind in kinds))


def _keep_classes(dataset: Dataset, num_classes: int) -> Dataset:
    if num_classes == 0 or num_classes == len(dataset.classes):
        return dataset
    if not 2 <= num_classes <= len(dataset.classes):
        raise SettingsError(
            f"num-classes is {num_classes}; it must be 0 (all) or from 2 to "
            f"{len(dataset.classes)}"
        )

    def keep(part: ImageSet) -> ImageSet:
        chosen = part.labels < num_classes
        # Sorted by class, the images stay where they are.
        first = bool((np.diff(chosen.astype(np.int8)) <= 0).all())
        kept = slice(int(chosen.sum())) if first else np.flatnonzero(chosen)
        return ImageSet(part.images[kept], part.labels[kept], part.owners[kept])

    return Dataset(
        keep(dataset.train),
        keep(dataset.test),
        dataset.classes[:num_classes],
        dataset.clients,
        dataset.notes,
    )


def _unowned(images: Images, labels: npt.NDArray[Any]) -> ImageSet:
    return ImageSet(
        np.ascontiguousarray(images), labels.astype(np.int64), np.full(len(labels), -1)
    )


def _digits(_: DataSettings) -> tuple[str, Build]:
    """Return the 1,797 digits of 8 x 8 that scikit-learn brings; every fifth tests."""

    def load() -> Dataset:
        need("sklearn", "simulation", "the task 'digits'")
        from sklearn.datasets import load_digits

        digits = load_digits()
        # Values are 0 to 16.
        images = np.minimum(digits.images * 16, 255).astype(np.uint8)[..., None]
        test = np.arange(len(images)) % 5 == 4
        return Dataset(
            _unowned(images[~test], digits.target[~test]),
            _unowned(images[test], digits.target[test]),
            tuple(str(digit) for digit in range(10)),
        )

    return "digits/1", _in_memory(load)


def _torchvision(
    name: str, **options: str
) -> Callable[[DataSettings], tuple[str, Build]]:
    def source(settings: DataSettings) -> tuple[str, Build]:
        if settings.data_dir:
            root = Path(settings.data_dir).expanduser()
            if not root.is_dir():
                raise SettingsError(
                    f"data-dir is {str(root)!r}; there is no such directory"
                )
        else:
            root = _cache_root(settings) / "torchvision"

        def load() -> Dataset:
            try:
                from torchvision import datasets
            except (ImportError, RuntimeError) as error:
                raise SettingsError(
                    f"the data set {name} needs torchvision, which cannot be imported "
                    f"({error}); install torch and torchvision of the same kind of "
                    "build"
                ) from None
            source = getattr(datasets, name)
            try:
                train, test = (
                    source(str(root), train=train, download=True, **options)
                    for train in (True, False)
                )
            # Damaged files raise nearly anything.
            except Exception as error:
                reason = reason_of(error)
                raise SettingsError(
                    f"{name} is not in {str(root)!r} and could not be downloaded: "
                    f"{reason}"
                ) from None
            # EMNIST's letters are numbered from 1, behind a class that does not exist.
            first = int(np.min(np.asarray(train.targets)))
            return Dataset(
                _from_torch(train, first),
                _from_torch(test, first),
                tuple(train.classes[first:]),
            )

        return f"{name}/{options}/{root.resolve()}", _in_memory(load)

    return source


def _emnist(settings: DataSettings) -> tuple[str, Build]:
    return _torchvision("EMNIST", split=settings.emnist_split)(settings)


def _from_torch(dataset: Any, first: int) -> ImageSet:
    images = np.asarray(dataset.data)
    labels = np.asarray(dataset.targets)
    if images.ndim == 3:
        images = images[..., None]
    return _unowned(images, labels - first)


def _image_folder(settings: DataSettings) -> tuple[str, Build]:
    """Return ``train/<class>/*`` or ``<client>/train/<class>/*`` of a directory."""
    names = [name.strip() for name in settings.classes.split(",") if name.strip()]
    unique = len(set(names)) == len(names)
    require(unique, "classes", settings.classes, "names of which none comes twice")
    folder = ImageFolder(settings.data_dir, settings.image_size, names)

    def build(directory: Path) -> None:
        shape = folder.shape()
        rows = {part: len(folder.labels(part)) for part in PARTS}
        pixels = sum(rows.values()) * int(np.prod(shape))
        labels = {
            f"{part}-{name}": array
            for part in PARTS
            for name, array in (
                ("labels", folder.labels(part)),
                ("owners", folder.owners(part)),
            )
        }
        need_space(directory, pixels + sum(a.nbytes for a in labels.values()))
        with ExitStack() as opened:
            files = {}
            for part, n in rows.items():
                files[part] = opened.enter_context(
                    pixel_file(directory, part, n, shape)
                )
            notes = folder.decode(shape, files)
        arrays = {**labels, "notes": np.array(notes, np.str_)}
        save(directory, arrays, folder.classes, folder.clients)

    return folder.key, build


def _arrays(settings: DataSettings) -> tuple[str, Build]:
    """Return ``train.npz`` and ``test.npz`` of a directory."""
    key, read = find_arrays(settings.data_dir)

    def load() -> Dataset:
        train, test, classes = read()
        return Dataset(_unowned(*train), _unowned(*test), classes)

    return key, _in_memory(load)


SOURCES: dict[str, Callable[[DataSettings], tuple[str, Build]]] = {
    "digits": _digits,
    "mnist": _torchvision("MNIST"),
    "emnist": _emnist,
    "femnist": _image_folder,
    "cifar10": _torchvision("CIFAR10"),
    "cifar100": _torchvision("CIFAR100"),
    "image-folder": _image_folder,
    "arrays": _arrays,
}
