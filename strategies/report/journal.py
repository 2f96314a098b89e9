"""Append-only text files: ``metrics.jsonl`` and ``metrics.csv``.

``metrics.jsonl`` has one row per round. ``metrics.csv`` has one line per round, client
and metric, in long ("tidy") format; the per-client values of earlier rounds are stored
nowhere else.
"""

import contextlib
import csv
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.common import log

from flwr_frl.strategies.report.results import is_complete, parse_row
from flwr_frl.task.files import atomic_file, open_no_follow

COLUMNS = (
    *("algorithm", "seed", "evaluated-on"),
    *("round", "client", "metric", "value"),
)
HEADER = ",".join(COLUMNS) + "\n"
# The round of lines about a client's data, which belong to no round.
NO_ROUND = 0

# The round of a line, and whether it is the round's last line; None if damaged.
Entry = tuple[int, bool] | None


class Journal:
    """An append-only file of lines that belong to rounds.

    Lines stay in memory until `flush` has written them, so that a full disk only delays
    them. A crash damages at most the last lines, which are dropped when the run is
    resumed. If another program cuts or removes the file, writing goes on after the
    lines that are left.

    Parameters
    ----------
    path : Path
        The file. `flush` creates it.
    parse : callable
        Returns the `Entry` of a line, given as bytes.
    after, former : int, Path
        The file begins with the lines of rounds 1 to ``after`` of the file ``former``,
        up to its first damaged line; ``former`` may be ``path``.
    header : str, default ""
        The first line.
    durable : bool, default False
        Whether `flush` waits until the data is on the disk.

    Attributes
    ----------
    rounds : set of int
        The complete rounds that were taken from ``former``.
    """

    def __init__(
        self,
        path: Path,
        parse: Callable[[bytes], Entry],
        after: int,
        former: Path,
        header: str = "",
        durable: bool = False,
    ) -> None:
        self.path, self.rounds = path, set[int]()
        self._parse, self._header, self._durable = parse, header, durable
        # Where the file's beginning is to be copied from; None once it has been.
        self._source: tuple[Path, int] | None = (former, after)
        self._pending: list[str] = []
        # The size of the file up to the last complete line.
        self._end = 0

    def append(self, text: str) -> None:
        """Append complete lines; `flush` writes them."""
        self._pending.append(text)

    def flush(self) -> None:
        """Write pending lines. After an `OSError` the next call tries again."""
        if self._source is None and self._is_cut():
            log(WARNING, "%s was cut or removed; continuing after its rest", self.path)
            self._source = (self.path, sys.maxsize)
        if self._source is not None:
            self._copy(*self._source)
            self._source = None
        data = "".join(self._pending).encode()
        with open(self.path, "r+b", opener=open_no_follow) as file:
            file.seek(self._end)
            # An earlier call may have written a part of its lines.
            file.truncate()
            file.write(data)
            file.flush()
            if self._durable:
                os.fsync(file.fileno())
        self._end, self._pending = self._end + len(data), []

    def _copy(self, source: Path, after: int) -> None:
        with atomic_file(self.path, durable=self._durable) as file:
            file.write(self._header.encode())
            for line in islice(_lines(source), 1 if self._header else 0, None):
                entry = self._parse(line)
                if entry is None:
                    break
                if NO_ROUND < entry[0] <= after:
                    file.write(line.rstrip(b"\r\n") + b"\n")
                    if entry[1]:
                        self.rounds.add(entry[0])
            self._end = file.tell()

    def _is_cut(self) -> bool:
        """Return True if the file is shorter than what was written, or a link."""
        if self.path.is_symlink():
            return True
        return self._end > (self.path.stat().st_size if self.path.exists() else 0)


def _lines(path: Path) -> Iterator[bytes]:
    if path.is_file():
        with path.open("rb") as file:
            yield from file


def parse_jsonl(line: bytes) -> Entry:
    """Return the round of a line of ``metrics.jsonl``; None if it is incomplete."""
    row = parse_row(line)
    return (row["round"], True) if row and is_complete(row) else None


def parse_csv(line: bytes) -> Entry:
    """Return the round of a line of ``metrics.csv``; None if it is damaged."""
    cells = _cells(line)
    # Lines of the run follow those of its clients.
    return (int(cells[3]), not cells[4]) if cells else None


def _cells(line: bytes) -> list[str]:
    """Split a line of ``metrics.csv``; return an empty list if it is damaged."""
    if not line.endswith(b"\n"):
        return []
    with contextlib.suppress(ValueError, csv.Error):
        cells = next(csv.reader([line.decode(errors="replace")]), [])
        if len(cells) == len(COLUMNS) and cells[3].isdecimal():
            float(cells[-1])
            return cells
    return []


def csv_lines(
    about: Sequence[Any], server_round: int, client: str, metrics: Mapping[str, Any]
) -> str:
    """Return lines of ``metrics.csv`` for the numbers among some metrics.

    Parameters
    ----------
    about : sequence
        Algorithm, seed and ``evaluate-on``.
    server_round : int
        The round.
    client : str
        The client; empty for metrics of the run.
    metrics : mapping
        Metrics by name.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for name, value in metrics.items():
        if isinstance(value, int | float) and name != "round":
            writer.writerow([*about, server_round, client, name, value])
    return text.getvalue()


def client_means(path: Path, metric: str, after: int) -> dict[str, float]:
    """Return each client's mean of a metric in ``metrics.csv`` over later rounds."""
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    for cells in map(_cells, islice(_lines(path), 1, None)):
        if not cells:
            break
        server_round, client, name, value = cells[3:]
        if client and name == metric and int(server_round) > after:
            sums[client] = sums.get(client, 0.0) + float(value)
            counts[client] = counts.get(client, 0) + 1
    return {client: total / counts[client] for client, total in sums.items()}


def join_csv(path: Path, parts: Iterable[Path]) -> None:
    """Concatenate several files of the format of ``metrics.csv``."""
    with atomic_file(path, durable=False) as joined:
        joined.write(HEADER.encode())
        for part in filter(Path.is_file, parts):
            with part.open("rb") as file:
                file.readline()
                shutil.copyfileobj(file, joined)
