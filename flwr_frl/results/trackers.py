"""Interface of experiment trackers; docs/your-own.md has examples.

An exception of a tracker is logged and ends the tracking, not the run.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path
from typing import Any, Self

from flwr.common import log

from flwr_frl.common.errors import require
from flwr_frl.common.settings import Settings, load
from flwr_frl.common.text import one_line
from flwr_frl.results.results import Row, is_number

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class About:
    """The run that a tracker tracks.

    Parameters
    ----------
    algorithm : str
        The algorithm's short name.
    run : str
        Identifies the run. A resumed run keeps it.
    after : int
        The round after which the run continues; 0 for a new run.
    directory : Path
        The folder of the run, absolute.
    settings : mapping
        All settings.
    """

    algorithm: str
    run: str
    after: int
    directory: Path
    settings: Settings


class Tracker:
    """Base class of trackers. The setting ``tracker`` takes a subclass's import path.

    An exception of a method ends the tracking.

    Parameters
    ----------
    uri : str
        The setting ``tracker-uri``, whose meaning depends on the tracker.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri

    def start(self, about: About) -> None:
        """Start a run, or continue the run with the same ``about.run``."""

    def add(self, server_round: int, metrics: Metrics) -> None:
        """Log the metrics of a round."""

    def end(self, finished: bool, metrics: Metrics) -> None:
        """End the run.

        Parameters
        ----------
        finished : bool
            False if the run was stopped; it then has no result.
        metrics : mapping
            The run's summary.
        """


class Tracking:
    """Calls the tracker that the settings name, until its end or first exception.

    Parameters
    ----------
    settings : mapping
        With ``tracker`` and ``tracker-uri``.

    Raises
    ------
    SettingsError
        If the tracker cannot be imported, or is no tracker.
    """

    def __init__(self, settings: Settings) -> None:
        self.name, self.uri = str(settings["tracker"]), str(settings["tracker-uri"])
        kind: Any = load(self.name, "tracker") if self.name else Tracker
        valid = isinstance(kind, type) and issubclass(kind, Tracker)
        allowed = "a subclass of Tracker, package.module:Class (docs/your-own.md)"
        require(valid, "tracker", self.name, allowed)
        self._class = kind
        # Before the start and after the end, a tracker whose methods do nothing.
        self._tracker = Tracker("")

    @contextlib.contextmanager
    def of(self, about: About) -> Iterator[Self | None]:
        """Track a run; None without a tracker.

        An exception in the context ends it as a stopped run.
        """
        with self._logging_failures():
            self._tracker = self._class(self.uri)
            self._tracker.start(about)
        try:
            yield self if self.name else None
        except BaseException:
            self.end(False, {})
            raise

    def add(self, row: Row) -> None:
        """Log the metrics of a round."""
        with self._logging_failures():
            self._tracker.add(row["round"], numbers(row))

    def end(self, finished: bool, summary: Row) -> None:
        """End the run."""
        tracker, self._tracker = self._tracker, Tracker("")
        with self._logging_failures():
            tracker.end(finished, numbers(summary))

    @contextlib.contextmanager
    def _logging_failures(self) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:
            self._tracker = Tracker("")
            text = "tracker %r failed and is no longer used; the run continues: %s"
            log(WARNING, text, self.name, one_line(f"{type(error).__name__}: {error}"))


def numbers(row: Row) -> dict[str, float]:
    """Return the finite numbers in a row."""
    return {n: v for n, v in row.items() if is_number(v) and math.isfinite(v)}
