"""Append-only files: nothing is lost to crashes, full disks or other programs."""

import csv
import json
from pathlib import Path

import pytest

from flwr_frl.strategies.report.journal import (
    COLUMNS,
    HEADER,
    Journal,
    client_means,
    csv_lines,
    join_csv,
    parse_csv,
    parse_jsonl,
)
from flwr_frl.strategies.report.report import Report
from flwr_frl.strategies.report.results import read_rows, summarize
from flwr_frl.task.settings import resolve

ABOUT = ("fedrep", 3, "test")


def lines_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def values_of(path: Path) -> list[str]:
    return [line["value"] for line in lines_of(path)]


def csv_journal(path: Path, after: int = 0) -> Journal:
    journal = Journal(path, parse_csv, after, path, HEADER)
    journal.flush()
    return journal


def add(journal: Journal, server_round: int, client: str, **metrics: float) -> None:
    journal.append(csv_lines(ABOUT, server_round, client, metrics))


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "metrics.csv"


def test_each_number_is_a_line(path):
    journal = csv_journal(path)
    add(journal, 1, "pi, the first", accuracy=0.5, loss=2.0)
    row = {"round": 1, "bytes-up": 7, "silent-clients": ["a"]}
    journal.append(csv_lines(ABOUT, 1, "", row))
    # Nothing is written before `flush`.
    assert lines_of(path) == []
    journal.flush()
    usual = {"algorithm": "fedrep", "seed": "3", "evaluated-on": "test", "round": "1"}
    assert lines_of(path) == [
        {**usual, "client": "pi, the first", "metric": "accuracy", "value": "0.5"},
        {**usual, "client": "pi, the first", "metric": "loss", "value": "2.0"},
        {**usual, "client": "", "metric": "bytes-up", "value": "7"},
    ]


def test_a_resumed_run_keeps_earlier_undamaged_lines(path):
    journal = csv_journal(path)
    for number in range(1, 6):
        add(journal, number, "a", accuracy=number / 10)
    add(journal, 0, "a", **{"num-examples": 5})
    journal.flush()
    again = csv_journal(path, after=3)
    add(again, 4, "a", accuracy=0.9)
    again.flush()
    values = [(int(r["round"]), float(r["value"])) for r in lines_of(path)]
    # Lines about a client's data are written again at the end.
    assert values == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.9)]
    # A line that was cut off, and all lines after it, are dropped.
    text = path.read_text()
    path.write_text(text[: text.index("0.2") + 2])
    csv_journal(path, after=4)
    assert values_of(path) == ["0.1"]


@pytest.mark.parametrize("value", ["0n2", "0.2" + "\0" * 140_000])
def test_a_value_that_is_no_number_ends_the_file(path, value):
    journal = csv_journal(path)
    for number in (1, 2, 3):
        add(journal, number, "a", accuracy=number / 10)
    journal.flush()
    path.write_text(path.read_text().replace("0.2", value))
    assert client_means(path, "accuracy", 0) == {"a": 0.1}
    csv_journal(path, after=3)
    assert values_of(path) == ["0.1"]


def test_a_full_disk_delays_lines(path, monkeypatch):
    journal = csv_journal(path)
    add(journal, 1, "a", loss=1.0)
    with monkeypatch.context() as patched:
        patched.setattr("flwr_frl.strategies.report.journal.open", _full, raising=False)
        with pytest.raises(OSError, match="No space"):
            journal.flush()
    # A part of the line was written.
    path.write_text(path.read_text() + "fedrep,3,te")
    add(journal, 2, "a", loss=2.0)
    journal.flush()
    assert values_of(path) == ["1.0", "2.0"]


def test_a_disk_that_is_full_at_a_resume_loses_no_earlier_line(path, monkeypatch):
    first = csv_journal(path)
    add(first, 1, "a", loss=1.0)
    first.flush()
    journal = Journal(path, parse_csv, 1, path, HEADER)
    add(journal, 2, "a", loss=2.0)
    with monkeypatch.context() as patched:
        patched.setattr("os.replace", _full)
        with pytest.raises(OSError, match="No space"):
            journal.flush()
    assert values_of(path) == ["1.0"]
    journal.flush()
    assert values_of(path) == ["1.0", "2.0"]


@pytest.mark.parametrize(("kept", "values"), [(None, ["3.0"]), (-2, ["1.0", "3.0"])])
def test_writing_continues_after_the_rest_of_a_cut_file(path, caplog, kept, values):
    journal = csv_journal(path)
    for number in (1, 2):
        add(journal, number, "a", loss=float(number))
        journal.flush()
    text = path.read_text()
    path.unlink()
    if kept:
        path.write_text(text[:kept])
    add(journal, 3, "a", loss=3.0)
    journal.flush()
    assert values_of(path) == values
    (line,) = caplog.messages
    assert line.startswith(f"{path} was cut or removed")


def test_a_link_in_place_of_the_file_is_replaced(path, tmp_path):
    target, journal = tmp_path / "target", csv_journal(path)
    target.write_text("theirs\n")
    path.unlink()
    path.symlink_to(target)
    add(journal, 1, "a", loss=1.0)
    journal.flush()
    assert target.read_text() == "theirs\n"
    assert values_of(path) == ["1.0"]


def test_rows_that_lack_their_newline_are_kept(tmp_path):
    path, row = tmp_path / "metrics.jsonl", {"round": 1, "seconds": 1.0}
    row |= {"bytes-down": 0, "bytes-up": 0}
    path.write_text(json.dumps(row))
    journal = Journal(path, parse_jsonl, 1, path)
    journal.append(json.dumps({**row, "round": 2}) + "\n")
    journal.flush()
    assert journal.rounds == {1}
    assert [row["round"] for row in read_rows(path)] == [1, 2]


def _full(*arguments, **options):
    raise OSError(28, "No space left on device")


def test_means_of_clients_over_the_last_rounds(path):
    journal = csv_journal(path)
    for number, accuracies in ((1, (0.9, 0.9)), (2, (0.2, 0.4)), (3, (0.4, 0.5))):
        for name, accuracy in zip("ab", accuracies, strict=True):
            add(journal, number, name, accuracy=accuracy, loss=9.0)
    add(journal, 3, "", accuracy=0.1)
    journal.flush()
    means = client_means(path, "accuracy", 1)
    assert means == {"a": pytest.approx(0.3), "b": pytest.approx(0.45)}


def test_several_files_are_joined(tmp_path):
    for name in "ab":
        journal = csv_journal(tmp_path / name)
        journal.append(csv_lines((name, 0, "test"), 1, "", {"loss": 1.0}))
        journal.flush()
    join_csv(tmp_path / "all", [tmp_path / n for n in ("a", "b", "missing")])
    assert [r["algorithm"] for r in lines_of(tmp_path / "all")] == ["a", "b"]
    assert (tmp_path / "all").read_text().count("algorithm") == 1


def test_joining_files_on_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("header\nline\n")
    monkeypatch.setattr("shutil.copyfileobj", _full)
    with pytest.raises(OSError, match="No space"):
        join_csv(tmp_path / "all", [tmp_path / "a"])
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("count", "worst", "best"),
    # Accuracies 0, 0.1, 0.2 …: the tenth of 5 clients is 1, of 11 it is 2.
    [(5, 0.0, 0.4), (10, 0.0, 0.9), (11, 0.05, 0.95)],
)
def test_the_worst_and_the_best_tenth(count, worst, best):
    means = {str(i): i / 10 for i in reversed(range(count))}
    row = {"round": 1, "seconds": 1.0, "bytes-down": 0, "bytes-up": 0}
    summary = summarize([row], {}, 1, means)
    assert summary["accuracy-worst-decile"] == pytest.approx(worst)
    assert summary["accuracy-best-decile"] == pytest.approx(best)


def test_a_report_writes_what_is_known_of_clients(tmp_path):
    report = Report(resolve({"output": str(tmp_path / "out")}))
    report.add_client(4, "anna", {"accuracy": 0.25})
    report.add({"round": 4, "seconds": 1.0, "bytes-down": 0, "bytes-up": 0})
    counts = {"7": 4, "bee": 5}
    report.finish({"anna": {"num-examples": 9, "class-counts": counts}})
    lines = lines_of(tmp_path / "out" / "fedrep" / "metrics.csv")
    of_anna = {
        (r["round"], r["metric"]): r["value"] for r in lines if r["client"] == "anna"
    }
    assert of_anna == {
        ("4", "accuracy"): "0.25",
        ("0", "num-examples"): "9",
        ("0", "class-count:7"): "4",
        ("0", "class-count:bee"): "5",
    }
    assert lines == lines_of(tmp_path / "out" / "metrics.csv")
    assert tuple(lines[0]) == COLUMNS
