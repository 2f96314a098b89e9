"""Trackers: TensorBoard, MLflow, W&B, or anybody's, told of each round as it ends.

Each one works in a thread of its own: a server that is slow, or gone, holds up no
round. What one raises is a warning, and it is told no more than to end.
"""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from logging import WARNING
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from flwr.common import log

from flwr_frl.strategies.report.results import Row
from flwr_frl.strategies.server.checks import one_line
from flwr_frl.task.settings import (
    Settings,
    SettingsError,
    is_path,
    load,
    need,
    require,
    unknown,
)

# Name, also of the extra: import path, and the package that it needs.
TRACKERS = {
    "tensorboard": (
        "flwr_frl.strategies.report.trackers.tensorboard:TensorBoard",
        "tensorboardX",
    ),
    "mlflow": ("flwr_frl.strategies.report.trackers.mlflow:MLflow", "mlflow"),
    "wandb": ("flwr_frl.strategies.report.trackers.wandb:WandB", "wandb"),
}
# Seconds that a tracker has at the end to send what is left.
PATIENCE = 60.0


@dataclass(frozen=True)
class About:
    """What a tracker is told of a run when it begins.

    Parameters
    ----------
    algorithm : str
        Its short name.
    run : str
        Names the run; the same where it is resumed.
    after : int
        The round after which it goes on; 0 for a new one.
    directory : Path
        Where the run writes, absolute.
    settings : mapping
        All settings.
    """

    algorithm: str
    run: str
    after: int
    directory: Path
    settings: Settings


class Tracker:
    """A place where runs are tracked; ``tracker`` takes the import path of a subclass.

    All is called from one thread, and what is raised ends the tracking alone.

    Parameters
    ----------
    uri : str
        The setting ``tracker-uri``; what it means is the tracker's own.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri

    def start(self, about: About) -> None:
        """Begin a run, or go on with the one of the same name."""

    def add(self, server_round: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a round."""

    def end(
        self, finished: bool, metrics: Mapping[str, float], files: Sequence[Path]
    ) -> None:
        """End the run: its result, the plot and the page.

        A run that was stopped has neither result nor files.
        """


class Trackers:
    """All trackers that the settings name.

    Parameters
    ----------
    settings : mapping
        ``tracker`` and ``tracker-uri``, with commas between several.

    Raises
    ------
    SettingsError
        If a tracker is unknown, its package is missing, or there are not as many
        addresses as trackers.
    """

    def __init__(self, settings: Settings) -> None:
        names = [n.strip() for n in str(settings["tracker"]).split(",") if n.strip()]
        uris = [u.strip() for u in str(settings["tracker-uri"]).split(",")]
        if uris == [""]:
            uris = [""] * len(names)
        uri = str(settings["tracker-uri"])
        require(bool(names) or not uri, "tracker-uri", uri, "empty without a tracker")
        if len(uris) != len(names):
            raise SettingsError(
                f"tracker-uri is {settings['tracker-uri']!r}; it must be empty or have "
                f"one address for each of {len(names)} trackers, with commas between"
            )
        kinds = [_kind(name) for name in names]
        self._threads = [
            _Thread(name, partial(kind, uri))
            for name, kind, uri in zip(names, kinds, uris, strict=True)
        ]

    @contextlib.contextmanager
    def of(self, about: About) -> Iterator["Trackers"]:
        """Track a run; where the context is left by an error it has been stopped."""
        for thread in self._threads:
            thread.start()
            thread.tell("start", about)
        try:
            yield self
        except BaseException:
            self.end(False, {}, [])
            raise

    def add(self, row: Row) -> None:
        """Tell a round's metrics."""
        for thread in self._threads:
            thread.tell("add", row["round"], numbers(row))

    def end(self, finished: bool, summary: Row, files: Sequence[Path]) -> None:
        """Tell how the run has ended, and wait for what is left to be told."""
        for thread in self._threads:
            thread.tell("end", finished, numbers(summary), files)
        for thread in self._threads:
            thread.close()


def numbers(row: Row) -> dict[str, float]:
    """Return the numbers in a row."""
    return {
        name: value
        for name, value in row.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
    }


def _kind(name: str) -> Callable[[str], Tracker]:
    """Return what makes a tracker, once it is known that it can be imported."""
    if is_path(name):
        own = load(name, "tracker")
        if not (isinstance(own, type) and issubclass(own, Tracker)):
            raise SettingsError(
                f"tracker {name!r} names {own!r}; it must be a subclass of Tracker"
            )
        return own
    if name not in TRACKERS:
        raise unknown("tracker", name, TRACKERS)
    path, package = TRACKERS[name]
    need(package, name, f"tracker {name!r}")

    def make(uri: str) -> Tracker:
        # Some take seconds to import.
        made: Tracker = load(path, "tracker")(uri)
        return made

    return make


class _Thread(threading.Thread):
    """Makes a tracker and calls its methods one after the other."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        super().__init__(name=f"tracker {name}", daemon=True)
        self.tracker, self._make = name, make
        self._calls: SimpleQueue[tuple[str, tuple[Any, ...]] | None] = SimpleQueue()
        self._failed = False

    def tell(self, method: str, *arguments: Any) -> None:
        if not self._failed:
            self._calls.put((method, arguments))

    def close(self) -> None:
        self._calls.put(None)
        self.join(PATIENCE)
        if self.is_alive() and not self._failed:
            self._fail(f"it has not ended within {PATIENCE:g} s")

    def run(self) -> None:
        made, method = None, "make"
        # Somebody else's code, and a network between.
        try:
            made = self._make()
            while (call := self._calls.get()) is not None:
                method, arguments = call
                getattr(made, method)(*arguments)
        except (Exception, SystemExit) as error:
            self._fail(f"{type(error).__name__}: {error}")
            # What it has opened would go on as a run for ever.
            if made is not None and method == "add":
                with contextlib.suppress(Exception, SystemExit):
                    made.end(False, {}, [])

    def _fail(self, reason: str) -> None:
        self._failed = True
        text = "tracker %r failed and is told no more; the run goes on: %s"
        log(WARNING, text, self.tracker, one_line(reason))
