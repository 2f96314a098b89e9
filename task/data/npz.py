"""Images as arrays in ``train.npz`` and ``test.npz``, read without pickles.

Each file has ``images`` (uint8, of shape (n, height, width) or (n, height, width,
channels)) and ``labels`` (n integers from 0). An array of strings ``classes`` in
``train.npz`` names the classes; by default they are "0", "1", … up to the largest label
in ``train.npz``.
"""

from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import numpy.typing as npt

from flwr_frl.common.settings import SettingsError, reason_of, require
from flwr_frl.task.data.columns import MAX_CLASSES

Part = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]

# Largest size of an archive's content in bytes: the larger one of this number, and of
# this multiple of the file's size. Images and labels shrink by far less.
SMALL, RATIO = 2**26, 100

FORM = (
    "train.npz and test.npz, each with images (uint8, n x height x width or n x height "
    "x width x channels) and labels (integers from 0)"
)


def version_of(data_dir: str) -> str:
    """Return a key that changes when the files of a directory do.

    Raises
    ------
    SettingsError
        If a file is missing.
    """
    paths = _paths(data_dir)
    exist = bool(data_dir) and all(path.is_file() for path in paths)
    require(exist, "data-dir", data_dir, f"a directory with {FORM}")
    stats = [path.stat() for path in paths]
    key = "/".join(f"{stat.st_size}-{stat.st_mtime_ns}" for stat in stats)
    return f"arrays/{paths[0].parent.resolve()}/{key}"


def read_arrays(data_dir: str) -> tuple[Part, Part, tuple[str, ...]]:
    """Return the training part, the test part and the names of the classes.

    Raises
    ------
    SettingsError
        If a file is unreadable or an array is invalid.
    """
    paths = _paths(data_dir)
    train, test = (_load(path) for path in paths)
    shape, expected = test["images"].shape[1:], train["images"].shape[1:]
    line = f"has images of shape {shape}; {paths[0].name} has the shape {expected}"
    _check(shape == expected, paths[1], line)
    names = _class_names(paths[0], train)
    parts = []
    for path, arrays in zip(paths, (train, test), strict=True):
        labels = arrays["labels"].astype(np.int64)
        for label in (labels.min(), labels.max()):
            allowed = f"from 0 to {len(names) - 1}, the classes of {paths[0].name}"
            line = f"has the label {label}; labels must be {allowed}"
            _check(0 <= label < len(names), path, line)
        parts.append((arrays["images"], labels))
    return parts[0], parts[1], names


def check_size(path: Path, archive: ZipFile) -> None:
    """Raise `ValueError` if an archive's content is too large for its file."""
    size = sum(entry.file_size for entry in archive.infolist())
    most = max(SMALL, RATIO * path.stat().st_size)
    if size > most:
        line = f"it unpacks to {size:,} bytes, and at most {most:,} are allowed"
        raise ValueError(f"{line} unless it is saved without compression")


def _paths(data_dir: str) -> list[Path]:
    return [Path(data_dir).expanduser() / f"{part}.npz" for part in ("train", "test")]


def _check(valid: bool, path: Path, problem: str) -> None:
    if not valid:
        raise SettingsError(f"{str(path)!r} {problem}", "data-dir")


def _class_names(path: Path, arrays: dict[str, npt.NDArray[Any]]) -> tuple[str, ...]:
    if "classes" not in arrays:
        last = int(arrays["labels"].max())
        allowed = f"{MAX_CLASSES - 1:,}, the largest possible class"
        _check(last < MAX_CLASSES, path, f"has the label {last}, above {allowed}")
        return tuple(str(i) for i in range(last + 1))
    classes = arrays["classes"]
    line = f"has classes of type {classes.dtype} and shape {classes.shape}"
    valid = classes.dtype.kind == "U" and classes.ndim == 1
    _check(valid, path, f"{line}; they must be a list of strings")
    names = tuple(str(name) for name in classes)
    unique = len(set(names)) == len(names)
    _check(unique, path, f"has a class twice: {', '.join(names)}")
    return names


def _load(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a file. Each is checked, apart from the range of labels."""
    try:
        # A pickle could run any code.
        with np.load(path, allow_pickle=False) as file:
            check_size(path, file.zip)
            names = {"images", "labels", "classes"}.intersection(file.files)
            arrays = {name: file[name] for name in sorted(names)}
    # Damaged files raise nearly any exception in numpy and zipfile.
    except Exception as error:
        problem = f"cannot be read: {reason_of(error)}"
        line = f"{str(path)!r} {problem}; expected an .npz without pickles"
        raise SettingsError(line, "data-dir") from None
    for name in ("images", "labels"):
        _check(name in arrays, path, f"has no {name!r}; data-dir must hold {FORM}")
    images, labels = arrays["images"], arrays["labels"]
    valid = images.dtype == np.uint8 and images.ndim in (3, 4) and 0 not in images.shape
    line = f"has images of type {images.dtype} and shape {images.shape}"
    form = "uint8, n x height x width (x channels)"
    _check(valid, path, f"{line}; they must be {form}")
    valid = labels.dtype.kind in "iu" and labels.shape == images.shape[:1]
    line = f"has labels of type {labels.dtype} and shape {labels.shape}"
    _check(valid, path, f"{line}; they must be {len(images)} integers, one per image")
    first = images.ndim == 4 and images.shape[1] in (1, 3) and images.shape[3] > 4
    line = f"has images of shape {images.shape}, apparently with channels first"
    _check(not first, path, f"{line}; they must be n x height x width x channels")
    if images.ndim == 3:
        arrays["images"] = images[..., None]
    return arrays
