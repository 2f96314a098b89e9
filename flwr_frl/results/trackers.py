"""Experiment trackers: TensorBoard, Weights & Biases, or a custom one.

An exception of a tracker is logged and ends the tracking, not the run.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path

from flwr.common import log

from flwr_frl.common.files import refuse_links
from flwr_frl.common.settings import Settings, is_path, load, need, require, unknown
from flwr_frl.common.text import one_line
from flwr_frl.results.results import QUALITY, Row, is_number

# The name of W&B's project.
PROJECT = "flwr-frl"
# The address with which W&B writes files only.
OFFLINE = "offline"

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


class TensorBoard(Tracker):
    """Write event files to ``URI/ALGORITHM-RUN``.

    The default address is the folder ``tensorboard`` in the output folder.
    """

    def start(self, about: About) -> None:
        """Log the settings as hyperparameters; purge rounds that are repeated."""
        from tensorboardX import SummaryWriter
        from tensorboardX.summary import hparams

        folder = Path(self.uri or about.directory.parent / "tensorboard")
        if not self.uri:
            refuse_links("output", folder)
        self.after = about.after
        self.writer = SummaryWriter(
            str(folder / f"{about.algorithm}-{about.run}"),
            purge_step=about.after + 1 if about.after else None,
            # Files are otherwise named by the second in which they are created.
            filename_suffix=f".{about.after}",
        )
        if not about.after:
            measures = dict.fromkeys(("train-loss", *QUALITY), 0)
            settings = {**about.settings, "folder": str(about.directory)}
            for part in hparams(settings, measures):
                self.writer.file_writer.add_summary(part)

    def add(self, server_round: int, metrics: Metrics) -> None:
        """Add a point to each curve."""
        self.after = server_round
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, server_round)
        self.writer.flush()

    def end(self, finished: bool, metrics: Metrics) -> None:
        """Log the result."""
        self.add(self.after, {f"result/{n}": value for n, value in metrics.items()})
        self.writer.close()


class WandB(Tracker):
    """Log a run to the W&B project ``flwr-frl``.

    The default address is ``WANDB_BASE_URL``, or else the cloud; ``WANDB_MODE`` is
    respected, and ``wandb login`` comes first. With the address ``offline`` the run is
    written to ``wandb`` in the output folder, for ``wandb sync``.
    """

    def start(self, about: About) -> None:
        """Create a run with the settings as its config, or resume it."""
        import wandb

        settings = wandb.Settings(silent=True, console="off")
        if self.uri == OFFLINE:
            settings.mode = "offline"
        elif self.uri:
            settings.base_url = self.uri
        self.run = wandb.init(
            project=PROJECT,
            id=about.run,
            name=about.algorithm,
            group=str(about.settings["experiment"]) or None,
            resume="allow",
            config={**about.settings, "folder": str(about.directory)},
            # A resumed run may have more rounds than before.
            allow_val_change=True,
            dir=str(about.directory.parent),
            settings=settings,
        )
        self.run.define_metric("*", step_metric="round")

    def add(self, server_round: int, metrics: Metrics) -> None:
        """Log the metrics of a round."""
        self.run.log({**metrics, "round": server_round})

    def end(self, finished: bool, metrics: Metrics) -> None:
        """Log the result."""
        self.run.summary.update({f"result/{n}": v for n, v in metrics.items()})
        self.run.finish(0 if finished else 1)


# Trackers by name, each with the package it needs. The name is also that of an extra.
TRACKERS: dict[str, tuple[type[Tracker], str]] = {
    "tensorboard": (TensorBoard, "tensorboardX"),
    "wandb": (WandB, "wandb"),
}


class Tracking:
    """Calls the tracker that the settings name, until its end or first exception.

    Parameters
    ----------
    settings : mapping
        With ``tracker`` and ``tracker-uri``.

    Raises
    ------
    SettingsError
        If the tracker is unknown, or its package is missing.
    """

    def __init__(self, settings: Settings) -> None:
        self.name, self.uri = str(settings["tracker"]), str(settings["tracker-uri"])
        self._class = _tracker_class(self.name) if self.name else None
        self._tracker: Tracker | None = None

    @contextlib.contextmanager
    def of(self, about: About) -> Iterator["Tracking | None"]:
        """Track a run; None without a tracker.

        An exception in the context ends it as a stopped run.
        """
        with self._logging_failures():
            if self._class:
                self._tracker = self._class(self.uri)
                self._tracker.start(about)
        try:
            yield self if self._tracker else None
        except BaseException:
            self.end(False, {})
            raise

    def add(self, row: Row) -> None:
        """Log the metrics of a round."""
        with self._logging_failures():
            if self._tracker:
                self._tracker.add(row["round"], numbers(row))

    def end(self, finished: bool, summary: Row) -> None:
        """End the run."""
        tracker, self._tracker = self._tracker, None
        with self._logging_failures():
            if tracker:
                tracker.end(finished, numbers(summary))

    @contextlib.contextmanager
    def _logging_failures(self) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:
            self._tracker = None
            text = "tracker %r failed and is no longer used; the run continues: %s"
            log(WARNING, text, self.name, one_line(f"{type(error).__name__}: {error}"))


def numbers(row: Row) -> dict[str, float]:
    """Return the finite numbers in a row."""
    return {n: v for n, v in row.items() if is_number(v) and math.isfinite(v)}


def _tracker_class(name: str) -> type[Tracker]:
    if is_path(name):
        kind: type[Tracker] = load(name, "tracker")
        valid = isinstance(kind, type) and issubclass(kind, Tracker)
        require(valid, "tracker", name, "a subclass of Tracker")
        return kind
    if name not in TRACKERS:
        raise unknown("tracker", name, TRACKERS)
    tracker, package = TRACKERS[name]
    need(package, name, f"tracker {name!r}")
    return tracker
