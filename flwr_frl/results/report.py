"""The report of a run: its journal, and the files that compare the runs of a folder.

The journal, ``metrics.jsonl``, has one row per round. In the row of an evaluation,
``client-metrics`` has the metrics of each client; they are stored nowhere else. Tables,
plots and the page follow from journals and summaries.
"""

import contextlib
import multiprocessing
import os
from collections.abc import Mapping
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.common import log
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn

from flwr_frl.common.files import atomic_file, open_no_follow
from flwr_frl.common.settings import Settings
from flwr_frl.common.text import several, short_name
from flwr_frl.results.comparison import PER_RUN, read_comparable, write_comparison
from flwr_frl.results.output import locked
from flwr_frl.results.results import (
    CLIENT_METRICS,
    CLIENTS,
    METRICS,
    NEWCOMERS,
    PAGE,
    SUMMARY,
    Row,
    describe,
    log_os_errors,
    read_journal,
    run_result,
    strict_json,
    without_clients,
    write_json,
)
from flwr_frl.results.trackers import Tracking


def console_of_bars() -> Console:
    """Return the console of progress bars, which also works in notebooks."""
    console = Console()
    if not console.is_jupyter:
        # Lines in a file or a pipe are not cut.
        console.width = console.width if console.is_terminal else 250
        return console
    # Without `ipywidgets`, rich's own bar for notebooks shows only a warning.
    return Console(stderr=True, force_jupyter=False, force_terminal=True, width=100)


class Report:
    """Report one run of one algorithm in ``output/<algorithm>``.

    Rows stay in memory until they are written, so that a full disk only delays them. A
    crash damages at most the last line of the journal, which is dropped when the run is
    resumed.

    Parameters
    ----------
    settings : mapping
        All settings.
    after : int, default 0
        The last round of the run in ``resume`` that is continued. The journal begins
        with the rows of rounds 1 to ``after``, up to the first damaged line.
    tracking : Tracking, optional
        It receives the same metrics.

    Attributes
    ----------
    rows : list of dict
        All rows, without clients' metrics.
    latest : dict
        The latest value of each metric.
    tested : str
        The model that the clients test, for the summary.
    lost : set of str
        Files that could not be written when they were last due.
    """

    def __init__(
        self, settings: Settings, after: int = 0, tracking: Tracking | None = None
    ) -> None:
        self.settings, self.tracking, self.lost = settings, tracking, set[str]()
        self.output = Path(str(settings["output"]))
        self.algorithm = short_name(str(settings["algorithm"]))
        hidden = set(PER_RUN) - {"algorithm"}
        self.config = {n: value for n, value in settings.items() if n not in hidden}
        self.directory = self.output / self.algorithm
        former = Path(str(settings["resume"] or self.output)) / self.algorithm / METRICS
        kept = [row for row in read_journal(former) if 0 < row["round"] <= after]
        self.rows, self.latest = [without_clients(row) for row in kept], Row()
        for row in self.rows:
            self.latest |= row
        self.tested, self._pending = "", kept
        # The size of the journal up to its last complete line; 0 before it is written.
        self._end = 0
        self._write_rows()
        present = {row["round"] for row in self.rows}
        if lost := [str(n) for n in range(1, after + 1) if n not in present]:
            log(WARNING, "%s lacks these rounds: %s", former, several(lost))
        # One text, of which a narrow terminal cuts the end.
        text = "{task.description} {task.completed}/{task.total} {task.fields[state]}"
        self.progress = Progress(
            *(text, BarColumn(10), TimeRemainingColumn()),
            console=console_of_bars(),
            # The bars of parallel runs would overwrite each other.
            disable=multiprocessing.parent_process() is not None,
        )
        self._bar = self.progress.add_task(
            "/".join(self.directory.parts[-2:]),
            total=int(settings["num-server-rounds"]),
            completed=after,
            state="",
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
        self.rows.append(row)
        self.latest |= row
        self._pending.append({**row, CLIENT_METRICS: clients} if clients else row)
        self._write_rows()
        if self.tracking:
            self.tracking.add(row)
        state = describe(self.latest)
        self.progress.update(self._bar, completed=row["round"], state=state)

    def _write_rows(self) -> None:
        """Write pending rows to the disk; if that fails, the next call retries."""
        path = self.directory / METRICS
        lines = [f"{strict_json(row)}\n".encode() for row in self._pending]
        with log_os_errors(f"{self.algorithm}/{METRICS}", self.lost):
            if not self._end:
                with atomic_file(path) as file:
                    file.writelines(lines)
                    end = file.tell()
            else:
                with open(path, "r+b", opener=open_no_follow) as file:
                    file.seek(self._end)
                    # An earlier call may have written a part of its lines.
                    file.truncate()
                    file.writelines(lines)
                    file.flush()
                    os.fsync(file.fileno())
                    end = file.tell()
            self._end, self._pending = end, []

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
        self._write_rows()
        if joined:
            with self.writing(NEWCOMERS):
                write_json(self.directory / NEWCOMERS, joined)
        about = self.directory, self.settings, self.rows, self.tested
        summary, _ = run_result(*about, clients, joined or {})
        files = f"{SUMMARY} and {PAGE}"
        with log_os_errors(files, self.lost), locked(self.output, wait=True):
            content = read_comparable(self.settings)
            content["algorithms"][self.algorithm] = summary
            write_comparison(self.output, content)
        if self.tracking:
            self.tracking.end(True, summary)
        return summary
