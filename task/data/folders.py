"""Image folders: their classes, clients and images."""

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flwr_frl.common.settings import SettingsError, require
from flwr_frl.task.data.cache import (
    PARTS,
    Dataset,
    DataSettings,
    ImageSet,
    Read,
    stamp,
)
from flwr_frl.task.data.images import (
    FORM,
    IMAGE_SUFFIXES,
    INSPECTED,
    Pictures,
    Source,
    common_shape,
)

LAYOUT = "train/<class>/* and test/<class>/*, or <client>/train/<class>/*"


class Listed(NamedTuple):
    """An image: its part of the data set, client, class, and file."""

    part: str
    owner: int
    label: str
    path: str


def image_folder(settings: DataSettings) -> tuple[str, Read]:
    """Return the key of an image folder, and a function that reads it.

    Parameters
    ----------
    settings : DataSettings
        ``data_dir`` has ``train/<class>/*`` and ``test/<class>/*``, or
        ``<client>/train/<class>/*`` and ``<client>/test/<class>/*``. Folders of
        ``classes`` may be missing or empty. By default every class folder is a class.

    Raises
    ------
    SettingsError
        If the directory or a part of it is missing or empty, or if a folder's name is
        not among ``classes``.
    """
    data_dir, size = settings.data_dir, settings.image_size
    names = [name.strip() for name in settings.classes.split(",") if name.strip()]
    unique = len(set(names)) == len(names)
    require(unique, "classes", settings.classes, "names without duplicates")
    root, clients = Path(data_dir).expanduser(), tuple[str, ...]()
    exists = bool(data_dir) and root.is_dir()
    require(exists, "data-dir", data_dir, f"a directory with {LAYOUT}")
    try:
        if not (root / "train").is_dir():
            folders = [
                folder for folder in root.iterdir() if (folder / "train").is_dir()
            ]
            clients = tuple(sorted(folder.name for folder in folders))
        images = list(_list(root, clients, names))
    except OSError as error:
        line = f"data-dir {data_dir!r} cannot be read: {error}"
        raise SettingsError(line, "data-dir") from None
    parts = [[image for image in images if image.part == part] for part in PARTS]
    require(all(parts), "data-dir", data_dir, f"a directory with {LAYOUT}")
    classes = tuple(names) or tuple(sorted({image.label for image in images}))
    codes = {name: code for code, name in enumerate(classes)}

    def read() -> Dataset:
        ordered = [image for part in parts for image in part]
        some = ordered[:: -(-len(ordered) // INSPECTED)]
        shape, sets = common_shape(map(_source, some), size), []
        for part in parts:
            labels = np.array([codes[image.label] for image in part], np.int64)
            owners = np.array([image.owner for image in part], np.int64)
            pictures = Pictures(map(_source, part), len(part), shape)
            sets.append(ImageSet(pictures, labels, owners if clients else None))
        return Dataset(sets[0], sets[1], classes, clients)

    files = stamp(Path(image.path) for image in images)
    return f"{root.resolve()}/{size}/{(clients, names)}{FORM}/{files}", read


def _list(root: Path, clients: Sequence[str], names: Sequence[str]) -> Iterator[Listed]:
    """Yield all images, by client, part, class and name."""
    for owner, client in enumerate(clients or [""]):
        for part in PARTS:
            for label in sorted((root / client / part).glob("*")):
                if not label.is_dir():
                    continue
                if names and label.name not in names:
                    allowed = f"one of the classes {', '.join(names)}"
                    require(False, "class folder", str(label), allowed, "classes")
                with os.scandir(label) as entries:
                    files = sorted(entries, key=lambda entry: entry.name)
                # Opening a pipe would block. Broken links are kept: decoding reports
                # them.
                images = [
                    file.path
                    for file in files
                    if Path(file.name).suffix.lower() in IMAGE_SUFFIXES
                    and (file.is_symlink() or file.is_file())
                ]
                if not images and not (names and not files):
                    line = f"class folder {str(label)!r} has no images"
                    raise SettingsError(line, "data-dir")
                for path in images:
                    yield Listed(part, owner, label.name, path)


def _source(image: Listed) -> Source:
    from PIL import Image

    return image.path, partial(Image.open, image.path)
