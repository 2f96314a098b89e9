"""The journal of a run keeps its rows despite crashes, full disks or other programs."""

import json
from pathlib import Path

import pytest
from command_line import lines_of
from disks import full

from flwr_frl.results.journal import (
    Journal,
    RunFolder,
    client_means,
    write_csv,
)
from flwr_frl.results.results import read_rows, summarize

TOTALS = {"seconds": 1.0, "bytes-down": 0, "bytes-up": 0}


def journal_of(path: Path, after: int = 0) -> Journal:
    journal = Journal(path, path, after)
    journal.flush()
    return journal


def add(journal: Journal, server_round: int, **clients: float) -> None:
    """Add a row with the accuracies of some clients."""
    metrics = {name: {"accuracy": value} for name, value in clients.items()}
    journal.add({"round": server_round, **TOTALS}, metrics)


def rounds_in(path: Path) -> list[int]:
    return [row["round"] for row in read_rows(path)]


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_rows_are_written_by_flush_with_the_metrics_of_each_client(path):
    journal = journal_of(path)
    add(journal, 1, a=0.5)
    assert path.read_bytes() == b""
    journal.flush()
    row = {"round": 1, **TOTALS}
    clients = {"client-metrics": {"a": {"accuracy": 0.5}}}
    assert json.loads(path.read_text()) == {**row, **clients}
    assert journal.rows == read_rows(path) == [row]
    # A client's name may look like the beginning of the metrics.
    name = 'b", "client-metrics": {'
    journal.add({"round": 3, **TOTALS, "silent-clients": [name]}, {name: {"loss": 1.0}})
    journal.flush()
    assert read_rows(path) == journal.rows


def test_a_resumed_run_keeps_earlier_undamaged_rows(path):
    journal = journal_of(path)
    for number in range(1, 6):
        add(journal, number, a=number / 10)
    journal.flush()
    again = journal_of(path, after=3)
    add(again, 4, a=0.9)
    again.flush()
    assert rounds_in(path) == [1, 2, 3, 4]
    # Client metrics are kept as well: (0.1 + 0.2 + 0.3 + 0.9) / 4.
    assert client_means(path.parent, "accuracy", 0) == {"a": pytest.approx(0.375)}
    # A truncated line is dropped, and all lines after it.
    path.write_text(path.read_text().replace('"a": {"accuracy": 0.2', '"a": {"accu'))
    assert [row["round"] for row in journal_of(path, after=4).rows] == [1]
    assert rounds_in(path) == [1]


def test_full_disk_at_resume_keeps_earlier_rows(path, monkeypatch):
    add(first := journal_of(path), 1)
    first.flush()
    add(journal := Journal(path, path, 1), 2)
    with monkeypatch.context() as patched:
        patched.setattr("os.replace", full)
        with pytest.raises(OSError, match="No space"):
            journal.flush()
    assert rounds_in(path) == [1]
    journal.flush()
    assert rounds_in(path) == [1, 2]


def test_csv_has_one_line_per_number(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        journal = journal_of(tmp_path / name / "metrics.jsonl")
        row = {"round": 4, "seconds": 1.5, "silent-clients": ["a"], "ok": True}
        journal.add(row, {"pi, 1": {"accuracy": 0.25, "loss": float("nan")}})
        journal.flush()
    clients = {"pi, 1": {"num-examples": 9, "class-counts": {"7": 4}, "accuracy": 0.5}}
    (tmp_path / "a" / "clients.json").write_text(json.dumps(clients | {"x": []}))
    with (tmp_path / "b" / "metrics.jsonl").open("a") as file:
        file.write('{"round": 5, "client-metrics": []}\n[1]\n')
    runs = [RunFolder(name, 3, "test", tmp_path / name) for name in "ab"]
    write_csv(tmp_path / "metrics.csv", runs)
    lines = lines_of(tmp_path / "metrics.csv")
    about = {(r["algorithm"], r["seed"], r["evaluated-on"]) for r in lines}
    assert about == {("a", "3", "test"), ("b", "3", "test")}
    cells = [(r["client"], r["round"], r["metric"], r["value"]) for r in lines]
    assert cells == [
        ("pi, 1", "4", "accuracy", "0.25"),
        ("", "4", "seconds", "1.5"),
        ("pi, 1", "0", "num-examples", "9"),
        ("pi, 1", "0", "class-count:7", "4"),
        ("pi, 1", "4", "accuracy", "0.25"),
        ("", "4", "seconds", "1.5"),
    ]


@pytest.mark.parametrize(
    ("count", "worst", "best"),
    # Accuracies are 0, 0.1, 0.2, ... One tenth of 5 or 10 clients is 1, of 11 it is 2.
    [(5, 0.0, 0.4), (10, 0.0, 0.9), (11, 0.05, 0.95)],
)
def test_worst_and_best_decile(count, worst, best):
    means = {str(i): i / 10 for i in reversed(range(count))}
    summary = summarize([{"round": 1, **TOTALS}], {}, 1, means)
    assert summary["accuracy-worst-decile"] == pytest.approx(worst)
    assert summary["accuracy-best-decile"] == pytest.approx(best)
