"""Disk cache of data sets: one folder of ``.npy`` files each, with checksums.

Data sets are written once and memory-mapped afterwards, so that all processes of a
machine share one copy. Incomplete and damaged folders are never used.
"""

import json
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from flwr_frl.common.files import sync
from flwr_frl.common.settings import SettingsError

Arrays = dict[str, npt.NDArray[Any]]
# Writes the files of a data set into an empty directory.
Build = Callable[[Path], None]

CHECKSUMS = "checksums.json"
# Prefix of unfinished folders. It must not match the files of other programs.
PARTIAL = ".flwr-frl-partial-"
# Seconds since its last change after which a partial folder counts as abandoned.
PARTIAL_AGE = 3600.0
# Checksums cover up to BLOCKS blocks of BLOCK bytes, evenly spread over large files.
BLOCK, BLOCKS = 2**18, 256
# Required free disk space, relative to the size of the arrays.
SPACE_MARGIN = 1.02


def ensure_built(directory: Path, build: Build) -> None:
    """Build a folder of the cache unless it exists and is intact.

    Parameters
    ----------
    directory : Path
        The folder; its parent is the cache.
    build : callable
        Writes the files. They appear in the cache all at once, or not at all.

    Raises
    ------
    SettingsError
        If the cache cannot be written, or the disk is full.
    """
    if directory.exists() and not is_intact(directory):
        remove_damaged(directory)
    if not directory.exists():
        _store(build, directory)


def _store(build: Build, directory: Path) -> None:
    partial: Path | None = None
    cache = directory.parent
    missing = [path for path in (cache, *cache.parents) if not path.exists()]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        remove_abandoned(cache)
        partial = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=cache))
        build(partial)
        seal(partial)
        partial.rename(directory)
        sync(cache)
    except OSError as error:
        # Another process may have stored the same data set first.
        if not directory.exists():
            raise SettingsError(
                f"the data cache {str(cache)!r} cannot be written ({error}); set "
                "cache-dir to a directory with enough space",
                "cache-dir",
            ) from None
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
        if not directory.exists():
            for path in missing:
                with suppress(OSError):
                    path.rmdir()


def remove_damaged(directory: Path) -> None:
    """Remove a damaged folder atomically; other processes may be reading it."""
    trash = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=directory.parent))
    # Another process may have removed the folder, or replaced it by an intact one.
    with suppress(OSError):
        moved = directory.rename(trash / directory.name)
        if is_intact(moved):
            moved.rename(directory)
    shutil.rmtree(trash, ignore_errors=True)


def remove_abandoned(cache: Path) -> None:
    """Remove the partial folders of processes that were killed."""
    for path in cache.glob(f"{PARTIAL}*"):
        with suppress(OSError):
            newest = max(p.stat().st_mtime for p in (path, *path.iterdir()))
            if time.time() - newest > PARTIAL_AGE:
                shutil.rmtree(path)


def seal(directory: Path) -> None:
    """Write the checksums of a folder's files, and flush all of them to disk."""
    sums = {path.name: checksum(path) for path in sorted(directory.iterdir())}
    (directory / CHECKSUMS).write_text(json.dumps(sums), encoding="utf-8")
    for path in [*directory.iterdir(), directory]:
        sync(path)


def is_intact(directory: Path) -> bool:
    """Return whether a folder's files match their checksums."""
    try:
        sums = json.loads((directory / CHECKSUMS).read_text(encoding="utf-8"))
        return bool(sums) and all(
            checksum(directory / name) == sealed for name, sealed in sums.items()
        )
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def checksum(path: Path) -> list[int]:
    """Return a file's length, and the CRC-32 of up to 64 MiB of it."""
    size = path.stat().st_size
    step = max(BLOCK, size // BLOCKS)
    crc = 0
    with path.open("rb") as file:
        for start in range(0, size, step):
            file.seek(start)
            crc = zlib.crc32(file.read(BLOCK), crc)
        # Truncation changes the end, which the blocks above need not cover.
        file.seek(max(0, size - BLOCK))
        crc = zlib.crc32(file.read(BLOCK), crc)
    return [size, crc]


def require_space(directory: Path, num_bytes: int) -> None:
    """Raise `OSError` unless the disk has space for ``num_bytes`` and a margin."""
    needed, free = int(num_bytes * SPACE_MARGIN), shutil.disk_usage(directory).free
    if free < needed:
        raise OSError(f"{needed:,} bytes are needed, {free:,} are free")


def save_arrays(directory: Path, arrays: Arrays) -> None:
    """Write arrays as ``.npy`` files, named by their keys."""
    for name, array in arrays.items():
        with (directory / f"{name}.npy").open("wb") as file:
            np.save(file, array, allow_pickle=False)


def open_pixels(
    directory: Path, part: str, count: int, shape: tuple[int, ...]
) -> BinaryIO:
    """Open the ``.npy`` file of a part's images, with its header written.

    The caller appends the uint8 pixels of ``count`` images of ``shape``.
    """
    file = (directory / f"{part}-images.npy").open("wb")
    header = {"descr": "|u1", "fortran_order": False, "shape": (count, *shape)}
    np.lib.format.write_array_header_1_0(file, header)
    return file
