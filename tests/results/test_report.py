"""Reports: rows, and a summary that averages the last rounds, never the best round."""

import io
import json
import sys
import warnings

import pytest
from PIL import Image

from flwr_frl.common.settings import resolve
from flwr_frl.results.comparison import read_comparable
from flwr_frl.results.plot import line_style, plot
from flwr_frl.results.report import Report
from flwr_frl.results.results import lost_share, read_rows, summarize


def row(number: int, accuracy: float | None = None, **values) -> dict:
    record = {"round": number, "train-loss": 1 / number, "seconds": 2.0 * number}
    record |= {"bytes-down": 100, "bytes-up": 10, "clients": 2, "rejected": 0}
    record |= {} if accuracy is None else {"accuracy": accuracy}
    return record | values


def settings_of(tmp_path, **overrides):
    names = {name.replace("_", "-"): value for name, value in overrides.items()}
    return resolve({"output": str(tmp_path / "out"), "num-server-rounds": 4, **names})


def finished(tmp_path, algorithm: str, accuracy: float, **overrides) -> dict:
    report = Report(settings_of(tmp_path, algorithm=algorithm, **overrides))
    for number in range(1, 5):
        report.add(row(number, accuracy))
    return report.finish({"000000": {"accuracy": accuracy}})


def summary_in(tmp_path) -> dict:
    return json.loads((tmp_path / "out" / "summary.json").read_text())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out" / "fedrep" / "metrics.jsonl"


def test_rows_are_written_at_once_and_kept_up_to_a_checkpoint(tmp_path, path):
    report = Report(settings_of(tmp_path))
    for number in (1, 2, 3):
        report.add(row(number))
        assert read_rows(path) == [row(i) for i in range(1, number + 1)]
    resumed = Report(settings_of(tmp_path), after=2)
    resumed.add(row(3, 0.5))
    assert read_rows(path) == resumed.rows == [row(1), row(2), row(3, 0.5)]
    # A new run drops all rows.
    assert Report(settings_of(tmp_path)).rows == read_rows(path) == []


def test_missing_rounds_are_logged_when_a_run_is_resumed(tmp_path, path, caplog):
    former = Report(settings_of(tmp_path))
    for number in range(1, 9):
        former.add(row(number))
    Report(settings_of(tmp_path), after=8)
    assert caplog.messages == []
    path.write_text(path.read_text().replace('"round": 2', '"round": n'))
    Report(settings_of(tmp_path), after=8)
    (line,) = caplog.messages
    assert line.endswith(" lacks these rounds: 2, 3, 4, 5, 6 and 2 others")


@pytest.mark.parametrize("name", ["seconds", "bytes-down", "bytes-up"])
def test_a_row_without_its_totals_is_damaged(tmp_path, path, name):
    former = Report(settings_of(tmp_path))
    for number in (1, 2, 3):
        former.add(row(number))
    first, second, third = path.read_text().splitlines(keepends=True)
    path.write_text(first + second.replace(name, "x" + name[1:]) + third)
    report = Report(settings_of(tmp_path), after=3)
    assert report.rows == [row(1)]
    assert report.finish({})["bytes"] == 110


@pytest.mark.parametrize("rest", ['{"round": 3, "acc', "{", "nonsense", "[" * 100_000])
def test_truncated_last_line_is_ignored(tmp_path, rest):
    path = tmp_path / "metrics.jsonl"
    assert read_rows(path) == []
    path.write_text("\n".join([json.dumps(row(1)), json.dumps(row(2)), rest]))
    assert read_rows(path) == [row(1), row(2)]


def test_links_in_an_output_folder_are_not_written_through(tmp_path, path, figures):
    output, target = tmp_path / "out", tmp_path / "target"
    target.write_bytes(b"theirs")
    report = Report(resolve({"output": str(output)}))
    for name in ("accuracy.png", "report.html", "summary.json", "metrics.csv"):
        (output / name).symlink_to(target)
    path.unlink()
    path.symlink_to(target)
    for number in (1, 2):
        report.add(row(number, 0.5))
    report.finish({})
    assert target.read_bytes() == b"theirs"
    assert len(read_rows(path)) == 2
    assert (output / "accuracy.png").read_bytes().startswith(b"\x89PNG")


def test_the_summary_is_the_mean_over_the_last_rounds():
    # The best of the 12 rounds, 0.99, is round 3. The last ten are rounds 3 to 12.
    accuracies = [0.2, 0.3, 0.99, 0.4, 0.4, 0.4, 0.4, 0.4, 0.5, 0.5, 0.5, 0.6]
    rows = [row(i, a, error=1.0 * i) for i, a in enumerate(accuracies, 1)]
    clients = {"a": {"accuracy": 0.25}, "b": {"accuracy": 0.75}, "c": {"loss": 1.0}}
    summary = summarize(rows, clients, 10)
    assert summary["accuracy"] == pytest.approx(sum(accuracies[2:]) / 10)
    assert summary["error"] == pytest.approx(7.5)
    assert (summary["rounds"], summary["seconds"]) == (12, 24.0)
    assert summary["bytes"] == 12 * 110
    # Standard deviation of 0.25 and 0.75
    assert summary["accuracy-std-clients"] == pytest.approx(0.25)
    assert summarize(rows, clients, 1)["accuracy"] == 0.6
    # With fewer rounds than requested, all rounds are averaged.
    assert summarize(rows, {}, 50)["accuracy"] == pytest.approx(sum(accuracies) / 12)


def test_summary_has_the_number_of_clients_of_each_mean():
    rows = [
        row(1, 0.9, evaluated=2),
        row(2, 0.5, evaluated=4, auc=0.5),
        row(3, evaluated=0),
        row(4, 0.7, evaluated=6, auc=0.7, **{"auc-clients": 3}),
    ]
    summary = summarize(rows, {"a": {"auc": 0.5}}, 3)
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
        ([{"clients": 2, "unanswered-clients": 1.0}], 2, 0.0),
        ([{}], 2, 0.0),
    ],
)
def test_share_of_lost_replies(rows, num_clients, expected):
    assert lost_share(rows, num_clients) == expected


def test_rounds_without_evaluation_are_not_averaged():
    rows = [row(1, 0.9), row(2), row(3, 0.2), row(4), row(5, 0.4)]
    assert summarize(rows, {}, 3)["accuracy"] == pytest.approx(0.3)
    assert "accuracy" not in summarize([row(1), row(2)], {}, 3)


def test_lists_in_rows_are_not_summarized_as_metrics():
    rows = [row(1, 0.5, **{"rejected-clients": ["liar"]})]
    clients = {"a": {"accuracy": 0.5}, "liar": {"rejected-clients": 1.0, "f1": 0.0}}
    summary = summarize(rows, clients, 1)
    assert summary["accuracy"] == 0.5
    assert not {"rejected-clients", "f1"} & summary.keys()


def test_finished_run_has_written_all_files(tmp_path, figures):
    summary = finished(tmp_path, "fedrep", 0.75)
    out = tmp_path / "out"
    assert {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()} == {
        *("fedrep/metrics.jsonl", "fedrep/metrics.csv", "fedrep/clients.json"),
        *("metrics.csv", "summary.json", "table.md", "table.tex"),
        *("accuracy.png", "report.html"),
    }
    clients = json.loads((out / "fedrep" / "clients.json").read_text())
    assert clients == {"000000": {"accuracy": 0.75}}
    written = summary_in(tmp_path)
    assert written["algorithms"] == {"fedrep": summary}
    assert summary["accuracy"] == 0.75
    excluded = ("algorithm", "resume", "page", "tracker", "tracker-uri")
    settings = settings_of(tmp_path)
    expected = {name: value for name, value in settings.items() if name not in excluded}
    assert written["config"] == expected


def test_files_that_cannot_be_written_are_logged(tmp_path, figures, caplog):
    for name in ("accuracy.png", "metrics.csv"):
        (tmp_path / "out" / name).mkdir(parents=True)
    finished(tmp_path, "fedrep", 0.75)
    lines = [line.split(":")[0] for line in caplog.messages]
    assert lines == ["metrics.csv not written", "accuracy.png not written"]
    assert (tmp_path / "out" / "table.md").is_file()


def test_algorithms_with_the_same_settings_share_a_summary(tmp_path):
    (tmp_path / "out").mkdir()
    # A damaged summary is replaced.
    (tmp_path / "out" / "summary.json").write_text('{"algorithms": {"fedav')
    finished(tmp_path, "fedrep", 0.75)
    finished(tmp_path, "fedavg", 0.25)
    written = summary_in(tmp_path)
    accuracies = {name: s["accuracy"] for name, s in written["algorithms"].items()}
    assert accuracies == {"fedrep": 0.75, "fedavg": 0.25}
    # A summary only has results with the same settings.
    finished(tmp_path, "fedper", 0.5, seed=1)
    written = summary_in(tmp_path)
    assert list(written["algorithms"]) == ["fedper"]
    assert written["config"]["seed"] == 1


@pytest.mark.parametrize(("lowest", "scale"), [(0.5, "log"), (-1.0, "linear")])
def test_losses_below_zero_have_a_linear_axis(tmp_path, monkeypatch, lowest, scale):
    drawn = []
    save = "flwr_frl.results.plot.save_figure"
    monkeypatch.setattr(save, lambda figure, path: drawn.append(figure))
    (tmp_path / "fedavg").mkdir()
    lines = [json.dumps(row(i, loss=value)) for i, value in ((1, 2.0), (2, lowest))]
    (tmp_path / "fedavg" / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    plot(tmp_path, ["fedavg"])
    assert drawn[0].axes[0].get_yscale() == scale


def test_runs_with_another_patience_are_not_compared(tmp_path):
    config = {"algorithm": "fedavg", "patience": 0}
    content = {"algorithms": {"fedavg": {}}, "config": config}
    (tmp_path / "summary.json").write_text(json.dumps(content))
    assert read_comparable(tmp_path, config) == content
    other = read_comparable(tmp_path, {**config, "patience": 2})
    assert other["algorithms"] == {}


def test_a_plot_of_all_algorithms_has_room_for_their_names(tmp_path):
    names = [f"algorithm-{i}" for i in range(40)]
    for i, name in enumerate(names):
        (tmp_path / name).mkdir()
        lines = (row(r, **{"distance": r / 50, "train-loss": i}) for r in range(1, 4))
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / name / "metrics.jsonl").write_text(text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot(tmp_path, names)
    with Image.open(tmp_path / "accuracy.png") as high:
        assert high.height > 1.3 * 3.6 * 150
        assert len(high.convert("RGB").getcolors(1 << 24)) > 10
    assert len({tuple(line_style(i).items()) for i in range(40)}) == 40
    plot(tmp_path, names[:3])
    with Image.open(tmp_path / "accuracy.png") as low:
        assert low.height == 3.6 * 150


def test_progress_bar_shows_the_latest_values(tmp_path):
    report = Report({**settings_of(tmp_path), "evaluate-on": "validation"})
    report.add(row(1, loss=2.0))
    report.add(row(2))
    assert (report.latest("loss"), report.latest("nothing")) == (2.0, None)
    (bar,) = report.progress.tasks
    assert bar.completed == 2
    assert bar.fields["state"] == "train loss 0.5, validation loss 2"


def test_printed_text_appears_once_beside_the_progress_bar(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", terminal)
    report = Report(settings_of(tmp_path))
    with report.progress:
        print("said in between")
        report.add(row(1))
    assert sys.stdout is terminal
    assert terminal.getvalue().count("said in between") == 1
    assert "1/4" in terminal.getvalue()


def test_evaluate_last_zero_reports_the_last_evaluated_round(tmp_path):
    report = Report(settings_of(tmp_path, evaluate_last=0))
    for number, accuracy in ((1, None), (2, 0.3), (3, 0.6), (4, None)):
        more = {} if accuracy is None else {"evaluated": 2}
        report.add(row(number, accuracy, **more))
    assert report.finish({"a": {"accuracy": 0.6}})["accuracy"] == 0.6


def test_metrics_that_some_clients_lack_are_logged(tmp_path, caplog):
    # For example, AUC is undefined for one class, and client d has no test examples.
    report = Report(settings_of(tmp_path, metrics="f1, own.metrics:odd"))
    report.add(row(1, 0.5, evaluated=3, auc=0.75, f1=0.5))
    metrics = {"accuracy": 0.5, "loss": 1.0, "f1": 0.5}
    clients = {"a": {**metrics, "auc": 0.5}, "b": {**metrics, "auc": 1.0}, "c": metrics}
    report.finish({**clients, "d": {"num-examples": 3}})
    (line,) = caplog.messages
    assert "no value of 'auc' (2), 'odd' (0);" in line
