"""Image files: which ones there are, and what is in them."""

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from flwr_frl.task.settings import SettingsError

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = npt.NDArray[np.uint8]
IMAGE_SUFFIXES = frozenset(
    (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
)


def images_in(folder: Path, kind: str = "folder") -> list["os.DirEntry[str]"]:
    """Return a folder's own image files, by name.

    ``kind`` is what the error calls the folder.

    Raises
    ------
    SettingsError
        If there is none.
    """
    with os.scandir(folder) as entries:
        named = [e for e in entries if Path(e.name).suffix.lower() in IMAGE_SUFFIXES]
    # A pipe would be waited for; links that lead nowhere are named with the damaged.
    images = [e for e in named if e.is_symlink() or e.is_file()]
    if not images:
        raise SettingsError(f"{kind} {str(folder)!r} has no images")
    return sorted(images, key=lambda entry: entry.name)


def channels_of(image: "Image") -> int:
    """Return how many channels are needed: 1 if an image is grey, 3 for colours."""
    grey = image.mode in ("1", "L", "LA", "La") or image.mode.startswith("I;16")
    if image.mode in ("P", "PA"):
        palette = image.getpalette("RGB") or []
        grey = palette[::3] == palette[1::3] == palette[2::3]
    return 1 if grey else 3


def upright(image: "Image") -> "Image":
    """Turn an image as its camera was held; return it, loaded."""
    from PIL import ImageOps

    image.load()
    # What else is in a photograph's EXIF data may be damaged, and is not needed.
    with suppress(Exception):
        ImageOps.exif_transpose(image, in_place=True)
    return image


def pixels_of(image: "Image", channels: int, size: tuple[int, int]) -> Pixels:
    """Return an image in 1 channel, grey, or 3, `upright` at a (width, height).

    The array has the shape (height, width, channels); of 16 bits the upper 8 stay.

    Raises
    ------
    SettingsError
        If a pixel is a number of 32 bits, of which nobody knows what is white.
    """
    from PIL import Image

    image = upright(image)
    if image.mode in ("I", "F"):
        raise SettingsError(
            f"its pixels are numbers of 32 bits (mode {image.mode}); they must be of 8 "
            "or 16"
        )
    if image.mode.startswith("I;16"):
        # Pillow's own conversion makes all above 255 white.
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    found = image.convert("L" if channels == 1 else "RGB")
    if found.size != size:
        found = found.resize(size)
    return np.array(found).reshape(size[1], size[0], channels)


def read_image(path: Path, channels: int, size: tuple[int, int]) -> Pixels:
    """Return `pixels_of` a file. One that is damaged can raise nearly any exception."""
    from PIL import Image

    with Image.open(path) as image:
        return pixels_of(image, channels, size)


def about_faded(count: int, total: int, first: str) -> tuple[str, ...]:
    """Return what a user should know where images with colours became grey."""
    if not count:
        return ()
    return (
        f"{count} of {total} images have colours and become grey, as the others are; "
        f"the first is {first}",
    )
