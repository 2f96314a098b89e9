"""Signals that end a run."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


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
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Handlers can only be set in the main thread.
        with contextlib.suppress(ValueError):
            if signal.getsignal(number) in defaults:
                former[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
