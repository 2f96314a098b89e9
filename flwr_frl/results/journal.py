"""The journal of a run, ``metrics.jsonl``, and ``metrics.csv``, which follows from it.

``metrics.jsonl`` has one row per round. In the row of an evaluation, ``client-metrics``
has the metrics of each client; they are stored nowhere else. ``metrics.csv`` has one
line per round, client and metric, in long ("tidy") format, for all runs of a folder.
"""

import csv
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flwr_frl.common.files import atomic_file, open_no_follow
from flwr_frl.common.messages import CLASS_COUNTS
from flwr_frl.results.results import (
    CLIENT_METRICS,
    CLIENTS,
    METRICS,
    Row,
    is_number,
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
    resumed.

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
        kept = [row for row in read_journal(former) if 0 < row["round"] <= after]
        self.path, self.rows = path, [without_clients(row) for row in kept]
        self._pending = [_line(row) for row in kept]
        # The size of the file up to the last complete line; 0 before the first flush.
        self._end = 0

    def add(self, row: Row, clients: Mapping[str, Mapping[str, Any]]) -> None:
        """Add the row of a round and its clients' metrics; `flush` writes them."""
        self.rows.append(row)
        self._pending.append(
            _line({**row, CLIENT_METRICS: clients} if clients else row)
        )

    def flush(self) -> None:
        """Write pending rows to the disk. After an `OSError` the next call retries."""
        if not self._end:
            with atomic_file(self.path) as file:
                file.writelines(self._pending)
                end = file.tell()
        else:
            with open(self.path, "r+b", opener=open_no_follow) as file:
                file.seek(self._end)
                # An earlier call may have written a part of its lines.
                file.truncate()
                file.writelines(self._pending)
                file.flush()
                os.fsync(file.fileno())
                end = file.tell()
        self._end, self._pending = end, []


def _line(row: Row) -> bytes:
    return f"{strict_json(row)}\n".encode()


class RunFolder(NamedTuple):
    """The folder of a run, and what ``metrics.csv`` states about the run."""

    algorithm: str
    seed: Any
    evaluated_on: str
    directory: Path


def write_csv(path: Path, runs: Iterable[RunFolder]) -> None:
    """Write ``metrics.csv`` from the journals and ``clients.json`` of some runs."""
    lines = (
        (*run[:3], server_round, client, name, value)
        for run in runs
        for server_round, client, metrics in _metrics_in(run.directory)
        for name, value in metrics.items()
        if is_number(value) and name != "round"
    )
    with atomic_file(path, durable=False) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(lines)
        text.detach()


def _metrics_in(directory: Path) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    """Yield round, client and metrics; metrics of the run follow those of clients."""
    for row in read_journal(directory / METRICS):
        for client, metrics in objects_in(row.get(CLIENT_METRICS)).items():
            yield row["round"], client, metrics
        yield row["round"], "", row
    for client, entry in objects_in(read_object(directory / CLIENTS)).items():
        counts = entry.get(CLASS_COUNTS, {}).items()
        sizes = ("num-examples", "num-test-examples")
        yield NO_ROUND, client, {name: entry.get(name) for name in sizes}
        yield NO_ROUND, client, {f"class-count:{name}": n for name, n in counts}


def client_means(directory: Path, metric: str, after: int) -> dict[str, float]:
    """Return each client's mean of a metric over the rounds after round ``after``."""
    values: dict[str, list[float]] = {}
    for server_round, client, metrics in _metrics_in(directory):
        value = metrics.get(metric)
        if client and server_round > after and is_number(value):
            values.setdefault(client, []).append(value)
    return {client: sum(each) / len(each) for client, each in values.items()}
