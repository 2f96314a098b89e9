"""``metrics.csv``: all that was measured, one line a round, client and metric."""

import contextlib
import csv
import io
import shutil
import sys
from collections.abc import Iterable, Mapping
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.common import log

from flwr_frl.task.files import atomic_file, open_no_follow

COLUMNS = (
    *("algorithm", "seed", "evaluated-on"),
    *("round", "client", "metric", "value"),
)
HEADER = ",".join(COLUMNS) + "\n"
# What is known of clients, and not of a round.
KNOWN = 0


class TidyFile:
    """The tidy file of one run; lines of the run itself have no client.

    Lines go to the disk round by round, so that none are kept in memory. Where the disk
    does not take them, they are written along with later ones.

    Parameters
    ----------
    path : Path
        The file.
    about : sequence
        Algorithm, seed and ``evaluate-on``: the first columns of each line.
    """

    def __init__(self, path: Path, about: Iterable[Any]) -> None:
        self.path, self.about = path, list(about)
        self._pending, self._end = [HEADER], 0

    def begin(self, after: int, former: Path) -> set[int]:
        """Begin with another file's lines of the rounds up to one, or the own file's.

        They end at the first that is damaged. The rounds that are there are returned.
        """
        rounds: set[int] = set()
        with atomic_file(self.path, durable=False) as whole:
            file = io.TextIOWrapper(whole, encoding="utf-8", newline="")
            file.write(HEADER)
            writer = csv.writer(file, lineterminator="\n")
            for cells in _lines(former, after):
                writer.writerow(cells)
                # The lines of the run itself are a round's last.
                if not cells[4]:
                    rounds.add(int(cells[3]))
            end = file.tell()
            # Flushes; the file itself is closed by its own context.
            file.detach()
        self._pending, self._end = [], end
        return rounds

    def add(self, server_round: int, client: str, metrics: Mapping[str, Any]) -> None:
        """Note the numbers among some metrics; `flush` writes them."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        for name, value in metrics.items():
            if isinstance(value, int | float) and name != "round":
                writer.writerow([*self.about, server_round, client, name, value])
        self._pending.append(text.getvalue())

    def flush(self) -> None:
        """Write what has been added; an `OSError` leaves it for the next time."""
        if self._is_cut():
            log(WARNING, "%s was cut or removed: what is left of it goes on", self.path)
            pending = self._pending
            self.begin(sys.maxsize, self.path)
            self._pending = pending
        data = "".join(self._pending).encode()
        with open(self.path, "r+b", opener=open_no_follow) as file:
            file.seek(self._end)
            # What is there of a line that was not finished.
            file.truncate()
            file.write(data)
            file.flush()
        self._end, self._pending = self._end + len(data), []

    def _is_cut(self) -> bool:
        """Return whether the file is no longer what was written: also for a link."""
        if self.path.is_symlink():
            return True
        return self._end > (self.path.stat().st_size if self.path.exists() else 0)


def _lines(path: Path, after: int) -> Iterable[list[str]]:
    """Yield the lines of some round up to one, until the first that is damaged."""
    if not path.is_file():
        return
    with (
        path.open(newline="", encoding="utf-8", errors="replace") as file,
        contextlib.suppress(ValueError, csv.Error),
    ):
        for line in file:
            cells = next(csv.reader([line]), [])
            if not line.endswith("\n") or len(cells) != len(COLUMNS):
                return
            if cells[3].isdecimal() and KNOWN < int(cells[3]) <= after:
                # One that is no number ends it as well.
                float(cells[-1])
                yield cells


def client_means(path: Path, metric: str, after: int) -> dict[str, float]:
    """Return each client's mean of a metric over the rounds after one."""
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    for cells in _lines(path, sys.maxsize):
        server_round, client, name, value = cells[3:]
        if client and name == metric and int(server_round) > after:
            sums[client] = sums.get(client, 0.0) + float(value)
            counts[client] = counts.get(client, 0) + 1
    return {client: total / counts[client] for client, total in sums.items()}


def join(path: Path, parts: Iterable[Path]) -> None:
    """Write the lines of several tidy files into one."""
    with atomic_file(path, durable=False) as whole:
        whole.write(HEADER.encode())
        for part in filter(Path.is_file, parts):
            with part.open("rb") as file:
                file.readline()
                shutil.copyfileobj(file, whole)
