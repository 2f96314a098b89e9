"""Labelled images as arrays: read once, decoded once, shared through a disk cache."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from task.data.images import images_in, read_image
from task.data.npz import find_arrays
from task.settings import Checked, Free, Range, SettingsError, unknown

Images = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]

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
    """

    train: ImageSet
    test: ImageSet
    classes: tuple[str, ...]
    clients: tuple[str, ...] = ()


@dataclass(frozen=True)
class DataSettings(Checked):
    """Where a data set is and what of it is used.

    Parameters
    ----------
    data_dir : str, default ""
        Where the data is: the root of torchvision's data sets (default: the cache), an
        image folder, or a folder with ``train.npz`` and ``test.npz``.
    cache_dir : str, default ""
        Where decoded images are kept; ``~/.cache/flwr-frl`` by default.
    num_classes : int, default 0
        Keep only the first so many classes; 0 keeps all.
    image_size : int, default 0
        Side in pixels to which the images of a folder are brought; 0 takes that of the
        first image.
    """

    data_dir: Annotated[str, Free("a directory")] = ""
    cache_dir: Annotated[str, Free("a directory")] = ""
    num_classes: Annotated[int, Range("[0, inf)")] = 0
    image_size: Annotated[int, Range("[0, inf)")] = 0


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
    key, build = SOURCES[name](settings)
    directory = _cache_root(settings) / hashlib.sha256(key.encode()).hexdigest()[:24]
    if not directory.exists():
        _store(build(), directory)
    return _keep_classes(_open(directory), settings.num_classes)


def _cache_root(settings: DataSettings) -> Path:
    if settings.cache_dir:
        return Path(settings.cache_dir).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "flwr-frl"


def _store(dataset: Dataset, directory: Path) -> None:
    """Write a data set as ``.npy`` files: wholly, or nothing stays behind."""
    arrays: dict[str, npt.NDArray[Any]] = {
        "classes": np.array(dataset.classes, dtype=np.str_),
        "clients": np.array(dataset.clients, dtype=np.str_),
    }
    for name, part in (("train", dataset.train), ("test", dataset.test)):
        arrays[f"{name}-images"] = part.images
        arrays[f"{name}-labels"] = part.labels
        arrays[f"{name}-owners"] = part.owners
    needed = int(sum(array.nbytes for array in arrays.values()) * SPACE_MARGIN)
    partial: Path | None = None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(directory.parent).free
        if free < needed:
            raise OSError(f"{needed:,} bytes are needed, {free:,} are free")
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=directory.parent))
        for name, array in arrays.items():
            with (partial / f"{name}.npy").open("wb") as file:
                np.save(file, array, allow_pickle=False)
        partial.rename(directory)
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


def _open(directory: Path) -> Dataset:
    def array(name: str) -> Any:
        return np.load(directory / f"{name}.npy", mmap_mode="r", allow_pickle=False)

    train, test = (
        ImageSet(*(array(f"{part}-{name}") for name in ("images", "labels", "owners")))
        for part in ("train", "test")
    )
    names = (tuple(str(n) for n in array(kind)) for kind in ("classes", "clients"))
    return Dataset(train, test, *names)


def _keep_classes(dataset: Dataset, num_classes: int) -> Dataset:
    if num_classes == 0 or num_classes == len(dataset.classes):
        return dataset
    if not 2 <= num_classes <= len(dataset.classes):
        raise SettingsError(
            f"num-classes is {num_classes}; it must be 0 (all) or from 2 to "
            f"{len(dataset.classes)}"
        )

    def keep(part: ImageSet) -> ImageSet:
        kept = np.flatnonzero(part.labels < num_classes)
        return ImageSet(part.images[kept], part.labels[kept], part.owners[kept])

    return Dataset(
        keep(dataset.train),
        keep(dataset.test),
        dataset.classes[:num_classes],
        dataset.clients,
    )


Build = Callable[[], Dataset]


def _unowned(images: Images, labels: npt.NDArray[Any]) -> ImageSet:
    return ImageSet(
        np.ascontiguousarray(images), labels.astype(np.int64), np.full(len(labels), -1)
    )


def _digits(_: DataSettings) -> tuple[str, Build]:
    """Return the 1,797 digits of 8 x 8 that scikit-learn brings; every fifth tests."""

    def build() -> Dataset:
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

    return "digits/1", build


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

        def build() -> Dataset:
            try:
                from torchvision import datasets
            except (ImportError, RuntimeError) as error:
                raise SettingsError(
                    f"the data set {name} needs torchvision, which cannot be imported "
                    f"({error}); install torch and torchvision of the same kind of "
                    "build"
                ) from None
            load = getattr(datasets, name)
            try:
                train, test = (
                    load(str(root), train=train, download=True, **options)
                    for train in (True, False)
                )
            # Damaged files raise nearly anything.
            except Exception as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
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

        return f"{name}/{options}/{root.resolve()}", build

    return source


def _from_torch(dataset: Any, first: int) -> ImageSet:
    images = np.asarray(dataset.data)
    labels = np.asarray(dataset.targets)
    if images.ndim == 3:
        images = images[..., None]
    return _unowned(images, labels - first)


def _image_folder(settings: DataSettings) -> tuple[str, Build]:
    """Return ``train/<class>/*`` or ``<client>/train/<class>/*`` of a directory."""
    root = Path(settings.data_dir).expanduser()
    if not settings.data_dir or not root.is_dir():
        raise SettingsError(
            f"data-dir is {settings.data_dir!r}; it must be a directory with "
            "train/<class>/* and test/<class>/*, or <client>/train/<class>/*"
        )
    folders, clients = _class_folders(root)
    classes = tuple(sorted({folder.name for _, _, folder in folders}))
    files = [
        (part, owner, classes.index(folder.name), Path(entry.path), entry.stat())
        for part, owner, folder in folders
        for entry in images_in(folder, "class folder")
    ]
    size = settings.image_size
    key = hashlib.sha256(f"{root.resolve()}/{size}/{clients}".encode())
    for _, _, _, path, stat in files:
        key.update(f"{path}/{stat.st_size}/{stat.st_mtime_ns}\n".encode())
    return key.hexdigest(), lambda: _decode(files, classes, clients, size)


def _class_folders(
    root: Path,
) -> tuple[list[tuple[str, int, Path]], tuple[str, ...]]:
    """Return (part, client, folder) of every class folder, and the clients' names."""
    if (root / "train").is_dir():
        clients: tuple[str, ...] = ()
        parts = [(part, -1, root / part) for part in ("train", "test")]
    else:
        clients = tuple(
            sorted(path.name for path in root.iterdir() if (path / "train").is_dir())
        )
        parts = [
            (part, owner, root / client / part)
            for owner, client in enumerate(clients)
            for part in ("train", "test")
        ]
    folders = [
        (part, owner, folder)
        for part, owner, parent in parts
        if parent.is_dir()
        for folder in sorted(parent.iterdir())
        if folder.is_dir()
    ]
    for part in ("train", "test"):
        if not any(found == part for found, _, _ in folders):
            raise SettingsError(
                f"data-dir {str(root)!r} has no class folders under {part!r}; it must "
                "hold train/<class>/* and test/<class>/*, or <client>/train/<class>/*"
            )
    return folders, clients


def _decode(
    files: list[tuple[str, int, int, Path, os.stat_result]],
    classes: tuple[str, ...],
    clients: tuple[str, ...],
    size: int,
) -> Dataset:
    from PIL import Image
    from rich.progress import track

    unreadable: list[str] = []
    mode, shape = "", (size, size)

    def read(path: Path) -> Images | None:
        try:
            return read_image(path, mode, shape)
        # A damaged file can raise nearly anything in a decoder.
        except Exception as error:
            unreadable.append(f"{path} ({error})")
            return None

    # The first readable image decides colour and size for all.
    for *_, path, _ in files:
        try:
            with Image.open(path) as image:
                image.load()
                mode = "L" if image.mode in ("1", "L", "I", "I;16") else "RGB"
                shape = (size, size) if size else image.size
                break
        except Exception:
            continue
    if not mode:
        raise SettingsError(
            f"{len(files)} images cannot be read, the first is {files[0][3]}"
        )
    images: Images = np.empty(
        (len(files), shape[1], shape[0], 1 if mode == "L" else 3), np.uint8
    )
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        decoded: Iterator[Images | None] = pool.map(read, (f[3] for f in files))
        progress = track(decoded, "Decoding images (once)", len(files), transient=True)
        for i, pixels in enumerate(progress):
            if pixels is not None:
                images[i] = pixels
    if unreadable:
        raise SettingsError(
            f"{len(unreadable)} images cannot be read, the first is {min(unreadable)}"
        )
    labels = np.array([label for _, _, label, _, _ in files], dtype=np.int64)
    owners = np.array([owner for _, owner, _, _, _ in files], dtype=np.int64)
    train = np.array([part == "train" for part, *_ in files])
    return Dataset(
        ImageSet(images[train], labels[train], owners[train]),
        ImageSet(images[~train], labels[~train], owners[~train]),
        classes,
        clients,
    )


def _arrays(settings: DataSettings) -> tuple[str, Build]:
    """Return ``train.npz`` and ``test.npz`` of a directory."""
    key, read = find_arrays(settings.data_dir)

    def build() -> Dataset:
        train, test, classes = read()
        return Dataset(_unowned(*train), _unowned(*test), classes)

    return key, build


SOURCES: dict[str, Callable[[DataSettings], tuple[str, Build]]] = {
    "digits": _digits,
    "mnist": _torchvision("MNIST"),
    "emnist": _torchvision("EMNIST", split="letters"),
    "femnist": _image_folder,
    "cifar10": _torchvision("CIFAR10"),
    "cifar100": _torchvision("CIFAR100"),
    "image-folder": _image_folder,
    "arrays": _arrays,
}
