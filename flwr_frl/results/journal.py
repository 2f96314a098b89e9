"""The journal of a run, ``metrics.jsonl``, and ``metrics.csv``, which follows from it.

``metrics.jsonl`` has one row per round. In the row of an evaluation, ``client-metrics``
has the metrics of each client; they are stored nowhere else. ``metrics.csv`` has one
line per round, client and metric, in long ("tidy") format. It is written when a run
ends.
"""

import csv
import io
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.common import log

from flwr_frl.common.files import atomic_file, open_no_follow
from flwr_frl.results.results import (
    CLIENT_METRICS,
    CLIENTS,
    METRICS,
    METRICS_CSV,
    Row,
    client_data,
    is_complete,
    objects_in,
    read_journal,
    read_object,
    strict_json,
    without_clients,
)

COLUMNS = (
    *("algorithm", "seed", "evaluated-on"),
    *("round", "client", "metric", "value"),
)
# The round of lines about a client's data, which belong to no round.
NO_ROUND = 0


class Journal:
    """The rows of a run, and the file to which they are appended.

    Rows stay in memory until `flush` has written them, so that a full disk only delays
    them. A crash damages at most the last line, which is dropped when the run is
    resumed. If another program cuts or removes the file, rows are appended to the
    undamaged lines that are left.

    Parameters
    ----------
    path : Path
        The file. `flush` creates it.
    former, after : Path, int
        The file begins with the rows of rounds 1 to ``after`` of the file ``former``,
        up to its first damaged line; ``former`` may be ``path``.

    Attributes
    ----------
    rows : list of dict
        All rows, without clients' metrics.
    """

    def __init__(self, path: Path, former: Path, after: int) -> None:
        self.path = path
        self.rows = [without_clients(row) for _, row in _complete(former, after)]
        # File and last round of the rows to copy to the file's start; None once copied.
        self._source: tuple[Path, float] | None = (former, after)
        self._pending: list[bytes] = []
        # The size of the file up to the last complete line.
        self._end = 0

    def add(self, row: Row, clients: Mapping[str, Mapping[str, Any]]) -> None:
        """Add the row of a round and its clients' metrics; `flush` writes them."""
        self.rows.append(row)
        entry = {**row, CLIENT_METRICS: clients} if clients else row
        self._pending.append(f"{strict_json(entry)}\n".encode())

    def flush(self) -> None:
        """Write pending rows to the disk. After an `OSError` the next call retries."""
        path = self.path
        # A link, which another program has put there, is replaced.
        whole = path.is_file() and not path.is_symlink()
        if self._source is None and not (whole and path.stat().st_size >= self._end):
            log(WARNING, "%s was cut or removed; continuing after its rest", path)
            self._source = (path, float("inf"))
        if self._source is not None:
            lines = [line for line, _ in _complete(*self._source)]
            with atomic_file(path) as copy:
                copy.writelines(line.rstrip(b"\r\n") + b"\n" for line in lines)
                self._end = copy.tell()
            self._source = None
        with open(path, "r+b", opener=open_no_follow) as file:
            file.seek(self._end)
            # An earlier call may have written a part of its lines.
            file.truncate()
            file.writelines(self._pending)
            file.flush()
            os.fsync(file.fileno())
            self._end, self._pending = file.tell(), []


def _complete(path: Path, after: float) -> list[tuple[bytes, Row]]:
    """Return the undamaged lines of a journal up to a round, each with its row."""
    undamaged = takewhile(lambda entry: is_complete(entry[1]), read_journal(path))
    return [(line, row) for line, row in undamaged if 0 < row["round"] <= after]


def write_csv(directory: Path, about: Sequence[Any]) -> None:
    """Write ``metrics.csv`` of a run from its ``metrics.jsonl`` and ``clients.json``.

    Parameters
    ----------
    directory : Path
        The folder of the run.
    about : sequence
        Algorithm, seed and ``evaluate-on``.
    """
    lines = (
        (*about, server_round, client, name, value)
        for server_round, client, metrics in _metrics_in(directory)
        for name, value in metrics.items()
        if isinstance(value, int | float) and name != "round"
    )
    write_lines(directory / METRICS_CSV, COLUMNS, lines)


def _metrics_in(directory: Path) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    """Yield round, client and metrics; metrics of the run follow those of clients."""
    for _, row in read_journal(directory / METRICS):
        for client, metrics in objects_in(row.get(CLIENT_METRICS)).items():
            yield row["round"], client, metrics
        yield row["round"], "", row
    for client, entry in objects_in(read_object(directory / CLIENTS)).items():
        yield NO_ROUND, client, client_data(entry)


def write_lines(
    path: Path, columns: Sequence[str], lines: Iterable[Sequence[Any]]
) -> None:
    """Write a CSV file, atomically."""
    with atomic_file(path, durable=False) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(lines)
        text.detach()


def client_means(directory: Path, metric: str, after: int) -> dict[str, float]:
    """Return each client's mean of a metric over the rounds after round ``after``."""
    values: dict[str, list[float]] = {}
    for server_round, client, metrics in _metrics_in(directory):
        value = metrics.get(metric)
        if client and server_round > after and isinstance(value, int | float):
            values.setdefault(client, []).append(value)
    return {client: sum(each) / len(each) for client, each in values.items()}


def join_csv(path: Path, parts: Iterable[Path]) -> None:
    """Concatenate several files of the format of ``metrics.csv``."""
    with atomic_file(path, durable=False) as joined:
        joined.write(f"{','.join(COLUMNS)}\n".encode())
        for part in filter(Path.is_file, parts):
            with part.open("rb") as file:
                file.readline()
                shutil.copyfileobj(file, joined)
