"""Images of clients in PFLlib's folders: ``{train,test}/<client>.npz``.

The key ``data`` of each file is a pickled dictionary of ``x`` and ``y``. A pickle can
run any code, so this module rebuilds only arrays of numbers, from their bytes.
"""

import io
import pickle
from pathlib import Path
from pickletools import genops
from typing import Any
from zipfile import ZipFile

import numpy as np
import numpy.typing as npt

from flwr_frl.common.settings import SettingsError, reason_of, require
from flwr_frl.task.data.cache import Arrays
from flwr_frl.task.data.columns import MAX_CLASSES
from flwr_frl.task.data.folders import PARTS
from flwr_frl.task.data.npz import check_size

LAYOUT = "train/<client>.npz and test/<client>.npz, as PFLlib writes them"
# Types of values; any other in a pickle is refused.
DTYPES = frozenset(("f2", "f4", "f8", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8"))
# PFLlib maps pixels from [0, 255] to [-1, 1], which is inverted up to this error.
ROUNDING = 0.01


class PFLlibFolder:
    """A data set in PFLlib's folders.

    Parameters
    ----------
    data_dir : str
        The directory that holds the folders ``train`` and ``test``.

    Attributes
    ----------
    clients : tuple of str
        Names of the clients, which are those of the files, in numeric order.
    key : str
        A key that changes when a file does.

    Raises
    ------
    SettingsError
        If a folder is missing or empty, or a client has a file in only one of them.
    """

    def __init__(self, data_dir: str) -> None:
        self.root = Path(data_dir).expanduser()
        names = [{path.stem for path in (self.root / p).glob("*.npz")} for p in PARTS]
        exist = bool(data_dir) and all(names)
        require(exist, "data-dir", data_dir, f"a directory with {LAYOUT}")
        if unpaired := sorted(names[0] ^ names[1]):
            line = f"data-dir {data_dir!r} has {unpaired[0]}.npz in one of train and "
            raise SettingsError(f"{line}test; expected in both", "data-dir")
        order = sorted(names[0], key=lambda name: (len(name), name))
        self.clients = tuple(order)
        stats = [path.stat() for part in PARTS for path in self.paths(part)]
        versions = [f"{s.st_size}-{s.st_mtime_ns}" for s in stats]
        self.key = f"pfllib/{self.root.resolve()}/{order}/{versions}"

    def paths(self, part: str) -> list[Path]:
        """Return the files of a part in the order of the clients."""
        return [self.root / part / f"{client}.npz" for client in self.clients]

    def read(self) -> tuple[Arrays, tuple[str, ...]]:
        """Return images, labels and owners of both parts, and the classes' names.

        Raises
        ------
        SettingsError
            If a file is unreadable or contains values other than numbers, or if images
            are missing or differ in shape.
        """
        arrays: Arrays = {}
        for part in PARTS:
            pairs = [_read(path) for path in self.paths(part)]
            counts = [len(labels) for _, labels in pairs]
            images = [image for image, labels in pairs if len(labels)]
            shapes = sorted({image.shape[1:] for image in images})
            if len(shapes) != 1:
                line = f"data-dir {str(self.root)!r} has images of shapes {shapes} in "
                allowed = f"{part}; expected images of one shape"
                raise SettingsError(line + allowed, "data-dir")
            arrays[f"{part}-images"] = np.concatenate(images)
            arrays[f"{part}-labels"] = np.concatenate([labels for _, labels in pairs])
            arrays[f"{part}-owners"] = np.repeat(np.arange(len(pairs)), counts)
        labels = [arrays[f"{part}-labels"].max() for part in PARTS]
        return arrays, tuple(str(i) for i in range(int(max(labels)) + 1))


class _DType:
    """Replaces ``numpy.dtype``, which is not safe to restore from a hostile file."""

    def __init__(self, name: str, *_: object) -> None:
        self.name, self.order = name, "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = state[1]


class _Array:
    """Replaces ``numpy.ndarray``, and the function that creates an empty array."""

    def __init__(self, *_: object) -> None:
        self.value: Any = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, is_fortran, data = state
        if type(data) is list:
            self.value = data
            return
        if dtype.name not in DTYPES:
            raise pickle.UnpicklingError(f"it has values of type {dtype.name!r}")
        values = np.frombuffer(data, np.dtype(dtype.name).newbyteorder(dtype.order))
        self.value = values.reshape(shape, order="F" if is_fortran else "C")


# Older and newer versions of NumPy have the function in different modules.
STAND_INS: dict[tuple[str, str], type] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _DType,
}


class _Unpickler(pickle.Unpickler):
    """Builds only dictionaries, lists, numbers, text and arrays."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name of NumPy; refuse any other."""
        if (module, name) not in STAND_INS:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return STAND_INS[module, name]


def _check_pickle(pickled: bytes) -> None:
    """Raise `ValueError` if unpickling would allocate more than the pickle contains.

    The unpickler allocates the memory of an object before it reads it, and that of its
    memo up to the largest index. `genops` refuses objects that are cut off.
    """
    for count, (opcode, argument, _) in enumerate(genops(pickled)):
        if opcode.name.endswith("PUT") and int(argument or 0) > count:
            raise ValueError(f"it has the index {argument} in its memo")


def _read(path: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Return the images (n, height, width, channels) and labels of a file."""
    try:
        with ZipFile(path) as archive, archive.open("data.npy") as file:
            check_size(path, archive)
            np.lib.format.read_magic(file)
            _, _, dtype = np.lib.format.read_array_header_1_0(file)
            if not dtype.hasobject:
                raise ValueError(f"its data is of type {dtype}")
            pickled = file.read()
        _check_pickle(pickled)
        (content,) = _Unpickler(io.BytesIO(pickled)).load().value
        x, y = content["x"].value, content["y"].value
        for name, array in (("x", x), ("y", y)):
            # Lists that contain each other could fill the memory as arrays.
            if not (isinstance(array, np.ndarray) and array.ndim):
                raise ValueError(f"its {name} is no array of numbers")
    # Damaged and hostile files raise nearly any exception.
    except Exception as error:
        raise SettingsError(
            f"{str(path)!r} cannot be read: {reason_of(error)}; expected a dictionary "
            "of the arrays x and y under the key data",
            "data-dir",
        ) from None
    labels = y.dtype.kind in "iu" and y.ndim == 1 and len(x) == len(y)
    if not labels or (len(y) and not 0 <= y.min() <= y.max() < MAX_CLASSES):
        raise SettingsError(
            f"{str(path)!r} has {len(x)} inputs and a y of type {y.dtype} and shape "
            f"{y.shape}; expected one class per input, from 0 to {MAX_CLASSES - 1}",
            "data-dir",
        )
    return _pixels(path, x) if len(y) else np.zeros(0, np.uint8), y.astype(np.int64)


def _pixels(path: Path, x: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return images in [-1, 1] with channels first as 8-bit images, channels last."""
    is_image = x.ndim == 4 and x.shape[1] in (1, 3) and 0 not in x.shape
    if is_image:
        values = x.astype(np.float32) * 127.5 + 127.5
        rounded = np.rint(values)
        error = np.abs(values - rounded).max()
        # NaN fails, too.
        if error < ROUNDING and rounded.min() >= 0 and rounded.max() <= 255:
            pixels = rounded.astype(np.uint8).transpose(0, 2, 3, 1)
            return np.ascontiguousarray(pixels)
    raise SettingsError(
        f"{str(path)!r} has an x of type {x.dtype} and shape {x.shape}; expected 8-bit "
        "images n x channels x height x width, scaled to [-1, 1] as by PFLlib",
        "data-dir",
    )
