"""Discovery and decoding of image files."""

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
    """Return the image files directly in a folder, sorted by name.

    Parameters
    ----------
    folder : Path
        The folder.
    kind : str, default "folder"
        How error messages call the folder.

    Raises
    ------
    SettingsError
        If it has none.
    """
    with os.scandir(folder) as entries:
        named = [e for e in entries if Path(e.name).suffix.lower() in IMAGE_SUFFIXES]
    # Opening a pipe would block. Broken links are kept: decoding reports them.
    images = [e for e in named if e.is_symlink() or e.is_file()]
    if not images:
        raise SettingsError(f"{kind} {str(folder)!r} has no images", "data-dir")
    return sorted(images, key=lambda entry: entry.name)


def channels_of(image: "Image") -> int:
    """Return the number of channels an image needs: 1 if it is grey, else 3."""
    grey = image.mode in ("1", "L", "LA", "La") or image.mode.startswith("I;16")
    if image.mode in ("P", "PA"):
        palette = image.getpalette("RGB") or []
        grey = palette[::3] == palette[1::3] == palette[2::3]
    return 1 if grey else 3


def upright(image: "Image") -> "Image":
    """Load an image and rotate it in place as its EXIF orientation demands."""
    from PIL import ImageOps

    image.load()
    # Damaged EXIF data must not make an image unreadable.
    with suppress(Exception):
        ImageOps.exif_transpose(image, in_place=True)
    return image


def pixels_of(image: "Image", channels: int, size: tuple[int, int]) -> Pixels:
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
    SettingsError
        If pixels have 32 bits: their range is unknown.
    """
    from PIL import Image

    image = upright(image)
    if image.mode in ("I", "F"):
        raise SettingsError(
            f"pixels are numbers of 32 bits (mode {image.mode}); they must have 8 or "
            "16 bits",
            "data-dir",
        )
    if image.mode.startswith("I;16"):
        # Pillow's conversion clips values above 255 to white.
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    converted = image.convert("L" if channels == 1 else "RGB")
    if converted.size != size:
        converted = converted.resize(size)
    return np.array(converted).reshape(size[1], size[0], channels)


def read_image(path: Path, channels: int, size: tuple[int, int]) -> Pixels:
    """Return `pixels_of` a file. Damaged files raise nearly any exception."""
    from PIL import Image

    with Image.open(path) as image:
        return pixels_of(image, channels, size)


def grey_note(count: int, total: int, first: str) -> tuple[str, ...]:
    """Return a notice that ``count`` of ``total`` images lose their colours, if any."""
    if not count:
        return ()
    return (
        f"{count} of {total} images have colours and become grey, like the others; the "
        f"first is {first}",
    )
