"""The folder that a run writes to: its own for as long as it goes on."""

import contextlib
import fcntl
import os
from collections.abc import Collection, Iterator
from logging import ERROR, WARNING
from pathlib import Path

from flwr.common import log

from flwr_frl.strategies.report.results import (
    CLIENTS,
    METRICS,
    PAGE,
    PLOT,
    STATUS,
    SUMMARY,
    TIDY,
    read_json,
    write_json,
)
from flwr_frl.strategies.report.tables import LATEX, MARKDOWN
from flwr_frl.strategies.server.checkpoint import token_in
from flwr_frl.strategies.server.privacy import FILE as PRIVACY
from flwr_frl.task.checkpoint import FILE as CHECKPOINT
from flwr_frl.task.files import (
    ACCOUNT_FILE,
    PRIVATE,
    SET_ASIDE,
    STATE_FILE,
    refuse_links,
    unfinished,
    write_atomically,
)
from flwr_frl.task.settings import SettingsError

# Of clients that come after the training.
NEWCOMERS = ("newcomers.json", "newcomers.csv")
NEWCOMERS_PLOT = "newcomers.png"
# Where simulated clients keep their states.
STATES = "clients"
# What a run of an algorithm has written, and what its simulated clients keep.
OF_A_RUN = (METRICS, TIDY, CLIENTS, STATUS, *NEWCOMERS, PRIVACY, CHECKPOINT, STATES)
# What all runs in an output folder write together.
OF_ALL = (SUMMARY, TIDY, PLOT, NEWCOMERS_PLOT, PAGE, MARKDOWN, LATEX)


@contextlib.contextmanager
def said(what: object) -> Iterator[None]:
    """Log in one line that something could not be written, and go on."""
    try:
        yield
    except OSError as error:
        log(ERROR, "%s not written: %s", what, error)


@contextlib.contextmanager
def _in_one_line(what: str) -> Iterator[None]:
    """Raise `SettingsError` where the disk does not take what a run begins with."""
    try:
        yield
    except OSError as error:
        raise SettingsError(f"output: {what}: {error.strerror}") from None


@contextlib.contextmanager
def locked(directory: Path, wait: bool = False) -> Iterator[None]:
    """Have a directory, which is made if needed, for this process alone.

    Raises `SettingsError` if another one has it, unless it is waited for. Nothing stays
    behind, and what a process that is killed had locked is free.
    """
    with _in_one_line(f"{str(directory)!r} cannot be made"):
        directory.mkdir(parents=True, exist_ok=True)
    opened = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise SettingsError(
                f"output: another run is writing to {str(directory)!r}; wait for its "
                "end, or set another output"
            ) from None
        except OSError as error:
            # Some network file systems know no locks.
            log(WARNING, "%s cannot be locked: %s", directory, error)
        yield
    finally:
        os.close(opened)


def put_aside(output: Path, algorithm: str) -> None:
    """Keep what an earlier run of an algorithm has left, if it has a checkpoint.

    It moves to ``earlier-<run>/<algorithm>``, from where it can be resumed; the log
    says so. What was killed while it did goes on.
    """
    directory = output / algorithm
    refuse_links("output", directory)
    checkpoint = directory / CHECKPOINT
    if not checkpoint.is_file():
        return
    name = f"earlier-{token_in(checkpoint)}"
    parts = [part for part in OF_A_RUN if (directory / part).exists()]
    aside, number = output / name, 1
    # A link is not ours, wherever it leads.
    while aside.is_symlink() or any(
        (aside / algorithm / part).exists() for part in parts
    ):
        number += 1
        aside = output / f"{name}-{number}"
    with _in_one_line(f"what {str(directory)!r} has cannot be kept in {str(aside)!r}"):
        (aside / algorithm).mkdir(parents=True, exist_ok=True)
        # The checkpoint last: where it is, the rest is as well.
        for part in sorted(parts, key=lambda part: part == CHECKPOINT):
            (directory / part).rename(aside / algorithm / part)
    _move_summary(output, aside, algorithm)
    text = "what an earlier run left is kept in %s; resume=%r goes on from there"
    log(WARNING, text, aside, str(aside))


def _move_summary(output: Path, aside: Path, algorithm: str) -> None:
    """Take an earlier run out of the summary: it is no longer here."""
    path = output / SUMMARY
    with (
        locked(output, wait=True),
        contextlib.suppress(OSError, ValueError, LookupError, TypeError),
    ):
        whole = read_json(path)
        own = whole["algorithms"].pop(algorithm)
        write_json(aside / SUMMARY, {**whole, "algorithms": {algorithm: own}})
        if whole["algorithms"]:
            write_json(path, whole)
        else:
            path.unlink()


def take_over(directory: Path, resumed: Path | None) -> None:
    """Begin with the simulated clients' states of the run that is resumed, or none.

    What a run that was killed before its first checkpoint has left is not inherited.
    Devices keep theirs elsewhere: nothing but simulated clients' files is removed.
    What a killed run has left half-written goes. Raises `SettingsError` if one of the
    folders is a link.
    """
    own = directory / STATES
    refuse_links("output", directory, own)
    refuse_links("output", *_of_simulated(own))
    _remove_unfinished(directory, OF_A_RUN)
    # Runs of other algorithms write there, too, while they have it.
    with locked(directory.parent, wait=True):
        _remove_unfinished(directory.parent, OF_ALL)
    former = resumed / STATES if resumed else None
    if former and former.resolve() == own.resolve():
        return
    for folder in _of_simulated(own):
        _remove_state(folder)
    for folder in _of_simulated(former) if former else []:
        with _in_one_line(f"{str(folder)!r} cannot be copied to {str(own)!r}"):
            for path in filter(_is_state, folder.iterdir()):
                copy = own / folder.name / path.name
                write_atomically(copy, path.read_bytes(), durable=False, mode=PRIVATE)


def _remove_unfinished(directory: Path, names: Collection[str]) -> None:
    """Remove what killed writers of some files have left in a folder."""
    for path in directory.glob(".*"):
        if unfinished(path.name) in names:
            with contextlib.suppress(OSError):
                path.unlink()


def _of_simulated(states: Path) -> list[Path]:
    """Return the folders that are named by a partition, as simulated clients are."""
    return [path for path in states.glob("[0-9]" * 6 + "*") if path.name.isdecimal()]


def _is_state(path: Path) -> bool:
    """Return whether a file is called as those that a simulated client keeps."""
    name = (unfinished(path.name) or path.name).removesuffix(SET_ASIDE)
    return name == ACCOUNT_FILE or STATE_FILE.fullmatch(name) is not None


def _remove_state(folder: Path) -> None:
    """Remove what a simulated client has kept; what anybody else has there stays."""
    with contextlib.suppress(OSError):
        for path in filter(_is_state, folder.iterdir()):
            path.unlink()
        folder.rmdir()
