"""The journal of a run keeps its rows despite crashes, full disks or other programs."""

import json
from pathlib import Path

import pytest
from command_line import lines_of
from disks import full

from flwr_frl.common.settings import resolve
from flwr_frl.results.journal import (
    COLUMNS,
    Journal,
    client_means,
    join_csv,
    write_csv,
)
from flwr_frl.results.report import Report
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


@pytest.mark.parametrize(("kept", "rounds"), [(0, [3]), (-2, [1, 3])])
def test_writing_continues_after_a_truncated_file(path, caplog, kept, rounds):
    journal = journal_of(path)
    for number in (1, 2):
        add(journal, number)
        journal.flush()
    text = path.read_text()
    path.unlink()
    if kept:
        path.write_text(text[:kept])
    add(journal, 3)
    journal.flush()
    assert rounds_in(path) == rounds
    assert len(caplog.messages) == 1


def test_a_last_row_that_lacks_its_newline_is_kept(path):
    path.write_text(json.dumps({"round": 1, **TOTALS}))
    add(journal := journal_of(path, after=1), 2)
    journal.flush()
    assert rounds_in(path) == [1, 2]


def test_means_of_clients_over_the_last_rounds(path):
    journal = journal_of(path)
    for number, (a, b) in enumerate([(0.9, 0.9), (0.2, 0.4), (0.4, 0.5)], 1):
        add(journal, number, a=a, b=b)
    journal.flush()
    means = client_means(path.parent, "accuracy", 1)
    assert means == {"a": pytest.approx(0.3), "b": pytest.approx(0.45)}


def test_csv_has_one_line_per_number(tmp_path):
    report = Report(resolve({"output": str(tmp_path / "out"), "seed": 3}))
    row = {"round": 4, **TOTALS, "silent-clients": ["a"]}
    report.add(row, {"pi, the first": {"accuracy": 0.25, "loss": float("nan")}})
    counts = {"7": 4, "bee": 5}
    entry = {"num-examples": 9, "class-counts": counts, "accuracy": 0.5}
    report.finish({"pi, the first": entry})
    lines = lines_of(tmp_path / "out" / "fedrep" / "metrics.csv")
    assert tuple(lines[0]) == COLUMNS
    about = {(r["algorithm"], r["seed"], r["evaluated-on"]) for r in lines}
    assert about == {("fedrep", "3", "test")}
    cells = [(r["client"], r["round"], r["metric"], r["value"]) for r in lines]
    assert cells == [
        ("pi, the first", "4", "accuracy", "0.25"),
        *(("", "4", name, str(value)) for name, value in TOTALS.items()),
        ("pi, the first", "0", "num-examples", "9"),
        ("pi, the first", "0", "class-count:7", "4"),
        ("pi, the first", "0", "class-count:bee", "5"),
    ]
    assert lines == lines_of(tmp_path / "out" / "metrics.csv")


def test_csv_omits_malformed_rows_and_clients(tmp_path):
    rows = [{"round": 1, "client-metrics": 3}, {"round": 2, "client-metrics": {"a": 1}}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(text + "[1]\n")
    (tmp_path / "clients.json").write_text('{"a": []}')
    write_csv(tmp_path, ("fedrep", 0, "test"))
    assert [r["value"] for r in lines_of(tmp_path / "metrics.csv")] == ["3"]


def test_join_csv_concatenates_files_under_one_header(tmp_path, monkeypatch):
    header = ",".join(COLUMNS)
    for name in "ab":
        (tmp_path / name).write_text(f"{header}\n{name},0,test,1,,loss,1.0\n")
    parts = [tmp_path / name for name in ("a", "b", "missing")]
    join_csv(tmp_path / "all", parts)
    assert [r["algorithm"] for r in lines_of(tmp_path / "all")] == ["a", "b"]
    # A full disk leaves no partial file.
    monkeypatch.setattr("shutil.copyfileobj", full)
    with pytest.raises(OSError, match="No space"):
        join_csv(tmp_path / "more", parts)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "all"}


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
