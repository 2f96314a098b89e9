"""The tidy file: one line a round, client and metric, whatever happens to the run."""

import csv
from pathlib import Path

import pytest

from flwr_frl.strategies.report.report import Report
from flwr_frl.strategies.report.results import summarize
from flwr_frl.strategies.report.tidy import COLUMNS, TidyFile, client_means, join
from flwr_frl.task.settings import resolve


def lines_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def tidy_of(path: Path, after: int = 0) -> TidyFile:
    tidy = TidyFile(path, ("fedrep", 3, "test"))
    tidy.begin(after, path)
    return tidy


def test_a_line_for_each_number(tmp_path):
    path = tmp_path / "metrics.csv"
    tidy = tidy_of(path)
    tidy.add(1, "pi, the first", {"accuracy": 0.5, "loss": 2.0})
    tidy.add(1, "", {"round": 1, "bytes-up": 7, "silent-clients": ["a"]})
    # Nothing is there before it is written.
    assert lines_of(path) == []
    tidy.flush()
    usual = {"algorithm": "fedrep", "seed": "3", "evaluated-on": "test", "round": "1"}
    assert lines_of(path) == [
        {**usual, "client": "pi, the first", "metric": "accuracy", "value": "0.5"},
        {**usual, "client": "pi, the first", "metric": "loss", "value": "2.0"},
        {**usual, "client": "", "metric": "bytes-up", "value": "7"},
    ]


def test_a_resumed_run_keeps_what_was_before_and_whole(tmp_path):
    path = tmp_path / "metrics.csv"
    tidy = tidy_of(path)
    for number in range(1, 6):
        tidy.add(number, "a", {"accuracy": number / 10})
    tidy.add(0, "a", {"num-examples": 5})
    tidy.flush()
    again = tidy_of(path, after=3)
    again.add(4, "a", {"accuracy": 0.9})
    again.flush()
    values = [(int(r["round"]), float(r["value"])) for r in lines_of(path)]
    # What is known of clients is written again at the end.
    assert values == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.9)]
    # A line that was cut off, and what follows it, does not count.
    whole = path.read_text()
    path.write_text(whole[: whole.index("0.2") + 2])
    tidy_of(path, after=4)
    assert [float(r["value"]) for r in lines_of(path)] == [0.1]


@pytest.mark.parametrize("value", ["0n2", "0.2" + "\0" * 140_000])
def test_a_value_that_is_no_number_ends_what_is_read(tmp_path, value):
    path = tmp_path / "metrics.csv"
    tidy = tidy_of(path)
    for number in (1, 2, 3):
        tidy.add(number, "a", {"accuracy": number / 10})
    tidy.flush()
    path.write_text(path.read_text().replace("0.2", value))
    assert client_means(path, "accuracy", 0) == {"a": 0.1}
    tidy_of(path, after=3)
    assert [line["value"] for line in lines_of(path)] == ["0.1"]


def test_a_full_disk_delays_lines(tmp_path, monkeypatch):
    path = tmp_path / "metrics.csv"
    tidy = tidy_of(path)
    tidy.add(1, "a", {"loss": 1.0})
    with monkeypatch.context() as patched:
        patched.setattr("flwr_frl.strategies.report.tidy.open", _full, raising=False)
        with pytest.raises(OSError, match="No space"):
            tidy.flush()
    # Half a line of it had been written.
    path.write_text(path.read_text() + "fedrep,3,te")
    tidy.add(2, "a", {"loss": 2.0})
    tidy.flush()
    assert [r["value"] for r in lines_of(path)] == ["1.0", "2.0"]


@pytest.mark.parametrize(("kept", "values"), [(None, ["3.0"]), (-2, ["1.0", "3.0"])])
def test_a_file_that_somebody_removes_or_cuts_goes_on(tmp_path, caplog, kept, values):
    path = tmp_path / "metrics.csv"
    tidy = tidy_of(path)
    for number in (1, 2):
        tidy.add(number, "a", {"loss": float(number)})
        tidy.flush()
    text = path.read_text()
    path.unlink()
    if kept:
        path.write_text(text[:kept])
    tidy.add(3, "a", {"loss": 3.0})
    tidy.flush()
    assert [line["value"] for line in lines_of(path)] == values
    line = f"{path} was cut or removed: what is left of it goes on"
    assert caplog.messages == [line]


def test_a_link_in_place_of_the_file_is_replaced(tmp_path):
    path, target = tmp_path / "metrics.csv", tmp_path / "target"
    tidy = tidy_of(path)
    target.write_text("theirs\n")
    path.unlink()
    path.symlink_to(target)
    tidy.add(1, "a", {"loss": 1.0})
    tidy.flush()
    assert target.read_text() == "theirs\n"
    assert [line["value"] for line in lines_of(path)] == ["1.0"]


def _full(*arguments, **options):
    raise OSError(28, "No space left on device")


def test_means_of_clients_over_the_last_rounds(tmp_path):
    path = tmp_path / "metrics.csv"
    tidy = tidy_of(path)
    for number, accuracies in ((1, (0.9, 0.9)), (2, (0.2, 0.4)), (3, (0.4, 0.5))):
        for name, accuracy in zip("ab", accuracies, strict=True):
            tidy.add(number, name, {"accuracy": accuracy, "loss": 9.0})
    tidy.add(3, "", {"accuracy": 0.1})
    tidy.flush()
    means = client_means(path, "accuracy", 1)
    assert means == {"a": pytest.approx(0.3), "b": pytest.approx(0.45)}


def test_several_files_are_one(tmp_path):
    for name in "ab":
        tidy = TidyFile(tmp_path / name, (name, 0, "test"))
        tidy.begin(0, tmp_path / name)
        tidy.add(1, "", {"loss": 1.0})
        tidy.flush()
    join(tmp_path / "all", [tmp_path / n for n in ("a", "b", "missing")])
    assert [r["algorithm"] for r in lines_of(tmp_path / "all")] == ["a", "b"]
    assert (tmp_path / "all").read_text().count("algorithm") == 1


def test_several_files_for_which_the_disk_has_no_place_leave_nothing(
    tmp_path, monkeypatch
):
    (tmp_path / "a").write_text("header\nline\n")
    monkeypatch.setattr("shutil.copyfileobj", _full)
    with pytest.raises(OSError, match="No space"):
        join(tmp_path / "all", [tmp_path / "a"])
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
    report.tidy.add(4, "anna", {"accuracy": 0.25})
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
