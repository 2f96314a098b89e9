"""Trackers receive all metrics, and a failing tracker does not affect the run."""

import threading

import pytest
from function_clients import grid_of
from inline_runs import kebab, rows_in
from recorders import Failing, Recorder

from flwr_frl.common.settings import SettingsError
from flwr_frl.results import trackers
from flwr_frl.results.trackers import Tracker, Trackers, numbers
from flwr_frl.strategies.server_app import run, server_settings


@pytest.fixture(autouse=True)
def _nothing_told():
    Recorder.told.clear()


def go(tmp_path, rounds=3, **more):
    settings = {"output": str(tmp_path), "algorithm": "fedavg", "fraction-train": 1.0}
    settings |= {"num-server-rounds": rounds, "evaluate-every": 1}
    return run(grid_of(4), server_settings(settings | kebab(more)))


def test_a_tracker_receives_all_calls_in_order(tmp_path):
    summary = go(tmp_path, tracker="recorders:Recorder")
    (_, about), *rounds, (finished, result, files) = Recorder.told
    assert (about.algorithm, about.after) == ("fedavg", 0)
    assert about.directory == tmp_path / "fedavg"
    assert about.settings["num-server-rounds"] == 3
    written = rows_in(tmp_path)
    assert rounds == [(row["round"], numbers(row)) for row in written]
    assert rounds[1][1]["accuracy"] == pytest.approx(0.15)
    assert finished
    assert result == numbers(summary)
    assert files == ["report.html"]


def test_a_resumed_run_has_the_same_name(tmp_path):
    go(tmp_path, tracker="recorders:Recorder")
    go(tmp_path, 5, tracker="recorders:Recorder", resume=str(tmp_path))
    first, second = [call[1] for call in Recorder.told if call[0] == "start"]
    assert first.run == second.run != ""
    assert (first.after, second.after) == (0, 3)
    assert [call[0] for call in Recorder.told if isinstance(call[0], int)][4:6] == [
        4,
        5,
    ]


def test_a_stopped_run_is_ended_as_unfinished(tmp_path, monkeypatch):
    def stop(watch):
        raise KeyboardInterrupt

    monkeypatch.setattr("flwr_frl.strategies.server.watch.Watch.after_round", stop)
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path, tracker="recorders:Recorder")
    assert Recorder.told[-1] == (False, {}, [])


def test_a_failing_tracker_does_not_change_the_run(tmp_path, caplog):
    plain = go(tmp_path / "plain")
    expected = rows_in(tmp_path / "plain")
    for where in ("init", "start", "add", "end"):
        caplog.clear()
        # The other tracker continues.
        Recorder.told.clear()
        names = "recorders:Failing, recorders:Recorder"
        summary = go(tmp_path / where, tracker=names, tracker_uri=f"{where},")
        assert summary.keys() == plain.keys()
        rows = rows_in(tmp_path / where)
        for row, other in zip(rows, expected, strict=True):
            assert {**row, "seconds": 0} == {**other, "seconds": 0}
        lines = [m for m in caplog.messages if m.startswith("tracker ")]
        (line,) = lines
        assert line.startswith("tracker 'recorders:Failing' failed")
        assert line.endswith(f"OSError: no {where} for anybody")
        assert len(Recorder.told) == 5


def test_a_tracker_that_fails_in_a_round_is_ended(tmp_path):
    Failing.ended.clear()
    for where in ("start", "add"):
        go(tmp_path / where, tracker="recorders:Failing", tracker_uri=where)
    assert Failing.ended == [("add", False, {}, [])]


def test_a_tracker_that_exits_does_not_end_the_run(tmp_path, caplog):
    assert go(tmp_path, tracker="recorders:Exiting")["rounds"] == 3
    assert "SystemExit: 3" in caplog.text


def test_a_hanging_tracker_does_not_delay_the_end_for_long(
    tmp_path, monkeypatch, caplog
):
    free = threading.Event()

    class Hanging(Tracker):
        def add(self, server_round, metrics):
            free.wait(60)

    monkeypatch.setattr(trackers, "PATIENCE", 0.05)
    monkeypatch.setattr(trackers, "load", lambda path, kind: Hanging)
    assert go(tmp_path, tracker="any:Hanging")["rounds"] == 3
    free.set()
    lines = [m for m in caplog.messages if m.startswith("tracker ")]
    assert len(lines) == 1
    assert lines[0].endswith("it has not ended within 0.05 s")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"tracker": "tensorbord"}, "unknown tracker 'tensorbord'; did you mean "),
        ({"tracker": "nothing:Here"}, "tracker 'nothing:Here' cannot be imported"),
        (
            {"tracker": "mlflow,wandb", "tracker-uri": "a"},
            "tracker-uri is 'a'; expected empty or a list of 2 addresses",
        ),
        ({"tracker-uri": "a"}, "tracker-uri is 'a'; expected empty"),
    ],
)
def test_bad_input_fails_with_one_line_before_any_output(tmp_path, given, line):
    with pytest.raises(SettingsError) as raised:
        go(tmp_path / "out", **given)
    assert str(raised.value).startswith(line)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_a_missing_package_is_named_with_its_extra(monkeypatch, name):
    monkeypatch.setattr("flwr_frl.common.settings.find_spec", lambda package: None)
    with pytest.raises(SettingsError, match=rf"pip install 'flwr-frl\[{name}\]'$"):
        Trackers(server_settings({"tracker": name}))


def test_numbers_drops_values_that_are_not_finite_numbers():
    row = {"a": 1, "b": 0.5, "c": None, "d": ["x"], "e": float("nan"), "f": True}
    assert numbers(row) == {"a": 1, "b": 0.5}
