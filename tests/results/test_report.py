"""Reports: rows that survive crashes and full disks, and a summary of the last ones."""

import json

import pytest
from command_line import json_of
from disks import full
from named_tasks import dashed

from flwr_frl.common.settings import resolve
from flwr_frl.results.report import Report
from flwr_frl.results.results import (
    client_means,
    lost_share,
    protocol_text,
    read_rows,
    result_rows,
    summarize,
)


def row(number: int, accuracy: float | None = None, **values) -> dict:
    record = {"round": number, "train-loss": 1 / number, "seconds": 2.0 * number}
    record |= {"bytes-down": 100, "bytes-up": 10, "clients": 2, "rejected": 0}
    record |= {} if accuracy is None else {"accuracy": accuracy}
    return record | values


def settings_of(tmp_path, **more):
    output = str(tmp_path / "out")
    return resolve({"output": output, "num-server-rounds": 4, **dashed(more)})


def journal(tmp_path, rounds: int, **more) -> Report:
    """Return a report with the rows of some rounds."""
    report = Report(settings_of(tmp_path, **more))
    for number in range(1, rounds + 1):
        report.add(row(number))
    return report


def accuracies(**clients: float) -> dict:
    return {name: {"accuracy": value} for name, value in clients.items()}


def finished(tmp_path, algorithm: str, accuracy: float, **overrides) -> dict:
    report = Report(settings_of(tmp_path, algorithm=algorithm, **overrides))
    for number in range(1, 5):
        report.add(row(number, accuracy))
    return report.finish({"000000": {"accuracy": accuracy}})


def of_last(rows: list[dict], clients: dict, last: int) -> dict:
    return summarize(rows, clients, result_rows(rows, "mean-last", last))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out" / "fedrep" / "metrics.jsonl"


def test_rows_are_written_with_the_metrics_of_each_client(tmp_path, path):
    report = Report(settings_of(tmp_path))
    assert path.read_bytes() == b""
    report.add(row(1), accuracies(a=0.5))
    clients = {"client-metrics": {"a": {"accuracy": 0.5}}}
    assert json.loads(path.read_text()) == {**row(1), **clients}
    assert report.rows == read_rows(path) == [row(1)]


def test_a_resumed_run_keeps_earlier_undamaged_rows(tmp_path, path):
    report = Report(settings_of(tmp_path))
    for number in range(1, 6):
        report.add(row(number), accuracies(a=number / 10))
    Report(settings_of(tmp_path), after=3).add(row(4), accuracies(a=0.9))
    assert [each["round"] for each in read_rows(path)] == [1, 2, 3, 4]
    # Client metrics are kept as well: (0.1 + 0.2 + 0.3 + 0.9) / 4.
    assert client_means(path.parent, "accuracy", range(9)) == {
        "a": pytest.approx(0.375)
    }
    # A truncated line is dropped, and all lines after it.
    path.write_text(path.read_text().replace('"a": {"accuracy": 0.2', '"a": {"accu'))
    assert Report(settings_of(tmp_path), after=4).rows == read_rows(path) == [row(1)]


@pytest.mark.parametrize("call", ["os.replace", "os.fsync"])
def test_a_full_disk_delays_rows_and_loses_none(tmp_path, path, monkeypatch, call):
    journal(tmp_path, 1)
    with monkeypatch.context() as patched:
        patched.setattr(call, full)
        report = Report(settings_of(tmp_path), after=1)
        report.add(row(2))
        assert report.lost == {"fedrep/metrics.jsonl"}
    assert read_rows(path) == [row(1)]
    report.add(row(3))
    assert read_rows(path) == [row(1), row(2), row(3)]
    assert report.lost == set()


@pytest.mark.parametrize(
    ("count", "worst", "best"),
    # Accuracies are 0, 0.1, 0.2, ... One tenth of 5 or 10 clients is 1, of 11 it is 2.
    [(5, 0.0, 0.4), (10, 0.0, 0.9), (11, 0.05, 0.95)],
)
def test_worst_and_best_decile(count, worst, best):
    means = {str(i): i / 10 for i in reversed(range(count))}
    summary = summarize([row(1)], {}, [row(1)], means)
    assert summary["accuracy-worst-decile"] == pytest.approx(worst)
    assert summary["accuracy-best-decile"] == pytest.approx(best)


def test_missing_rounds_are_logged_when_a_run_is_resumed(tmp_path, path, caplog):
    journal(tmp_path, 8)
    Report(settings_of(tmp_path), after=8)
    assert caplog.messages == []
    path.write_text(path.read_text().replace('"round": 2', '"round": n'))
    Report(settings_of(tmp_path), after=8)
    (line,) = caplog.messages
    assert line.endswith("2, 3, 4, 5, 6 and 2 others")


def test_the_summary_is_the_mean_over_the_last_rounds():
    # The best of the 12 rounds, 0.99, is round 3. The last ten are rounds 3 to 12.
    accuracies = [0.2, 0.3, 0.99, 0.4, 0.4, 0.4, 0.4, 0.4, 0.5, 0.5, 0.5, 0.6]
    rows = [row(i, a, error=1.0 * i) for i, a in enumerate(accuracies, 1)]
    clients = {"a": {"accuracy": 0.25}, "b": {"accuracy": 0.75}, "c": {"loss": 1.0}}
    summary = of_last(rows, clients, 10)
    assert summary["accuracy"] == pytest.approx(sum(accuracies[2:]) / 10)
    assert summary["error"] == pytest.approx(7.5)
    assert (summary["rounds"], summary["seconds"]) == (12, 24.0)
    assert summary["bytes"] == 12 * 110
    # Standard deviation of 0.25 and 0.75
    assert summary["accuracy-std-clients"] == pytest.approx(0.25)
    assert of_last(rows, clients, 1)["accuracy"] == 0.6
    # With fewer rounds than requested, all rounds are averaged.
    assert of_last(rows, {}, 50)["accuracy"] == pytest.approx(sum(accuracies) / 12)


def test_summary_has_the_number_of_clients_of_each_mean():
    rows = [
        row(1, 0.9, evaluated=2),
        row(2, 0.5, evaluated=4, auc=0.5),
        row(3, evaluated=0),
        row(4, 0.7, evaluated=6, auc=0.7, **{"auc-clients": 3}),
    ]
    summary = of_last(rows, {"a": {"auc": 0.5}}, 3)
    assert (summary["evaluated"], summary["auc-clients"]) == (5.0, 3.5)
    assert "accuracy-clients" not in summary


@pytest.mark.parametrize(
    ("rows", "num_clients", "expected"),
    [
        # The last round had a reply of each client, or else several rounds count.
        ([{"clients": 4}, {"clients": 1, "rejected": 3}], 4, 0.75),
        ([{"clients": 4}, {"clients": 1, "rejected": 3}], 8, 3 / 8),
        ([{"rejected": 4}, {"clients": 4}], 4, 0.0),
        # One of ten clients fails, which is all of the last round.
        ([{"clients": 1}] * 9 + [{"rejected": 1}], 10, 0.1),
        # A round of the first n replies does not wait for the others.
        ([{"clients": 1, "unanswered": 3}], 4, 0.0),
        ([{"clients": 1, "unanswered-clients": ["a", "b", "c"]}], 4, 0.75),
        ([{"clients": 4, "evaluated": 1, "evaluation-rejected": 3}], 4, 0.75),
        ([{"clients": 4, "evaluated": 2, "evaluation-unanswered": 2}, {}], 4, 0.5),
        ([{"evaluated": 4, "evaluated-before": 3, "evaluation-rejected": 1}], 4, 0.5),
        ([{}], 2, 0.0),
    ],
)
def test_share_of_lost_replies(rows, num_clients, expected):
    assert lost_share(rows, num_clients) == expected


def test_algorithms_with_the_same_settings_share_a_summary(tmp_path):
    path = tmp_path / "out" / "summary.json"
    path.parent.mkdir()
    # A damaged summary is replaced.
    path.write_text('{"algorithms": {"fedav')
    for accuracy, name in ((0.75, "fedrep"), (0.25, "fedavg")):
        finished(tmp_path, name, accuracy)
    algorithms = json_of(path)["algorithms"]
    accuracies = {name: summary["accuracy"] for name, summary in algorithms.items()}
    assert accuracies == {"fedrep": 0.75, "fedavg": 0.25}
    # A summary only has results with the same settings.
    finished(tmp_path, "fedper", 0.5, seed=1)
    written = json_of(path)
    assert (list(written["algorithms"]), written["config"]["seed"]) == (["fedper"], 1)


def test_the_bar_shows_the_folder_and_the_latest_metrics(tmp_path):
    report = Report(settings_of(tmp_path))
    states = []
    for number, accuracy in enumerate([None, 0.9, 0.2, 0.6], 1):
        report.add(row(number, accuracy, evaluated=accuracy and 2))
        (bar,) = report.progress.tasks
        states.append(bar.fields["state"])
    assert states[:2] == ["train loss 1", "train loss 0.5, accuracy 90.00%"]
    assert states[3] == "train loss 0.25, accuracy 60.00%"
    assert bar.description == "out/fedrep"


@pytest.mark.parametrize(
    ("protocol", "last", "rounds", "text"),
    [
        ("mean-last", 4, [5, 6, 7], "mean of last 3 rounds"),
        ("mean-last", 7, [2, 5, 6, 7], "mean of last 4 evaluations"),
        # At least the last evaluated round
        ("mean-last", 0, [7], "last evaluated round"),
        ("last", 10, [7], "last evaluated round"),
    ],
)
def test_rounds_of_the_result(protocol, last, rounds, text):
    rows = [row(i) for i in range(1, 9)]
    for i in (2, 5, 6, 7):
        rows[i - 1] |= {"evaluated": 2, "accuracy": i / 10}
    final = result_rows(rows, protocol, last)
    assert [each["round"] for each in final if "evaluated" in each] == rounds
    assert protocol_text(final) == text
