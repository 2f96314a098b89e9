"""Output to the terminal, and signals that end a run."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, TextIO, cast

from rich.console import Console


class _SafeStream:
    """Standard output that never raises.

    It may be a file on a full disk or a pipe without a reader, which must not end a
    run. After the first error all output is discarded.
    """

    def __init__(self, stream: TextIO) -> None:
        # rich replaces `sys.stdout` while it shows a progress bar.
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._discard_on_error():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._discard_on_error():
            self._stream.flush()

    @contextlib.contextmanager
    def _discard_on_error(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            # Buffered text would otherwise raise again when the process exits.
            with contextlib.suppress(OSError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self._stream.fileno())
                os.close(null)


def console() -> Console:
    """Return a console that writes to standard output and never raises `OSError`."""
    # Without standard output, rich shows nothing.
    return Console(file=cast(Any, _SafeStream(sys.stdout)) if sys.stdout else None)


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
