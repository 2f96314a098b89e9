"""Parallel runs of one command in separate processes, and signals that end a run."""

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from importlib import import_module
from types import FrameType
from typing import Any, TypeVar

from rich.progress import track

from flwr_frl.common.errors import ResourceError

Result = TypeVar("Result")
# Sent by a closing terminal; Windows has no such signal.
HANG_UP = [signal.SIGHUP] if hasattr(signal, "SIGHUP") else []


@contextlib.contextmanager
def signals_as_ctrl_c() -> Iterator[None]:
    """Handle SIGTERM and SIGHUP as Ctrl-C, so that a run ends with a checkpoint.

    Further signals are ignored while the checkpoint is written, as a closing terminal
    may send several; a third Ctrl-C raises again. Signals that are ignored or have
    another handler are left alone.
    """
    former = {}
    received = 0

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        if received == 1 or (number == signal.SIGINT and received > 2):
            raise KeyboardInterrupt

    defaults = (signal.SIG_DFL, signal.default_int_handler)
    for number in (signal.SIGINT, signal.SIGTERM, *HANG_UP):
        # Handlers can only be set in the main thread.
        with contextlib.suppress(ValueError):
            if signal.getsignal(number) in defaults:
                former[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def run_parallel(
    function: Callable[..., Result], items: Sequence[tuple[Any, ...]], jobs: int
) -> list[Result]:
    """Call a function for each item, in up to ``jobs`` processes.

    Parameters
    ----------
    function : callable
        A function at the top level of a module, as other processes import it.
    items : sequence of tuple
        The arguments of each call.
    jobs : int
        The number of processes. With 1, all calls are made in this process.

    Returns
    -------
    list
        The results, in the order of the items.

    Raises
    ------
    ResourceError
        If a process was killed.
    KeyboardInterrupt
        On Ctrl-C, after the calls in all processes were interrupted.
    Exception
        The first exception of a call, after the other calls were interrupted.
    """
    if jobs == 1:
        return [function(*item) for item in items]
    pool = ProcessPoolExecutor(
        min(jobs, len(items)),
        # A fork would share torch's threads and open files.
        multiprocessing.get_context("spawn"),
        _start_worker,
        (logging.getLogger("flwr").level,),
    )
    try:
        futures = [pool.submit(_call, function, *item) for item in items]
        for future in track(as_completed(futures), "runs", len(futures)):
            future.result()
    except BrokenProcessPool:
        raise ResourceError(
            f"one of {jobs} processes was killed, possibly for lack of memory; try a "
            "lower --jobs"
        ) from None
    except BaseException:
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return [future.result() for future in futures]


def _start_worker(log_level: int) -> None:
    # Ctrl-C and a closing terminal reach all processes. Workers leave them to the
    # parent, which sends SIGTERM.
    for number in (signal.SIGINT, *HANG_UP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # The import sets a level of its own, so it must not come later.
    import_module("flwr.common")
    logging.getLogger("flwr").setLevel(log_level)


def _end_with_parent() -> None:
    """Exit when the parent has exited, even if it was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _call(function: Callable[..., Result], *item: Any) -> Result:
    try:
        with signals_as_ctrl_c():
            return function(*item)
    except KeyboardInterrupt:
        # The pool would start the next call, which cannot be cancelled any more.
        os._exit(1)
