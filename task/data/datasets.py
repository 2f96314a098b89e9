"""The data sets of image tasks, and where they are read from.

- ``digits`` is installed with scikit-learn, and torchvision downloads MNIST, EMNIST and
  CIFAR.
- ``image-folder`` and ``femnist`` read folders of images.
- ``arrays`` reads ``train.npz`` and ``test.npz``, each with ``images`` (uint8, of shape
  (n, height, width) or (n, height, width, channels)) and ``labels`` (n integers from
  0). An array of strings ``classes`` in ``train.npz`` names the classes; by default
  they are "0", "1", … up to the largest label in ``train.npz``.
- ``pfllib`` reads PFLlib's ``{train,test}/<client>.npz``. The key ``data`` of each file
  is a pickled dictionary of ``x`` and ``y``. A pickle can run any code, so only arrays
  of numbers are rebuilt, from their bytes.
"""

import io
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

import numpy as np
import numpy.typing as npt

from flwr_frl.common.settings import SettingsError, need, reading, reason_of, require
from flwr_frl.task.data.cache import (
    MAX_CLASSES,
    PARTS,
    Dataset,
    DataSettings,
    ImageSet,
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

Array = npt.NDArray[Any]

ARRAYS_FORM = (
    "train.npz and test.npz, each with images (uint8, n x height x width or n x height "
    "x width x channels) and labels (integers from 0), of one shape and the same "
    "classes in both, and in train.npz optionally the classes' names"
)
PFLLIB_FORM = (
    "train/<client>.npz and test/<client>.npz, as PFLlib writes them: 8-bit images n x "
    "channels x height x width, scaled to [-1, 1], and integer labels from 0"
)
# Names in numpy that the pickle of an array refers to, and accepted types of values.
PICKLED = {("numpy", name) for name in ("_reconstruct", "ndarray", "dtype")}
DTYPES = frozenset(("f2", "f4", "f8", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8"))
# PFLlib maps pixels from [0, 255] to [-1, 1], which is inverted up to this error.
ROUNDING = 0.01
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
        shape, sets = common_shape(map(_picture, some), size), []
        number_of_class = {name: i for i, name in enumerate(classes)}
        number_of_client = {name: i for i, name in enumerate(clients)}
        for part in parts:
            codes = np.array([number_of_class[path.parts[-2]] for path in part])
            owners = None
            if client:
                owners = np.array([number_of_client[path.parts[-4]] for path in part])
            pictures = Pictures(map(_picture, part), len(part), shape)
            sets.append(ImageSet(pictures, codes, owners))
        return Dataset(sets[0], sets[1], classes, clients)

    key = f"{root.resolve()}/{size}/{(clients, classes)}{FORM}/{stamp(paths)}"
    return key, read


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


def client_files(settings: DataSettings) -> tuple[str, Read]:
    """Return the key of PFLlib's folders, and a function that reads them.

    Raises
    ------
    SettingsError
        If a folder is missing or empty, or a client has a file in only one of them;
        later, if a file is unreadable or has other values than images and classes.
    """
    root = Path(settings.data_dir).expanduser()
    names, tested = ({p.stem for p in (root / part).glob("*.npz")} for part in PARTS)
    exist = bool(settings.data_dir) and bool(names) and names == tested
    allowed = f"a directory with {PFLLIB_FORM}; both for every client"
    require(exist, "data-dir", settings.data_dir, allowed)
    clients = sorted(names, key=lambda name: (len(name), name))
    train, test = ([root / part / f"{c}.npz" for c in clients] for part in PARTS)

    def read_part(paths: list[Path]) -> ImageSet:
        parts = [_read_pfllib(path) for path in paths]
        owners = np.repeat(np.arange(len(paths)), [len(labels) for _, labels in parts])
        # Clients without images lack the others' shape.
        images = np.concatenate([own for own, labels in parts if len(labels)])
        return ImageSet(images, np.concatenate([labels for _, labels in parts]), owners)

    def read() -> Dataset:
        with reading(root, "data-dir", PFLLIB_FORM):
            sets = read_part(train), read_part(test)
            count = 1 + int(max(part.labels.max() for part in sets))
            return Dataset(*sets, tuple(map(str, range(count))), tuple(clients))

    return f"pfllib/2/{root.resolve()}/{stamp([*train, *test])}", read


def _check(valid: bool) -> None:
    if not valid:
        raise ValueError("its arrays do not fit")


def _labelled(images: Array, labels: Array) -> ImageSet:
    """Return images, channels last, with their classes, if both are valid."""
    _check(images.ndim == 4 and 0 not in images.shape)
    _check(labels.dtype.kind in "iu" and labels.shape == images.shape[:1])
    # As many names of classes would fill the memory.
    _check(0 <= labels.min() <= labels.max() < MAX_CLASSES)
    return ImageSet(images.astype(np.uint8, copy=False), labels.astype(np.int64))


def _read_images(path: Path) -> tuple[ImageSet, tuple[str, ...]]:
    """Return the images of a file, and the names of the classes if it has them."""
    # A pickle could run any code.
    with (
        reading(path, "data-dir", ARRAYS_FORM),
        np.load(path, allow_pickle=False) as file,
    ):
        images = file["images"]
        names = file["classes"] if "classes" in file else np.empty(0, np.str_)
        images = images[..., None] if images.ndim == 3 else images
        _check(images.dtype == np.uint8)
        _check((names.dtype.kind, names.ndim) == ("U", 1))
        part = _labelled(images, file["labels"])
        # Channels first are a frequent mistake.
        _check(images.shape[1] not in (1, 3) or images.shape[3] <= 4)
        return part, tuple(map(str, names))


class _StandIn:
    """Replaces NumPy's arrays and types, which are not safe to restore from a file."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments, self.state = arguments, ()

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Builds only dictionaries, lists, numbers, text and stand-ins for arrays."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name of NumPy; refuse any other."""
        # Older and newer versions of NumPy have the function in different modules.
        if (module.partition(".")[0], name) not in PICKLED:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return _StandIn


def _array(pickled: Any) -> Array:
    """Return the array of numbers that a stand-in describes."""
    _, shape, dtype, is_fortran, data = pickled.state
    if dtype.arguments[0] not in DTYPES:
        raise ValueError(f"it has values of type {dtype.arguments[0]!r}")
    kind = np.dtype(dtype.arguments[0]).newbyteorder(dtype.state[1])
    return np.frombuffer(data, kind).reshape(shape, order="F" if is_fortran else "C")


def _read_pfllib(path: Path) -> tuple[Array, Array]:
    """Return 8-bit images, channels last, and labels of a client's file."""
    with reading(path, "data-dir", PFLLIB_FORM):
        with ZipFile(path) as archive, archive.open("data.npy") as file:
            np.lib.format.read_magic(file)
            np.lib.format.read_array_header_1_0(file)
            (content,) = _Unpickler(io.BytesIO(file.read())).load().state[-1]
        x, y = _array(content["x"]), _array(content["y"])
        if not len(y):
            return np.zeros(0, np.uint8), np.zeros(0, np.int64)
        pixels = x.astype(np.float32) * 127.5 + 127.5
        rounded = np.rint(pixels)
        # Not true for NaN, either.
        _check(bool(np.abs(pixels - rounded).max() < ROUNDING))
        _check(rounded.min() >= 0 and rounded.max() <= 255 and x.shape[1] in (1, 3))
        part = _labelled(rounded.transpose(0, 2, 3, 1), y)
        return part.images, part.labels


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
