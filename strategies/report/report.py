"""What a run shows and writes while it goes on."""

import contextlib
import os
from collections.abc import Callable, Mapping
from itertools import takewhile
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.common import log
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from flwr_frl.strategies.algorithms import short_name
from flwr_frl.strategies.report.output import locked, said
from flwr_frl.strategies.report.page.document import write_page
from flwr_frl.strategies.report.plot import plot
from flwr_frl.strategies.report.results import (
    CLIENTS,
    METRICS,
    PAGE,
    PLOT,
    SUMMARY,
    TIDY,
    Row,
    gaps,
    is_whole,
    quality,
    read_json,
    read_rows,
    strict_json,
    summarize,
    write_json,
)
from flwr_frl.strategies.report.tables import write_tables
from flwr_frl.strategies.report.terminal import console
from flwr_frl.strategies.report.tidy import KNOWN, TidyFile, client_means, join
from flwr_frl.strategies.report.trackers.base import Trackers
from flwr_frl.strategies.server import newcomers
from flwr_frl.strategies.server.checkpoint import MAY_DIFFER
from flwr_frl.strategies.server.checks import several
from flwr_frl.task.files import open_no_follow, write_atomically
from flwr_frl.task.settings import Settings

# Settings in which the algorithms of one summary may differ.
OWN = ("algorithm", "resume", "page", "tracker", "tracker-uri")


class Report:
    """Writes one run of one algorithm to ``output/<algorithm>``.

    Parameters
    ----------
    settings : mapping
        All settings.
    after : int, default 0
        Keep the rows of the rounds up to this one, from the run that is continued:
        the one in ``resume``.
    trackers : Trackers, optional
        They are told the same.
    """

    def __init__(
        self, settings: Settings, after: int = 0, trackers: Trackers | None = None
    ) -> None:
        self.settings, self.trackers = settings, trackers
        self.output = Path(str(settings["output"]))
        self.algorithm = short_name(str(settings["algorithm"]))
        self.directory = self.output / self.algorithm
        self.directory.mkdir(parents=True, exist_ok=True)
        former = Path(str(settings["resume"] or self.output)) / self.algorithm
        rows = takewhile(is_whole, read_rows(former / METRICS))
        self.rows = [row for row in rows if row["round"] <= after]
        _say_lost(former / METRICS, {row["round"] for row in self.rows}, after)
        self._newest: Row = {}
        for row in self.rows:
            self._newest |= row
        # Whether the file lacks rows that the disk did not take.
        self._behind = True
        with said("rows of the rounds before"):
            self._write_rows()
        self._about = (self.algorithm, settings["seed"], settings["evaluate-on"])
        self.tidy = TidyFile(self.directory / TIDY, self._about)
        with said("lines of the rounds before"):
            rounds = self.tidy.begin(after, former / TIDY)
            _say_lost(former / TIDY, rounds, after)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[state]}"),
            console=console(),
        )
        self._bar = self.progress.add_task(
            self.algorithm,
            total=int(settings["num-server-rounds"]),
            completed=after,
            state="",
        )

    def _write_rows(self) -> None:
        text = "".join(strict_json(row) + "\n" for row in self.rows)
        write_atomically(self.directory / METRICS, text.encode())
        self._behind = False

    def add(self, row: Row) -> None:
        """Append one round's metrics, durably, and move the progress bar.

        Where the disk does not take them, they are written with those of a later round.
        """
        self.rows.append(row)
        self._newest |= row
        self.tidy.add(row["round"], "", row)
        if self.trackers:
            self.trackers.add(row)
        with said(f"metrics of round {row['round']}"):
            self._append(row)
        with said(f"lines of round {row['round']}"):
            self.tidy.flush()
        state = f"train loss {row['train-loss']:.3f}" if "train-loss" in row else ""
        shown = quality(self._newest)
        if (value := self.latest(shown)) is not None:
            # Not to be taken for that of the training.
            label = f"{self._about[2]} loss" if shown == "loss" else shown
            state += f"  {label} {value:.3f}"
        self.progress.update(self._bar, completed=row["round"], state=state)

    def _append(self, row: Row) -> None:
        if self._behind:
            # The last line may be a part of one.
            self._write_rows()
        else:
            self._behind = True
            path = self.directory / METRICS
            with open(path, "a", encoding="utf-8", opener=open_no_follow) as file:
                file.write(strict_json(row) + "\n")
                file.flush()
                os.fsync(file.fileno())
            self._behind = False

    def latest(self, name: str) -> float | None:
        """Return the newest value of a metric; None if it was never measured."""
        return self._newest.get(name)

    def finish(
        self,
        clients: Mapping[str, Mapping[str, Any]],
        joined: Mapping[str, Mapping[str, Any]] | None = None,
        ended: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """Write what is left, when a run has ended; return its summary.

        That is ``clients.json``, ``summary.json``, the tidy files, the tables and the
        plot. ``clients`` are each client's final metrics, ``joined`` the entries of
        those that came after the training. ``ended`` is called when all of it is
        there but the page, which shows that the run has ended.
        """
        if lacking := gaps(clients, str(self.settings["metrics"])):
            text = (
                "not every client has a value of %s; means are of those that have one"
            )
            log(WARNING, text, several(lacking))
        if self._behind:
            with said("metrics"):
                self._write_rows()
        with said(CLIENTS):
            write_json(self.directory / CLIENTS, clients)
        for name, metrics in clients.items():
            self.tidy.add(KNOWN, name, known(metrics))
        with said(TIDY):
            self.tidy.flush()
        last = self._last_rounds()
        since = self.rows[-1]["round"] - last if self.rows else 0
        means = client_means(self.directory / TIDY, "accuracy", since)
        summary = summarize(self.rows, clients, last, means)
        if joined:
            summary |= self._write_newcomers(joined)
        config = {n: v for n, v in self.settings.items() if n not in OWN}
        with said(self.output), locked(self.output, wait=True):
            self._write_summary(summary, config)
        if ended:
            ended()
        with said(PAGE), locked(self.output, wait=True):
            write_page(self.output)
        if self.trackers:
            files = [self.output / name for name in (PLOT, PAGE)]
            there = [path for path in files if path.is_file()]
            self.trackers.end(True, summary, there)
        return summary

    def _last_rounds(self) -> int:
        """Return how many rounds at the end are the result: some that was evaluated."""
        last = int(self.settings["evaluate-last"])
        tested = [row["round"] for row in self.rows if row.get("evaluated")]
        return max(last, self.rows[-1]["round"] - tested[-1] + 1) if tested else last

    def _write_newcomers(
        self, joined: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, float]:
        of_each = {name: entry["by-examples"] for name, entry in joined.items()}
        with said(newcomers.FILE):
            write_json(self.directory / newcomers.FILE, joined)
            about, path = self._about[:2], self.directory / newcomers.TIDY
            newcomers.write_tidy(path, about, of_each)
        return newcomers.summarize(of_each)

    def _write_summary(self, summary: dict[str, Any], config: dict[str, Any]) -> None:
        path = self.output / SUMMARY
        whole: dict[str, Any] = {"algorithms": {}, "config": config}
        # What stands there may be damaged, or somebody else's.
        with contextlib.suppress(
            OSError, ValueError, LookupError, TypeError, AttributeError
        ):
            former = read_json(path)
            if "algorithms" in former and comparable(former["config"]) == comparable(
                config
            ):
                whole = former
        whole["algorithms"][self.algorithm] = summary
        with said(SUMMARY):
            write_json(path, whole)
        names = list(whole["algorithms"])
        with said(self.output / TIDY):
            join(self.output / TIDY, (self.output / name / TIDY for name in names))
        evaluated_on = str(self.settings["evaluate-on"])
        with said("tables"):
            write_tables(self.output, whole["algorithms"], evaluated_on)
        with said(PLOT):
            plot(self.output, names, evaluated_on=evaluated_on)
        with said(newcomers.PLOT):
            newcomers.plot(self.output, names)


def _say_lost(path: Path, rounds: set[int], after: int) -> None:
    """Log which rounds up to one a file lacks: each has written a row."""
    if lost := [str(n) for n in range(1, after + 1) if n not in rounds]:
        log(WARNING, "%s lacks these rounds: %s", path, several(lost))


def comparable(config: Settings) -> dict[str, Any]:
    """Return the settings in which what stands in one table must agree."""
    beside = MAY_DIFFER - {
        *("num-server-rounds", "evaluate-every", "evaluate-last"),
        *("data-dir", "metrics"),
    }
    return {name: value for name, value in config.items() if name not in beside}


def known(client: Mapping[str, Any]) -> dict[str, float]:
    """Return what is known of a client's data, from its entry in ``clients.json``."""
    counts = client.get("class-counts") or {}
    sizes = {name: client.get(name) for name in ("num-examples", "num-test-examples")}
    return {
        **{name: value for name, value in sizes.items() if value is not None},
        **{f"class-count:{name}": count for name, count in counts.items()},
    }
