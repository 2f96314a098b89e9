"""What a run shows, and how it is told to end."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, TextIO, cast

from rich.console import Console


class _Forgiving:
    """Standard output, of which the loss is no loss: whatever ends it, a run goes on.

    It may be a file on a full disk, or a pipe whose reader has left.
    """

    def __init__(self, stream: TextIO) -> None:
        # Not whatever is there later: rich has its own in its place for a while.
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or give it up for good."""
        with self._given_up():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, or give it up for good."""
        with self._given_up():
            self._stream.flush()

    @contextlib.contextmanager
    def _given_up(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            # What is still in its buffer would fail again when the process ends.
            with contextlib.suppress(OSError):
                shown = self._stream.fileno()
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, shown)
                os.close(nowhere)


def console() -> Console:
    """Return a console on standard output that never raises for what it shows."""
    # Without standard output rich shows nothing.
    return Console(file=cast(Any, _Forgiving(sys.stdout)) if sys.stdout else None)


@contextlib.contextmanager
def ended_as_by_ctrl_c() -> Iterator[None]:
    """Have a request to end, or a closed terminal, end a run as Ctrl-C does.

    That is with a checkpoint, which a second request does not break off: a closed
    terminal may send several. A third Ctrl-C does. What is ignored, as with ``nohup``,
    stays so.
    """
    former = {}
    requests = 0

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal requests
        requests += 1
        if requests == 1 or (number == signal.SIGINT and requests > 2):
            raise KeyboardInterrupt

    usual = (signal.SIG_DFL, signal.default_int_handler)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Only of the main thread, and of what nobody else sees to.
        with contextlib.suppress(ValueError):
            if signal.getsignal(number) in usual:
                former[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
