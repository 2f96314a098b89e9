"""Decoding of image files."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import numpy.typing as npt

from flwr_frl.common.settings import reading

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = npt.NDArray[np.uint8]
Shape = tuple[int, int, int]
# An image that is not decoded yet: its name in messages, and a function that opens it.
Source = tuple[str, "Callable[[], Image]"]

# Version of decoded images; a change invalidates those in the cache.
FORM = "/4"
# Number of images that decide whether a data set is grey.
INSPECTED = 200
# Bytes of decoded images held in memory at once.
BLOCK = 16 * 2**20
IMAGE_SUFFIXES = frozenset(
    (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
)


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
    ValueError
        If pixels have 32 bits: their range is unknown.
    """
    from PIL import Image

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
    from PIL import Image

    with Image.open(path) as image:
        return pixels_of(image, channels, size)


def common_shape(sources: Iterable[Source], size: int) -> Shape:
    """Return the height, width and channels to which images are converted.

    Parameters
    ----------
    sources : iterable of Source
        Some of the images. There are 3 channels if any of them has colours.
    size : int
        Side in pixels; 0 keeps the size of the first readable image.
    """
    first, channels = None, 1
    for _, load in sources:
        # Damaged files raise nearly any exception; `Pictures.write` reports them.
        with suppress(Exception), load() as image:
            first = first or upright(image).size
            grey = image.mode in ("1", "L", "LA", "La") or image.mode.startswith("I;16")
            channels = channels if grey else 3
    width, height = (size, size) if size else first or (1, 1)
    return height, width, channels


class Pictures:
    """Images that are decoded when they are written to the cache.

    Parameters
    ----------
    sources : iterable of Source
        The images.
    count : int
        Their number.
    shape : tuple of int
        Height, width and channels to which they are converted.
    """

    def __init__(self, sources: Iterable[Source], count: int, shape: Shape) -> None:
        self.sources, self.count, self.shape = sources, count, shape

    def write(self, file: BinaryIO) -> None:
        """Decode the images in threads, and write them as an ``.npy`` file.

        Raises
        ------
        SettingsError
            If an image cannot be read.
        """
        from rich.progress import Progress

        shape = self.count, *self.shape
        header = {"descr": "|u1", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        size, sources = max(1, BLOCK // int(np.prod(self.shape))), iter(self.sources)
        with (
            ThreadPoolExecutor(os.cpu_count()) as pool,
            Progress(transient=True) as bar,
        ):
            task = bar.add_task("Decoding images (once)", total=self.count)
            # `map` decodes ahead, so blocks bound the memory.
            while block := list(islice(sources, size)):
                for pixels in pool.map(self._decoded, block):
                    file.write(np.ascontiguousarray(pixels).data)
                bar.advance(task, len(block))

    def _decoded(self, source: Source) -> Pixels:
        place, load = source
        height, width, channels = self.shape
        with reading(f"image {place}", "data-dir"), load() as image:
            return pixels_of(image, channels, (width, height))
