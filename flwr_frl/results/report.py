"""The files of a run, and those in which the runs of a folder are compared."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.common import log
from rich.progress import BarColumn, Progress, TimeRemainingColumn

from flwr_frl.common.settings import Settings, facts
from flwr_frl.common.text import several, short_name
from flwr_frl.results.journal import Journal, RunFolder, client_means, write_csv
from flwr_frl.results.output import locked, log_os_errors
from flwr_frl.results.page.document import write_page
from flwr_frl.results.plot import plot
from flwr_frl.results.results import (
    CLIENTS,
    METRICS,
    METRICS_CSV,
    NEWCOMERS,
    PAGE,
    PLOT,
    SUMMARY,
    Row,
    describe,
    read_object,
    summarize,
    summarize_newcomers,
    write_json,
)
from flwr_frl.results.tables import write_tables
from flwr_frl.results.trackers import Tracking

# Settings of a single run, which the summary's ``config`` leaves out.
PER_RUN = ("algorithm", "resume", "page", "tracker", "tracker-uri")


class Report:
    """Report one run of one algorithm in ``output/<algorithm>``.

    Parameters
    ----------
    settings : mapping
        All settings.
    after : int, default 0
        The last round of the run in ``resume`` that is continued. Rows of later rounds
        are dropped.
    tracking : Tracking, optional
        It receives the same metrics.

    Attributes
    ----------
    lost : set of str
        Files that could not be written when they were last due, except those of rounds,
        which a later round writes.
    """

    def __init__(
        self, settings: Settings, after: int = 0, tracking: Tracking | None = None
    ) -> None:
        self.settings, self.tracking, self.lost = settings, tracking, set[str]()
        self.output = Path(str(settings["output"]))
        self.algorithm = short_name(str(settings["algorithm"]))
        self.directory = self.output / self.algorithm
        former = Path(str(settings["resume"] or self.output)) / self.algorithm / METRICS
        self._journal = Journal(self.directory / METRICS, former, after)
        self.rows, self._latest = self._journal.rows, Row()
        for row in self.rows:
            self._latest |= row
        with log_os_errors(f"metrics of earlier rounds in {METRICS}"):
            self._journal.flush()
        present = {row["round"] for row in self.rows}
        if lost := [str(n) for n in range(1, after + 1) if n not in present]:
            log(WARNING, "%s lacks these rounds: %s", former, several(lost))
        self.progress = Progress(
            *("{task.description}", BarColumn(), "{task.completed}/{task.total}"),
            *(TimeRemainingColumn(), "{task.fields[state]}"),
        )
        rounds = int(settings["num-server-rounds"])
        self._bar = self.progress.add_task(
            self.algorithm, total=rounds, completed=after, state=""
        )

    def writing(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Log an `OSError` of the context, and note that a file is lost or written."""
        return log_os_errors(f"{self.algorithm}/{name}", self.lost)

    def add(
        self, row: Row, clients: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Record the metrics of a round, durably, and advance the progress bar.

        If the disk is full, the metrics are written along with those of a later round.

        Parameters
        ----------
        row : dict
            The metrics of the round.
        clients : mapping, optional
            The metrics of each client that was evaluated in the round.
        """
        self._latest |= row
        self._journal.add(row, clients or {})
        if self.tracking:
            self.tracking.add(row)
        with log_os_errors(f"metrics of round {row['round']} in {METRICS}"):
            self._journal.flush()
        state = describe(self._latest, str(self.settings["evaluate-on"]))
        self.progress.update(self._bar, completed=row["round"], state=state)

    def latest(self, name: str) -> float | None:
        """Return the latest value of a metric; None if there is none."""
        return self._latest.get(name)

    def finish(
        self,
        clients: Mapping[str, Mapping[str, Any]],
        joined: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """Write the files of a finished run and return its summary.

        Files that cannot be written are added to `lost`.

        Parameters
        ----------
        clients : mapping
            The final metrics of each client, for ``clients.json``.
        joined : mapping, optional
            The entries of clients that joined after the training.
        """
        with self.writing(CLIENTS):
            write_json(self.directory / CLIENTS, clients)
        with self.writing(METRICS):
            self._journal.flush()
        last = self._summarized_rounds()
        since = self.rows[-1]["round"] - last if self.rows else 0
        means = client_means(self.directory, "accuracy", since)
        summary = summarize(self.rows, clients, last, means)
        if joined:
            with self.writing(NEWCOMERS):
                write_json(self.directory / NEWCOMERS, joined)
            summary |= summarize_newcomers(joined)
        with log_os_errors(self.output, self.lost), locked(self.output, wait=True):
            content = read_comparable(self.output, shared_config(self.settings))
            content["algorithms"][self.algorithm] = summary
            self.lost |= write_comparison(self.output, content)
        if self.tracking:
            files = [self.output / name for name in (PLOT, PAGE)]
            self.tracking.end(True, summary, [p for p in files if p.is_file()])
        return summary

    def _summarized_rounds(self) -> int:
        """Return how many of the last rounds to average, at least one evaluated one."""
        last = int(self.settings["evaluate-last"])
        tested = [row["round"] for row in self.rows if row.get("evaluated")]
        return max(last, self.rows[-1]["round"] - tested[-1] + 1) if tested else last


def shared_config(settings: Settings) -> dict[str, Any]:
    """Return the settings without those of a single run."""
    return {name: value for name, value in settings.items() if name not in PER_RUN}


def read_comparable(output: Path, config: Settings) -> dict[str, Any]:
    """Read ``summary.json``, which a run with settings ``config`` joins.

    Returns a summary without algorithms if the file is missing or damaged, if its runs
    had other settings, or if it is over several seeds.
    """
    content = read_object(output / SUMMARY)
    former = content.get("config"), content.get("algorithms")
    single = "seeds" not in content and all(isinstance(p, dict) for p in former)
    if single and _comparable(content["config"]) == _comparable(config):
        return content
    return {"algorithms": {}, "config": config}


def _comparable(config: Settings) -> dict[str, Any]:
    return {name: v for name, v in config.items() if name not in facts("always")}


def write_comparison(
    output: Path,
    summary: Mapping[str, Any],
    folders: Sequence[Path] = (),
) -> set[str]:
    """Write the summary, ``metrics.csv``, tables, plots and page of an output folder.

    A file that cannot be written is logged, and the others are written nevertheless.

    Parameters
    ----------
    output : Path
        The output folder.
    summary : mapping
        The content of ``summary.json``.
    folders : sequence of Path
        The folders of several seeds. By default the runs are in ``output``.

    Returns
    -------
    set of str
        The files that could not be written.
    """
    lost = set[str]()
    summaries, config = summary["algorithms"], summary["config"]
    evaluated_on, places = str(config["evaluate-on"]), folders or (output,)
    seeds = summary.get("seeds", [config["seed"]])
    runs = [
        RunFolder(name, seed, evaluated_on, place / name)
        for seed, place in zip(seeds, places, strict=True)
        for name in summaries
    ]
    writers: dict[str, Callable[[], object]] = {
        SUMMARY: lambda: write_json(output / SUMMARY, summary),
        METRICS_CSV: lambda: write_csv(output / METRICS_CSV, runs),
        "tables": lambda: write_tables(output, summaries, evaluated_on),
        PLOT: lambda: plot(output, list(summaries), places),
        PAGE: lambda: write_page(output),
    }
    for name, write in writers.items():
        with log_os_errors(name, lost):
            write()
    return lost
