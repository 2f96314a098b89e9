"""Image folders: their classes, clients and images."""

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flwr_frl.common.settings import SettingsError, require
from flwr_frl.task.data.cache import PARTS, Dataset, ImageSet, stamp
from flwr_frl.task.data.images import (
    FORM,
    INSPECTED,
    Pictures,
    Source,
    common_shape,
    images_in,
)

LAYOUT = "train/<class>/* and test/<class>/*, or <client>/train/<class>/*"


class Listed(NamedTuple):
    """An image: its part of the data set, client or -1, class, and file."""

    part: str
    owner: int
    label: str
    path: str


class ImageFolder:
    """``train/<class>/*`` and ``test/<class>/*``, or ``<client>/train/<class>/*``.

    Parameters
    ----------
    data_dir : str
        The directory.
    size : int
        Side in pixels to which images are resized; 0 keeps the size of the first image.
    names : sequence of str, default ()
        All classes; their folders may be missing or empty. By default every class
        folder is a class.

    Raises
    ------
    SettingsError
        If the directory or a part of it is missing or empty, or if a folder's name is
        not among ``names``.
    """

    def __init__(self, data_dir: str, size: int, names: Sequence[str] = ()) -> None:
        self.root, self.size, self.names = Path(data_dir).expanduser(), size, names
        exists = bool(data_dir) and self.root.is_dir()
        require(exists, "data-dir", data_dir, f"a directory with {LAYOUT}")
        self.clients: tuple[str, ...] = ()
        try:
            if not (self.root / "train").is_dir():
                folders = [f for f in self.root.iterdir() if (f / "train").is_dir()]
                self.clients = tuple(sorted(folder.name for folder in folders))
            self.images = list(self._list())
        except OSError as error:
            line = f"data-dir {data_dir!r} cannot be read: {error}"
            raise SettingsError(line, "data-dir") from None
        for part in PARTS:
            if not self.of(part):
                line = f"data-dir {data_dir!r} has no images in {part!r}; expected "
                raise SettingsError(line + LAYOUT, "data-dir")
        found = {image.label for image in self.images}
        self.classes = tuple(names) or tuple(sorted(found))

    def _list(self) -> Iterator[Listed]:
        """Yield all images, by client, part, class and name."""
        for owner, client in enumerate(self.clients or [""]):
            for part in PARTS:
                folder = self.root / client / part
                labels = sorted(f for f in folder.glob("*") if f.is_dir())
                for label in labels:
                    if self.names and label.name not in self.names:
                        allowed = f"one of the classes {', '.join(self.names)}"
                        require(False, "class folder", str(label), allowed, "classes")
                    if self.names and not any(label.iterdir()):
                        continue
                    for image in images_in(label, "class folder"):
                        yield Listed(part, owner, label.name, image.path)

    @property
    def key(self) -> str:
        """A key that changes when a file does."""
        texts = self.clients, self.names
        settings = f"{self.root.resolve()}/{self.size}/{texts}{FORM}"
        return f"{settings}/{stamp(Path(image.path) for image in self.images)}"

    def of(self, part: str) -> list[Listed]:
        """Return the images of a part."""
        return [image for image in self.images if image.part == part]

    def labels(self, part: str) -> npt.NDArray[np.int64]:
        """Return the class of each image of a part."""
        codes = {name: code for code, name in enumerate(self.classes)}
        return np.array([codes[image.label] for image in self.of(part)], np.int64)

    def read(self) -> Dataset:
        """Return the data set; its images are decoded when it is written."""
        parts = []
        for part in PARTS:
            images = self.of(part)
            owners = np.array([image.owner for image in images], np.int64)
            pictures = Pictures(map(_source, images), len(images), self.shape)
            of_clients = owners if self.clients else None
            parts.append(ImageSet(pictures, self.labels(part), of_clients))
        return Dataset(parts[0], parts[1], self.classes, self.clients)

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels of the images after decoding."""
        ordered = [*self.of("train"), *self.of("test")]
        some = ordered[:: -(-len(ordered) // INSPECTED)]
        return common_shape(map(_source, some), self.size)


def _source(image: Listed) -> Source:
    from PIL import Image

    return image.path, partial(Image.open, image.path)
