"""Image files: which ones there are, and what is in them."""

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from task.settings import SettingsError

IMAGE_SUFFIXES = frozenset(
    (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
)


def images_in(folder: Path, kind: str = "folder") -> list["os.DirEntry[str]"]:
    """Return the image files of a folder, by name.

    Parameters
    ----------
    folder : Path
        The folder; those below it are not looked into.
    kind : str, default "folder"
        What the error calls it.

    Returns
    -------
    list of os.DirEntry
        At least one.

    Raises
    ------
    SettingsError
        If there is none.
    """
    with os.scandir(folder) as entries:
        images = [e for e in entries if Path(e.name).suffix.lower() in IMAGE_SUFFIXES]
    if not images:
        raise SettingsError(f"{kind} {str(folder)!r} has no images")
    return sorted(images, key=lambda entry: entry.name)


def read_image(path: Path, mode: str, size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """Decode an image, converted and resized to what a model takes.

    Parameters
    ----------
    path : Path
        The image.
    mode : {"L", "RGB"}
        Grey or colour.
    size : (int, int)
        Width and height in pixels.

    Returns
    -------
    ndarray of uint8, shape (height, width, channels)
        The pixels.

    Raises
    ------
    Exception
        Nearly any, for a damaged file.
    """
    from PIL import Image

    with Image.open(path) as image:
        pixels = image.convert(mode)
        if pixels.size != size:
            pixels = pixels.resize(size)
        return np.asarray(pixels).reshape(size[1], size[0], -1)
