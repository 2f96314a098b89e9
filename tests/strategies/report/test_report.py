"""Reports: rows, and a summary that is the mean of the last rounds, never the best."""

import io
import json
import sys
import warnings

import pytest
from PIL import Image

from flwr_frl.strategies.report.plot import line_style, plot
from flwr_frl.strategies.report.report import Report
from flwr_frl.strategies.report.results import read_rows, summarize
from flwr_frl.task.settings import resolve


def row(number: int, accuracy: float | None = None, **values) -> dict:
    record = {"round": number, "train-loss": 1 / number, "seconds": 2.0 * number}
    record |= {"bytes-down": 100, "bytes-up": 10, "clients": 2, "rejected": 0}
    record |= {} if accuracy is None else {"accuracy": accuracy}
    return record | values


def settings_of(tmp_path, **overrides):
    names = {name.replace("_", "-"): value for name, value in overrides.items()}
    return resolve({"output": str(tmp_path / "out"), "num-server-rounds": 4, **names})


def rows_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_written_as_they_come(tmp_path):
    report = Report(settings_of(tmp_path))
    path = tmp_path / "out" / "fedrep" / "metrics.jsonl"
    for number in (1, 2):
        report.add(row(number))
        assert rows_of(path) == [row(i) for i in range(1, number + 1)]


def test_a_new_run_drops_earlier_rows(tmp_path):
    Report(settings_of(tmp_path)).add(row(1))
    report = Report(settings_of(tmp_path))
    assert report.rows == []
    assert rows_of(tmp_path / "out" / "fedrep" / "metrics.jsonl") == []


def test_a_continued_run_keeps_the_rows_up_to_its_checkpoint(tmp_path):
    former = Report(settings_of(tmp_path))
    for number in range(1, 8):
        former.add(row(number))
    report = Report(settings_of(tmp_path), after=5)
    report.add(row(6, 0.5))
    path = tmp_path / "out" / "fedrep" / "metrics.jsonl"
    assert rows_of(path) == [row(i) for i in range(1, 6)] + [row(6, 0.5)]


def test_missing_rounds_are_logged_when_a_run_is_resumed(tmp_path, caplog):
    former = Report(settings_of(tmp_path))
    for number in range(1, 9):
        former.add(row(number))
    Report(settings_of(tmp_path), after=8)
    assert caplog.messages == []
    path = tmp_path / "out" / "fedrep" / "metrics.jsonl"
    path.write_text(path.read_text().replace('"round": 2', '"round": n'))
    Report(settings_of(tmp_path), after=8)
    (line,) = caplog.messages
    assert line.endswith(" lacks these rounds: 2, 3, 4, 5, 6 and 2 others")


@pytest.mark.parametrize("name", ["seconds", "bytes-down", "bytes-up"])
def test_a_row_without_its_totals_is_damaged(tmp_path, name):
    former = Report(settings_of(tmp_path))
    for number in (1, 2, 3):
        former.add(row(number))
    path = tmp_path / "out" / "fedrep" / "metrics.jsonl"
    first, second, third = path.read_text().splitlines(keepends=True)
    path.write_text(first + second.replace(name, "x" + name[1:]) + third)
    report = Report(settings_of(tmp_path), after=3)
    assert report.rows == [row(1)]
    assert report.finish({})["bytes"] == 110


@pytest.mark.parametrize("rest", ['{"round": 3, "acc', "{", "nonsense", "[" * 100_000])
def test_a_last_line_that_was_cut_off_is_left_out(tmp_path, rest):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps(row(1)), json.dumps(row(2)), rest]
    path.write_text("\n".join(lines))
    assert read_rows(path) == [row(1), row(2)]


def test_no_file_has_no_rows(tmp_path):
    assert read_rows(tmp_path / "nothing") == []


def test_links_in_an_output_folder_are_replaced_or_left(tmp_path, figures):
    output, target = tmp_path / "out", tmp_path / "target"
    target.write_bytes(b"theirs")
    report = Report(resolve({"output": str(output)}))
    for name in ("accuracy.png", "report.html", "summary.json", "metrics.csv"):
        (output / name).symlink_to(target)
    rows = output / "fedrep" / "metrics.jsonl"
    rows.unlink()
    rows.symlink_to(target)
    for number in (1, 2):
        report.add(row(number, 0.5))
    report.finish({})
    assert target.read_bytes() == b"theirs"
    assert len(read_rows(rows)) == 2
    assert (output / "accuracy.png").read_bytes().startswith(b"\x89PNG")


def test_the_summary_is_the_mean_over_the_last_rounds():
    # Rounds 1 to 12: the best, 0.99, is round 3. The last ten: 3 to 12.
    accuracies = [0.2, 0.3, 0.99, 0.4, 0.4, 0.4, 0.4, 0.4, 0.5, 0.5, 0.5, 0.6]
    rows = [row(i, a) for i, a in enumerate(accuracies, 1)]
    clients = {"a": {"accuracy": 0.25}, "b": {"accuracy": 0.75}, "c": {"loss": 1.0}}
    summary = summarize(rows, clients, 10)
    assert summary["accuracy"] == pytest.approx(sum(accuracies[2:]) / 10)
    assert summary["rounds"] == 12
    assert summary["seconds"] == 24.0
    assert summary["bytes"] == 12 * 110
    # Of 0.25 and 0.75: 0.25.
    assert summary["accuracy-std-clients"] == pytest.approx(0.25)
    assert summarize(rows, clients, 1)["accuracy"] == 0.6
    assert summarize(rows, clients, 2)["accuracy"] == pytest.approx(0.55)
    # Fewer rounds than the mean is over: all of them.
    assert summarize(rows, {}, 50)["accuracy"] == pytest.approx(sum(accuracies) / 12)


def test_rounds_that_were_not_evaluated_do_not_count():
    rows = [row(1, 0.9), row(2), row(3, 0.2), row(4), row(5, 0.4)]
    assert summarize(rows, {}, 3)["accuracy"] == pytest.approx(0.3)
    assert "accuracy" not in summarize([row(1), row(2)], {}, 3)


def test_other_metrics_are_summarised_alike():
    rows = [row(i, None, distance=0.1 * i, error=1.0 * i, loss=0.0) for i in (1, 2, 3)]
    summary = summarize(rows, {}, 2)
    assert summary["distance"] == pytest.approx(0.25)
    assert summary["error"] == pytest.approx(2.5)


def finished(tmp_path, algorithm: str, accuracy: float, **overrides) -> dict:
    report = Report(settings_of(tmp_path, algorithm=algorithm, **overrides))
    for number in range(1, 5):
        report.add(row(number, accuracy))
    return report.finish({"000000": {"accuracy": accuracy}})


def test_a_row_s_list_is_no_metric_whatever_a_client_calls_its_own():
    rows = [row(1, 0.5, **{"rejected-clients": ["liar"]})]
    clients = {"a": {"accuracy": 0.5}, "liar": {"rejected-clients": 1.0, "f1": 0.0}}
    summary = summarize(rows, clients, 1)
    assert summary["accuracy"] == 0.5
    assert not {"rejected-clients", "f1"} & summary.keys()


def test_all_files_are_there_at_the_end(tmp_path, figures):
    summary = finished(tmp_path, "fedrep", 0.75)
    out = tmp_path / "out"
    assert {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()} == {
        "fedrep/metrics.jsonl",
        "fedrep/metrics.csv",
        "fedrep/clients.json",
        "metrics.csv",
        "summary.json",
        "table.md",
        "table.tex",
        "accuracy.png",
        "report.html",
    }
    assert json.loads((out / "fedrep" / "clients.json").read_text()) == {
        "000000": {"accuracy": 0.75}
    }
    whole = json.loads((out / "summary.json").read_text())
    assert whole["algorithms"] == {"fedrep": summary}
    assert summary["accuracy"] == 0.75
    own = ("algorithm", "resume", "page", "tracker", "tracker-uri")
    given = settings_of(tmp_path)
    expected = {name: value for name, value in given.items() if name not in own}
    assert whole["config"] == expected


def test_files_that_cannot_be_written_are_logged(tmp_path, figures, caplog):
    for name in ("accuracy.png", "metrics.csv"):
        (tmp_path / "out" / name).mkdir(parents=True)
    finished(tmp_path, "fedrep", 0.75)
    lines = [line.split(":")[0] for line in caplog.messages]
    joined = tmp_path / "out" / "metrics.csv"
    assert lines == [f"{joined} not written", "accuracy.png not written"]
    assert (tmp_path / "out" / "table.md").is_file()


def test_algorithms_with_the_same_settings_share_a_summary(tmp_path):
    finished(tmp_path, "fedrep", 0.75)
    finished(tmp_path, "fedavg", 0.25)
    whole = json.loads((tmp_path / "out" / "summary.json").read_text())
    accuracies = {name: s["accuracy"] for name, s in whole["algorithms"].items()}
    assert accuracies == {"fedrep": 0.75, "fedavg": 0.25}
    # What was made with other settings is not compared with it.
    finished(tmp_path, "fedper", 0.5, seed=1)
    whole = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert list(whole["algorithms"]) == ["fedper"]
    assert whole["config"]["seed"] == 1


@pytest.mark.parametrize("metric", ["accuracy", "distance", "train-loss"])
def test_the_plot_is_an_image(tmp_path, figures, metric):
    report = Report(settings_of(tmp_path))
    for number in range(1, 5):
        report.add(row(number, **{metric: 0.1 * number}))
    report.finish({})
    with Image.open(tmp_path / "out" / "accuracy.png") as image:
        image.load()
        assert image.format == "PNG"
        assert len(image.convert("RGB").getcolors(1 << 24)) > 10


def test_a_plot_of_all_algorithms_has_room_for_their_names(tmp_path):
    names = [f"algorithm-{i}" for i in range(40)]
    for i, name in enumerate(names):
        (tmp_path / name).mkdir()
        lines = (row(r, **{"accuracy": r / 50, "train-loss": i}) for r in range(1, 4))
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / name / "metrics.jsonl").write_text(text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot(tmp_path, names)
    with Image.open(tmp_path / "accuracy.png") as high:
        assert high.height > 1.3 * 3.6 * 150
    assert len({tuple(line_style(i).items()) for i in range(40)}) == 40
    plot(tmp_path, names[:3])
    with Image.open(tmp_path / "accuracy.png") as low:
        assert low.height == 3.6 * 150


def test_the_bar_shows_the_newest_values(tmp_path):
    report = Report(settings_of(tmp_path))
    report.add(row(1, 0.5))
    report.add(row(2))
    assert report.latest("accuracy") == 0.5
    assert report.latest("nothing") is None
    (bar,) = report.progress.tasks
    assert bar.completed == 2
    assert bar.fields["state"] == "train loss 0.5, accuracy 50.00%"


def test_the_bar_does_not_call_a_validation_loss_that_of_a_test(tmp_path):
    report = Report({**settings_of(tmp_path), "evaluate-on": "validation"})
    report.add(row(1, loss=2.0))
    assert "validation loss 2" in report.progress.tasks[0].fields["state"]


def test_what_is_printed_while_the_bar_is_on_a_terminal(tmp_path, monkeypatch):
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


def test_a_damaged_summary_is_replaced(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "summary.json").write_text('{"algorithms": {"fedav')
    finished(tmp_path, "fedrep", 0.75)
    whole = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert list(whole["algorithms"]) == ["fedrep"]


def test_without_last_rounds_the_last_evaluated_is_the_result(tmp_path):
    report = Report(settings_of(tmp_path, evaluate_last=0))
    for number, accuracy in ((1, None), (2, 0.3), (3, 0.6), (4, None)):
        more = {} if accuracy is None else {"evaluated": 2}
        report.add(row(number, accuracy, **more))
    assert report.finish({"a": {"accuracy": 0.6}})["accuracy"] == 0.6


def test_metrics_that_some_clients_lack_are_logged(tmp_path, caplog):
    # An AUC, say, where some have one class; a client without test examples has none.
    report = Report(settings_of(tmp_path))
    report.add(row(1, 0.5, evaluated=3, auc=0.75, f1=0.5))
    whole = {"accuracy": 0.5, "loss": 1.0, "f1": 0.5}
    clients = {"a": {**whole, "auc": 0.5}, "b": {**whole, "auc": 1.0}, "c": whole}
    report.finish({**clients, "d": {"num-examples": 3}})
    (line,) = caplog.messages
    assert "no value of 'auc' (2);" in line


def test_a_requested_metric_that_no_client_has_is_logged(tmp_path, caplog):
    report = Report(settings_of(tmp_path, metrics="f1, own.metrics:odd"))
    report.add(row(1, 0.5, evaluated=1, f1=0.5))
    report.finish({"a": {"accuracy": 0.5, "loss": 1.0, "f1": 0.5}})
    (line,) = caplog.messages
    assert "no value of 'odd' (0);" in line
