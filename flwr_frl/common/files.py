"""Atomic writes, and names of files. Imports neither torch nor flwr."""

import contextlib
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from flwr_frl.common.errors import SettingsError

# Mode of files that only their owner may read: heads, checkpoints, privacy accounts.
PRIVATE = 0o600
# A client's personal state after a round: its number among all that the client has
# written, the round of the server's newest checkpoint, the run, and the round.
STATE_FILE = re.compile(r"(\d{8,})-(\d{8})-(\w*)-(\d{8})\.safetensors")
# Suffix of damaged states, which are kept for inspection.
SET_ASIDE = ".set-aside"
# A privacy account, of a client or of the server.
ACCOUNT_FILE = "privacy.json"
# Windows has no such flag; users need a privilege to create links there.
NO_FOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
# Temporary files.
_PARTIAL = re.compile(r"\.(.+)\.[0-9a-f]{16}\.partial")


@contextlib.contextmanager
def atomic_file(
    path: Path, durable: bool = True, mode: int = 0o666
) -> Iterator[BinaryIO]:
    """Write a temporary file that replaces ``path`` when the context exits normally.

    The temporary file is in the same directory and has a random name, so that no link
    can be prepared there. A link at ``path`` is replaced; its target is unchanged.

    Parameters
    ----------
    path : Path
        The file. Missing parent directories are created.
    durable : bool, default True
        Whether to flush to disk, so that the file has the old or the new content after
        a crash of the machine. Otherwise this holds only for a crash of the process.
    mode : int, default 0o666
        Permissions before the umask is applied, such as `PRIVATE`.

    Raises
    ------
    OSError
        If the file cannot be written, for example because the disk is full. The
        temporary file is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    opened = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW, mode)
    try:
        with open(opened, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    # The rename is durable only after the directory has been flushed. Windows flushes
    # none.
    if durable and os.name != "nt":
        opened = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def write_atomically(
    path: Path, data: bytes, durable: bool = True, mode: int = 0o666
) -> None:
    """Replace the content of a file atomically.

    See `atomic_file` for the parameters and errors.
    """
    with atomic_file(path, durable, mode) as file:
        file.write(data)


def unfinished(name: str) -> str:
    """Return the final name of a temporary file, or "" for any other name."""
    return match[1] if (match := _PARTIAL.fullmatch(name)) else ""


def open_no_follow(path: str, flags: int) -> int:
    """Open a file without following a link; an ``opener`` for `open`.

    Missing files are created. Raises `OSError` if ``path`` is a link.
    """
    return os.open(path, flags | os.O_CREAT | NO_FOLLOW, 0o666)


def refuse_links(setting: str, *folders: Path) -> None:
    """Raise `SettingsError` if a folder is a link, which may point anywhere."""
    for folder in folders:
        if folder.is_symlink():
            line = f"{setting}: {str(folder)!r} is a link; expected a folder, as files"
            raise SettingsError(f"{line} in it are written and removed", setting)
