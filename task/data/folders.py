"""Image folders: what is in them, and their decoding straight into files."""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from flwr_frl.task.data.images import (
    about_faded,
    channels_of,
    images_in,
    pixels_of,
    upright,
)
from flwr_frl.task.settings import SettingsError

PARTS = ("train", "test")
LAYOUT = "train/<class>/* and test/<class>/*, or <client>/train/<class>/*"
# Decoded images in memory at a time, in bytes.
BLOCK = 16 * 2**20
# Of what is decoded: another one decodes images anew that are in the cache.
FORM = "/3"
# Images of which it is seen whether all are grey.
SEEN = 200


@dataclass(frozen=True)
class ClassFolder:
    """The images of one class, of one client where the data is split over clients.

    Parameters
    ----------
    part : {"train", "test"}
        What they are for.
    owner : int
        The client, or -1.
    path : Path
        The folder; its name is the class.
    count : int
        How many images it has.
    """

    part: str
    owner: int
    path: Path
    count: int


class ImageFolder:
    """``train/<class>/*`` and ``test/<class>/*``, or ``<client>/train/<class>/*``.

    Only names are kept in memory, and those of one class folder at a time.

    Parameters
    ----------
    data_dir : str
        The directory.
    size : int
        Side in pixels to which images are brought; 0 takes that of the first image.
    names : sequence of str, default ()
        All classes, some of which may have no folder here or no image in it; by default
        those that have a folder.

    Attributes
    ----------
    classes, clients : tuple of str
        Their names; no clients where the data is not split over clients.
    key : str
        Changes when a file does.

    Raises
    ------
    SettingsError
        If there is no such directory, a part of it is missing or empty, or a folder is
        of no class.
    """

    def __init__(self, data_dir: str, size: int, names: Sequence[str] = ()) -> None:
        root = Path(data_dir).expanduser()
        if not data_dir or not root.is_dir():
            raise SettingsError(
                f"data-dir is {data_dir!r}; it must be a directory with {LAYOUT}"
            )
        found, self.clients = _class_folders(root)
        # Not all that is a file's name is text.
        about = f"{root.resolve()}/{size}/{self.clients}{FORM}{'/'.join(names)}"
        key = hashlib.sha256(os.fsencode(about))
        folders = []
        for part, owner, path in found:
            if names and path.name not in names:
                raise SettingsError(
                    f"class folder {str(path)!r} is of none of the classes "
                    f"{', '.join(names)}"
                )
            if names and not any(path.iterdir()):
                continue
            images = images_in(path, "class folder")
            folders.append(ClassFolder(part, owner, path, len(images)))
            for image in images:
                key.update(os.fsencode(f"{image.path}/{_version(image)}\n"))
        self.key = key.hexdigest()
        self.size = size
        self.folders = tuple(folders)
        for part in PARTS:
            if not self.of(part):
                raise SettingsError(f"data-dir {data_dir!r} has no images in {part!r}")
        here = {folder.path.name for folder in folders}
        self.classes = tuple(names) or tuple(sorted(here))

    def of(self, part: str) -> list[ClassFolder]:
        """Return the class folders of a part, in the order of their images."""
        return [folder for folder in self.folders if folder.part == part]

    def labels(self, part: str) -> npt.NDArray[np.int64]:
        """Return the class of each image of a part."""
        folders = self.of(part)
        labels = [self.classes.index(folder.path.name) for folder in folders]
        return np.repeat(labels, [folder.count for folder in folders])

    def owners(self, part: str) -> npt.NDArray[np.int64]:
        """Return the client of each image of a part."""
        folders = self.of(part)
        owners = [folder.owner for folder in folders]
        return np.repeat(owners, [folder.count for folder in folders])

    def paths(self, part: str) -> Iterator[Path]:
        """Yield the images of a part, those of a class folder by name."""
        for folder in self.of(part):
            images = images_in(folder.path, "class folder")
            if len(images) != folder.count:
                raise SettingsError(
                    f"{str(folder.path)!r} has {len(images)} images, and had "
                    f"{folder.count} a moment ago; start again when nobody changes it"
                )
            yield from (Path(image.path) for image in images)

    def shape(self) -> tuple[int, int, int]:
        """Return height, width and channels.

        The first readable image decides the size, unless it is set. A single image with
        colours among `SEEN`, spread over the class folders, makes it 3 channels.

        Raises
        ------
        SettingsError
            If no image can be read.
        """
        from PIL import Image

        size, channels = None, 1
        number = sum(folder.count for folder in self.folders)
        every = -(-number // SEEN)
        paths = (path for part in PARTS for path in self.paths(part))
        for i, path in enumerate(paths):
            if size and i % every:
                continue
            try:
                with Image.open(path) as image:
                    if size is None:
                        size = upright(image).size
                    channels = max(channels, channels_of(image))
            # A damaged file can raise nearly anything in a decoder.
            except Exception:
                continue
        if size:
            width, height = (self.size,) * 2 if self.size else size
            return height, width, channels
        first = next(self.paths("train"))
        raise SettingsError(f"{number} images cannot be read, the first is {first}")

    def decode(
        self, shape: tuple[int, int, int], files: Mapping[str, BinaryIO]
    ) -> tuple[str, ...]:
        """Write the pixels of each part into its file, one image after the other.

        Returns what a user should know of it.

        Raises
        ------
        SettingsError
            If images cannot be read.
        """
        from PIL import Image
        from rich.progress import Progress

        height, width, channels = shape
        blank = np.zeros(shape, np.uint8)
        unreadable, first = 0, ""
        faded: list[Path] = []

        def read(path: Path) -> npt.NDArray[np.uint8] | str:
            try:
                with Image.open(path) as image:
                    if channels_of(image) > channels:
                        faded.append(path)
                    return pixels_of(image, channels, (width, height))
            except Exception as error:
                return f"{path} ({error})"

        total = sum(folder.count for folder in self.folders)
        together = max(1, BLOCK // blank.nbytes)
        with (
            ThreadPoolExecutor(os.cpu_count()) as pool,
            Progress(transient=True) as bar,
        ):
            task = bar.add_task("Decoding images (once)", total=total)
            for part, file in files.items():
                for paths in _blocks(self.paths(part), together):
                    # A block at a time: what is decoded waits in memory.
                    for pixels in pool.map(read, paths):
                        if isinstance(pixels, str):
                            unreadable += 1
                            first = min(first, pixels) if first else pixels
                            pixels = blank
                        file.write(np.ascontiguousarray(pixels).data)
                    bar.advance(task, len(paths))
        if unreadable:
            raise SettingsError(
                f"{unreadable} images cannot be read, the first is {first}"
            )
        return about_faded(len(faded), total, str(min(faded, default="")))


def _version(image: "os.DirEntry[str]") -> str:
    """Return what changes with an image."""
    try:
        stat = image.stat()
    except OSError:
        # Of a link to nowhere; who reads it says so.
        return "unreadable"
    return f"{stat.st_size}/{stat.st_mtime_ns}"


def _blocks(paths: Iterator[Path], size: int) -> Iterator[list[Path]]:
    while block := list(islice(paths, size)):
        yield block


def _class_folders(
    root: Path,
) -> tuple[list[tuple[str, int, Path]], tuple[str, ...]]:
    """Return (part, client, folder) of every class folder, and the clients' names."""
    if (root / "train").is_dir():
        clients: tuple[str, ...] = ()
        parts = [(part, -1, root / part) for part in PARTS]
    else:
        clients = tuple(
            sorted(path.name for path in root.iterdir() if (path / "train").is_dir())
        )
        parts = [
            (part, owner, root / client / part)
            for owner, client in enumerate(clients)
            for part in PARTS
        ]
    folders = [
        (part, owner, folder)
        for part, owner, parent in parts
        if parent.is_dir()
        for folder in sorted(parent.iterdir())
        if folder.is_dir()
    ]
    for part in PARTS:
        if not any(found == part for found, _, _ in folders):
            raise SettingsError(
                f"data-dir {str(root)!r} has no class folders under {part!r}; it must "
                f"hold {LAYOUT}"
            )
    return folders, clients
