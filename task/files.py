"""Files that are wholly there or not at all. Needs neither torch nor flwr."""

import contextlib
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from flwr_frl.task.settings import SettingsError

# The mode of files that nobody but their owner may read: heads, checkpoints, accounts.
PRIVATE = 0o600
# A client's personal state after a round: the run's name, if it has one, and the round.
STATE_FILE = re.compile(r"(?:(\w+)-)?(\d{8})\.safetensors")
# Appended to the name of a damaged state, which is kept for a person to look at.
SET_ASIDE = ".set-aside"
# A client's account of its private training.
ACCOUNT_FILE = "privacy.json"
# Names of files that are not finished yet; earlier releases ended them with a process.
_PARTIAL = re.compile(r"\.(.+)\.(?:[0-9a-f]{16}\.partial|\d{1,10})")


@contextlib.contextmanager
def atomic_file(
    path: Path, durable: bool = True, mode: int = 0o666
) -> Iterator[BinaryIO]:
    """Write a new file that replaces ``path`` when the context is left without error.

    Until then it has a random name in the same folder, so that nobody can have put a
    link there. A link at ``path`` is replaced, and its target stays as it is.

    Parameters
    ----------
    path : Path
        The file. Its directory is made if needed.
    durable : bool, default True
        Wait for the disk, so that a crash of the machine leaves the old or the new
        content as well. Otherwise that holds for a crash of the process alone.
    mode : int, default 0o666
        Permissions, from which the umask is taken: `PRIVATE`, say.

    Raises
    ------
    OSError
        If it cannot be written (a full disk, say); nothing half-written stays behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    opened = os.open(partial, flags, mode)
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
    if not durable:
        return
    # The rename itself is durable only once the directory is.
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_atomically(
    path: Path, data: bytes, durable: bool = True, mode: int = 0o666
) -> None:
    """Replace a file so that a crash leaves the old or the new content, never a part.

    Parameters and errors are those of `atomic_file`.
    """
    with atomic_file(path, durable, mode) as file:
        file.write(data)


def unfinished(name: str) -> str:
    """Return which file a temporary file was to become; "" for any other name."""
    match = _PARTIAL.fullmatch(name)
    return match[1] if match else ""


def open_no_follow(path: str, flags: int) -> int:
    """Open a file to change it in place, made if needed: the ``opener`` of `open`.

    Raises `OSError` if a link is there.
    """
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o666)


def refuse_links(setting: str, *folders: Path) -> None:
    """Raise `SettingsError` if one of our folders is a link, which leads elsewhere."""
    for folder in folders:
        if folder.is_symlink():
            raise SettingsError(
                f"{setting}: {str(folder)!r} is a link; it must be a folder, as files "
                f"in it are written and removed; remove the link or set another "
                f"{setting}"
            )
