"""Images as arrays: ``train.npz`` and ``test.npz`` of a directory. No pickles."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flwr_frl.task.settings import SettingsError

Part = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]
Arrays = dict[str, npt.NDArray[Any]]

PARTS = ("train", "test")
HOLDS = (
    "train.npz and test.npz, each with images (uint8, n x height x width or n x height "
    "x width x channels) and labels (integers from 0)"
)


def find_arrays(
    data_dir: str,
) -> tuple[str, Callable[[], tuple[Part, Part, tuple[str, ...]]]]:
    """Find the arrays of a directory.

    Parameters
    ----------
    data_dir : str
        Holds ``train.npz`` and ``test.npz``, each with ``images`` (uint8, of shape
        (n, height, width) or (n, height, width, channels)) and ``labels`` (integers
        from 0). ``classes`` in ``train.npz``, an array of text, names the classes;
        without it they are "0", "1", ... up to the largest label.

    Returns
    -------
    key : str
        Changes when the files do.
    read : callable
        Returns the training part, the test part and the names of the classes.

    Raises
    ------
    SettingsError
        If a file is missing; ``read`` raises it if one does not hold what it must.
    """
    root = Path(data_dir).expanduser()
    paths = [root / f"{part}.npz" for part in PARTS]
    if not data_dir or not all(path.is_file() for path in paths):
        raise SettingsError(f"data-dir is {data_dir!r}; it must hold {HOLDS}")
    stats = [path.stat() for path in paths]
    key = "/".join(f"{stat.st_size}-{stat.st_mtime_ns}" for stat in stats)
    return f"arrays/{root.resolve()}/{key}", lambda: _read(*paths)


def _read(train: Path, test: Path) -> tuple[Part, Part, tuple[str, ...]]:
    first, second = _load(train), _load(test)
    if first["images"].shape[1:] != second["images"].shape[1:]:
        raise SettingsError(
            f"{str(test)!r} has images of shape {second['images'].shape[1:]}; they "
            f"must be as in {train.name}: {first['images'].shape[1:]}"
        )
    names = _class_names(train, first)
    parts = []
    for path, arrays in ((train, first), (test, second)):
        labels = arrays["labels"].astype(np.int64)
        if labels.min() < 0 or labels.max() >= len(names):
            wrong = labels.min() if labels.min() < 0 else labels.max()
            raise SettingsError(
                f"{str(path)!r} has the label {wrong}; labels must be from 0 to "
                f"{len(names) - 1}, for the classes of {train.name}"
            )
        parts.append((arrays["images"], labels))
    return parts[0], parts[1], names


def _class_names(path: Path, arrays: Arrays) -> tuple[str, ...]:
    if "classes" not in arrays:
        return tuple(str(i) for i in range(int(arrays["labels"].max()) + 1))
    classes = arrays["classes"]
    if classes.dtype.kind != "U" or classes.ndim != 1:
        raise SettingsError(
            f"{str(path)!r} has classes of type {classes.dtype} and shape "
            f"{classes.shape}; they must be a list of texts"
        )
    names = tuple(str(name) for name in classes)
    if len(set(names)) != len(names):
        raise SettingsError(f"{str(path)!r} has a class twice: {', '.join(names)}")
    return names


def _load(path: Path) -> Arrays:
    """Return the arrays of a file, checked by themselves."""
    try:
        # Never a pickle: it would run whatever its writer wanted.
        with np.load(path, allow_pickle=False) as file:
            wanted = {"images", "labels", "classes"}.intersection(file.files)
            arrays = {name: file[name] for name in sorted(wanted)}
    # A damaged file can raise nearly anything in numpy and zipfile.
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SettingsError(
            f"{str(path)!r} cannot be read: {reason}; it must be an .npz without "
            "pickles"
        ) from None
    missing = [name for name in ("images", "labels") if name not in arrays]
    if missing:
        raise SettingsError(
            f"{str(path)!r} has no {missing[0]!r}; it must hold {HOLDS}"
        )
    images, labels = arrays["images"], arrays["labels"]
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or 0 in images.shape:
        raise SettingsError(
            f"{str(path)!r} has images of type {images.dtype} and shape "
            f"{images.shape}; they must be uint8, n x height x width (x channels)"
        )
    if labels.dtype.kind not in "iu" or labels.shape != images.shape[:1]:
        raise SettingsError(
            f"{str(path)!r} has labels of type {labels.dtype} and shape "
            f"{labels.shape}; they must be {len(images)} integers, one an image"
        )
    if images.ndim == 4 and images.shape[1] in (1, 3) and images.shape[3] > 4:
        raise SettingsError(
            f"{str(path)!r} has images of shape {images.shape}, with the channels "
            "first as it seems; they must be n x height x width x channels"
        )
    if images.ndim == 3:
        arrays["images"] = images[..., None]
    return arrays
