"""Image folders: their classes, clients and images."""

from functools import partial
from pathlib import Path

import numpy as np

from flwr_frl.common.settings import SettingsError, require, unknown
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


def image_folder(settings: DataSettings) -> tuple[str, Read]:
    """Return the key of an image folder, and a function that reads it.

    Parameters
    ----------
    settings : DataSettings
        ``data_dir`` has ``train/<class>/*`` and ``test/<class>/*``, or
        ``<client>/train/<class>/*`` and ``<client>/test/<class>/*``. Folders of
        ``classes`` may be missing or empty. By default every folder with images is a
        class.

    Raises
    ------
    SettingsError
        If the directory or a part of it is missing or empty, or if a folder's name is
        not among ``classes``.
    """
    data_dir, size = settings.data_dir, settings.image_size
    named = [name.strip() for name in settings.classes.split(",") if name.strip()]
    unique = len(set(named)) == len(named)
    require(unique, "classes", settings.classes, "names without duplicates")
    root = Path(data_dir).expanduser()
    exists = bool(data_dir) and root.is_dir()
    require(exists, "data-dir", data_dir, f"a directory with {LAYOUT}")
    client = "" if (root / "train").is_dir() else "*/"
    try:
        parts = [
            sorted(filter(_is_image, root.glob(f"{client}{part}/*/*")))
            for part in PARTS
        ]
    except OSError as error:
        line = f"data-dir {data_dir!r} cannot be read: {error}"
        raise SettingsError(line, "data-dir") from None
    require(all(parts), "data-dir", data_dir, f"a directory with images in {LAYOUT}")
    paths = [path for part in parts for path in part]
    labels = sorted({path.parts[-2] for path in paths})
    for name in labels if named else ():
        if name not in named:
            raise unknown("class", name, named, code="classes")
    classes = tuple(named or labels)
    clients = tuple(sorted({path.parts[-4] for path in paths})) if client else ()

    def read() -> Dataset:
        some = paths[:: -(-len(paths) // INSPECTED)]
        shape, sets = common_shape(map(_source, some), size), []
        number_of_class = {name: i for i, name in enumerate(classes)}
        number_of_client = {name: i for i, name in enumerate(clients)}
        for part in parts:
            codes = np.array([number_of_class[path.parts[-2]] for path in part])
            owners = None
            if client:
                owners = np.array([number_of_client[path.parts[-4]] for path in part])
            pictures = Pictures(map(_source, part), len(part), shape)
            sets.append(ImageSet(pictures, codes, owners))
        return Dataset(sets[0], sets[1], classes, clients)

    key = f"{root.resolve()}/{size}/{(clients, named)}{FORM}/{stamp(paths)}"
    return key, read


def _is_image(path: Path) -> bool:
    # Opening a pipe would block. Broken links are kept: decoding reports them.
    readable = path.is_file() or path.is_symlink()
    return path.suffix.lower() in IMAGE_SUFFIXES and readable


def _source(path: Path) -> Source:
    from PIL import Image

    return str(path), partial(Image.open, path)
