"""The output folder of a run: locking, archiving earlier runs, clients' states."""

import contextlib
from collections.abc import Iterator
from datetime import datetime
from logging import WARNING
from pathlib import Path

from filelock import FileLock, Timeout
from flwr.common import log

from flwr_frl.common.checkpoint import FILE as CHECKPOINT
from flwr_frl.common.errors import SettingsError
from flwr_frl.common.files import ACCOUNT_FILE, PRIVATE, refuse_links, write_atomically

# The folder of the simulated clients' states, and the names of the files of a client.
STATES, OF_CLIENT = "clients", ("*.safetensors*", f"*{ACCOUNT_FILE}*")


@contextlib.contextmanager
def locked(output: Path, algorithm: str = "", wait: bool = False) -> Iterator[None]:
    """Lock an output folder, or an algorithm's folder in it, which is created.

    The lock ends with the process. Its file is in the output folder, as Windows cannot
    rename a folder with an open file.

    Raises
    ------
    SettingsError
        If another process holds the lock and ``wait`` is False.
    OSError
        If the folder cannot be created.
    """
    directory = output / algorithm
    directory.mkdir(parents=True, exist_ok=True)
    lock = FileLock(output / f".{algorithm or 'results'}.lock")
    try:
        lock.acquire(blocking=wait)
    except Timeout:
        raise SettingsError(
            f"output is {str(output)!r}, but another run is writing to "
            f"{str(directory)!r}; wait until it ends or set another output",
            "output",
        ) from None
    # Some network file systems do not support locks.
    except (OSError, NotImplementedError) as error:
        log(WARNING, "%s cannot be locked: %s", directory, error)
    try:
        yield
    finally:
        lock.release()


def archive_run(output: Path, algorithm: str) -> None:
    """Move an earlier run of an algorithm to ``earlier-<time>/<algorithm>``.

    The run can be resumed from there; the log shows how. Runs without a checkpoint are
    not archived. Raises `SettingsError` if another run is writing to the folder.
    """
    directory = output / algorithm
    refuse_links("output", directory)
    checkpoint = directory / CHECKPOINT
    if not checkpoint.is_file():
        return
    name = f"earlier-{datetime.now():%Y-%m-%d-%H%M}"
    archive, number = output / name, 1
    # A link may lead out of the output folder.
    while archive.is_symlink() or (archive / algorithm).exists():
        number += 1
        archive = output / f"{name}-{number}"
    with locked(output, algorithm):
        archive.mkdir(exist_ok=True)
        directory.rename(archive / algorithm)
    text = 'the earlier run was moved to %s; continue it with resume="%s"'
    log(WARNING, text, archive, str(archive))


def prepare_directory(directory: Path, resumed: Path | None) -> None:
    """Prepare the folder of a run that starts or is resumed.

    The simulated clients start with the states of the resumed run, or with none: states
    of a run that was killed before its first checkpoint are removed. Only files named
    like ours are touched. The best round's checkpoint of the resumed run is copied as
    well.

    Parameters
    ----------
    directory : Path
        The run's folder.
    resumed : Path, optional
        The folder of the run to resume, possibly the same.

    Raises
    ------
    SettingsError
        If one of the folders is a link.
    OSError
        If a file cannot be copied.
    """
    of_clients = directory.glob(f"{STATES}/*")
    refuse_links("output", directory, directory / STATES, *of_clients)
    if resumed and resumed.resolve() == directory.resolve():
        return
    for path in _files_of_clients(directory):
        path.unlink(missing_ok=True)
    if resumed:
        for path in _files_of_clients(resumed):
            copy = directory / path.relative_to(resumed)
            write_atomically(copy, path.read_bytes(), durable=False, mode=PRIVATE)


def _files_of_clients(directory: Path) -> list[Path]:
    """Return the existing files of a run's clients."""
    places = (f"{STATES}/[0-9]*/{name}" for name in OF_CLIENT)
    return [path for place in places for path in directory.glob(place)]
