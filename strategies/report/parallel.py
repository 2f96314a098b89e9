"""Several runs of one command at the same time, each in a process of its own."""

import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from types import FrameType
from typing import Any, TypeVar

from rich.progress import track

from flwr_frl.strategies.report.terminal import console
from flwr_frl.task.settings import ResourceError

Result = TypeVar("Result")


def side_by_side(
    work: Callable[..., Result], items: Sequence[tuple[Any, ...]], jobs: int
) -> list[Result]:
    """Return the results of a function for each item, in their order.

    Parameters
    ----------
    work : callable
        A function of a module, as other processes have to find it.
    items : sequence of tuple
        Its arguments, each time.
    jobs : int
        How many processes; with 1 it is called here, one time after the other.

    Raises
    ------
    ResourceError
        If a process was killed.
    KeyboardInterrupt
        When all processes have ended as by Ctrl-C.
    Exception
        The first that the function raised, when the others have ended likewise.
    """
    if jobs == 1:
        return [work(*item) for item in items]
    level = logging.getLogger("flwr").level
    pool = ProcessPoolExecutor(
        min(jobs, len(items)),
        # A fork would share torch's threads and open files.
        multiprocessing.get_context("spawn"),
        _begin,
        (level,),
    )
    try:
        futures = [pool.submit(_work, work, *item) for item in items]
        done = as_completed(futures)
        for future in track(done, "runs", len(futures), console=console()):
            future.result()
    except BrokenProcessPool:
        raise ResourceError(
            f"one of {jobs} processes was killed, as by a lack of memory; with a "
            "lower --jobs it may be enough"
        ) from None
    except BaseException:
        for process in multiprocessing.active_children():
            process.terminate()
        pool.shutdown(cancel_futures=True)
        raise
    finally:
        pool.shutdown()
    return [future.result() for future in futures]


def _begin(level: int) -> None:
    """Log as the first process does; bars of several runs at once would mix up.

    A terminal's Ctrl-C is left to the first process: a second one could come while a
    checkpoint is written. What is ignored, as with ``nohup``, stays so.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)
    threading.Thread(target=_end_with_the_first, daemon=True).start()
    logging.getLogger("flwr").setLevel(level)
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def _end_with_the_first() -> None:
    """End when the first process has, even of kill -9; else this one would stay."""
    first = multiprocessing.parent_process()
    assert first is not None
    first.join()
    os._exit(1)


class _Process:
    """What one of the processes is doing, and whether it was told to end."""

    works = told = False


def _end(number: int, frame: FrameType | None) -> None:
    """End the work as by Ctrl-C, if there is any; once, as it may write a checkpoint.

    A process that waits is ended by the first one: killed, it would hold the queue that
    the others read.
    """
    first, _Process.told = not _Process.told, True
    if first and _Process.works:
        raise KeyboardInterrupt


def _work(work: Callable[..., Result], *item: Any) -> Result:
    """Work, unless it is over: what a process has taken cannot be cancelled."""
    _Process.works = True
    try:
        if _Process.told:
            raise KeyboardInterrupt
        return work(*item)
    finally:
        _Process.works = False
