"""Image folders: their classes, clients and images."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flwr_frl.common.settings import SettingsError, require
from flwr_frl.task.data.images import (
    FORM,
    INSPECTED,
    Shape,
    Source,
    common_shape,
    images_in,
)

PARTS = ("train", "test")
LAYOUT = "train/<class>/* and test/<class>/*, or <client>/train/<class>/*"


@dataclass(frozen=True)
class ClassFolder:
    """A folder with the images of one class (and one client, if split over clients).

    Parameters
    ----------
    part : {"train", "test"}
        Part of the data set.
    owner : int
        Index of the client, or -1.
    path : Path
        The folder, named like the class.
    count : int
        Number of images.
    """

    part: str
    owner: int
    path: Path
    count: int


class ImageFolder:
    """``train/<class>/*`` and ``test/<class>/*``, or ``<client>/train/<class>/*``.

    Memory holds the file names of one class folder at a time.

    Parameters
    ----------
    data_dir : str
        The directory.
    size : int
        Side in pixels to which images are resized; 0 keeps the size of the first image.
    names : sequence of str, default ()
        All classes; their folders may be missing or empty. By default every class
        folder is a class.

    Attributes
    ----------
    classes, clients : tuple of str
        Names of classes and clients; () for ``clients`` if the data is not split.
    key : str
        A key that changes when a file does.

    Raises
    ------
    SettingsError
        If the directory or a part of it is missing or empty, or if a folder's name is
        not among ``names``.
    """

    def __init__(self, data_dir: str, size: int, names: Sequence[str] = ()) -> None:
        root = Path(data_dir).expanduser()
        exists = bool(data_dir) and root.is_dir()
        require(exists, "data-dir", data_dir, f"a directory with {LAYOUT}")
        self.size = size
        try:
            self._list(root, names)
        except OSError as error:
            line = f"data-dir {data_dir!r} cannot be read: {error}"
            raise SettingsError(line, "data-dir") from None
        for part in PARTS:
            if not self.of(part):
                line = f"data-dir {data_dir!r} has no images in {part!r}"
                raise SettingsError(line, "data-dir")
        folder_names = {folder.path.name for folder in self.folders}
        self.classes = tuple(names) or tuple(sorted(folder_names))

    def _list(self, root: Path, names: Sequence[str]) -> None:
        """Set ``clients``, ``folders`` and ``key``."""
        paths, self.clients = _class_folders(root)
        # File names need not be valid Unicode.
        version = f"{root.resolve()}/{self.size}/{self.clients}{FORM}{'/'.join(names)}"
        key = hashlib.sha256(os.fsencode(version))
        folders = []
        for part, owner, path in paths:
            if names and path.name not in names:
                raise SettingsError(
                    f"class folder {str(path)!r} is not among the classes "
                    f"{', '.join(names)}",
                    "classes",
                )
            if names and not any(path.iterdir()):
                continue
            images = images_in(path, "class folder")
            folders.append(ClassFolder(part, owner, path, len(images)))
            for image in images:
                key.update(os.fsencode(f"{image.path}/{_version(image)}\n"))
        self.key = key.hexdigest()
        self.folders = tuple(folders)

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

    def sources(self, part: str) -> Iterator[Source]:
        """Yield the images of a part, sorted by name within a class folder."""
        from PIL import Image

        for folder in self.of(part):
            images = images_in(folder.path, "class folder")
            if len(images) != folder.count:
                raise SettingsError(
                    f"{str(folder.path)!r} changed from {folder.count} to "
                    f"{len(images)} images while it was read; start again",
                    "data-dir",
                )
            for image in images:
                yield image.path, partial(Image.open, image.path)

    def shape(self) -> Shape:
        """Return the height, width and channels of the images after decoding."""
        step = -(-sum(folder.count for folder in self.folders) // INSPECTED)
        sources = chain.from_iterable(map(self.sources, PARTS))
        return common_shape(islice(sources, 0, None, step), self.size)


def _version(image: "os.DirEntry[str]") -> str:
    """Return a key that changes when an image file does."""
    try:
        stat = image.stat()
    except OSError:
        # A broken link, which decoding reports.
        return "unreadable"
    return f"{stat.st_size}/{stat.st_mtime_ns}"


def _class_folders(
    root: Path,
) -> tuple[list[tuple[str, int, Path]], tuple[str, ...]]:
    """Return (part, client, path) of all class folders, and the clients' names."""
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
        if not any(part == other for other, _, _ in folders):
            raise SettingsError(
                f"data-dir {str(root)!r} has no class folders under {part!r}; it must "
                f"hold {LAYOUT}",
                "data-dir",
            )
    return folders, clients
