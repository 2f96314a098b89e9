"""What makes a folder of the cache one that can be relied on."""

import json
import os
import shutil
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

CHECKSUMS = "checksums.json"
# How names of folders begin that are not finished; no other program's do.
PARTIAL = ".flwr-frl-partial-"
# Seconds without a change after which nobody is still writing a partial folder.
PARTIAL_AGE = 3600.0
# Of each file so many bytes are checked: all, or evenly spread blocks of large ones.
BLOCK, BLOCKS = 2**18, 256


def seal(directory: Path) -> None:
    """Write the checksums of a folder's files, and all of it to the disk itself."""
    sums = {path.name: checksum(path) for path in sorted(directory.iterdir())}
    (directory / CHECKSUMS).write_text(json.dumps(sums), encoding="utf-8")
    for path in [*directory.iterdir(), directory]:
        sync(path)


def is_whole(directory: Path) -> bool:
    """Return whether a folder holds what was sealed."""
    try:
        sums = json.loads((directory / CHECKSUMS).read_text(encoding="utf-8"))
        return bool(sums) and all(
            checksum(directory / name) == said for name, said in sums.items()
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
        # The end is where files are cut off.
        file.seek(max(0, size - BLOCK))
        crc = zlib.crc32(file.read(BLOCK), crc)
    return [size, crc]


def sync(path: Path) -> None:
    """Have a file or a directory written to the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def remove_partial(cache: Path) -> None:
    """Remove what writers that were killed have left."""
    for path in cache.glob(f"{PARTIAL}*"):
        with suppress(OSError):
            newest = max(p.stat().st_mtime for p in (path, *path.iterdir()))
            if time.time() - newest > PARTIAL_AGE:
                shutil.rmtree(path)


def pixel_file(
    directory: Path, part: str, count: int, shape: tuple[int, ...]
) -> BinaryIO:
    """Return a part's file of images, open for their pixels."""
    file = (directory / f"{part}-images.npy").open("wb")
    header = {"descr": "|u1", "fortran_order": False, "shape": (count, *shape)}
    np.lib.format.write_array_header_1_0(file, header)
    return file
