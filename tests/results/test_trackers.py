"""A tracker receives all metrics, and a failing one does not affect the run."""

import pytest
from function_clients import grid_of
from inline_runs import rows_in
from named_tasks import dashed
from recorders import Failing, Recorder
from refusals import code_of

from flwr_frl.results.trackers import numbers
from flwr_frl.strategies.server_app import serve, server_settings


@pytest.fixture(autouse=True)
def _nothing_told():
    Recorder.told.clear()
    Failing.ended.clear()


def go(tmp_path, rounds=3, tracker="recorders:Recorder", **more):
    settings = {"output": str(tmp_path), "algorithm": "fedavg", "fraction-train": 1.0}
    settings |= {"num-server-rounds": rounds, "evaluate-every": 1, "tracker": tracker}
    return serve(grid_of(4), server_settings(settings | dashed(more)))


def failures(caplog) -> list[str]:
    return [line for line in caplog.messages if line.startswith("tracker ")]


def test_a_tracker_receives_all_calls_in_order(tmp_path):
    summary = go(tmp_path)
    (_, about), *rounds, (finished, result) = Recorder.told
    assert (about.algorithm, about.after) == ("fedavg", 0)
    assert about.directory == tmp_path / "fedavg"
    assert about.settings["num-server-rounds"] == 3
    assert rounds == [(row["round"], numbers(row)) for row in rows_in(tmp_path)]
    assert rounds[1][1]["accuracy"] == pytest.approx(0.15)
    assert (finished, result) == (True, numbers(summary))


def test_a_resumed_run_has_the_same_name(tmp_path):
    go(tmp_path)
    go(tmp_path, 5, resume=str(tmp_path))
    first, second = [call[1] for call in Recorder.told if call[0] == "start"]
    assert first.run == second.run != ""
    assert (first.after, second.after) == (0, 3)
    # Each run also has an end.
    rounds = [call[0] for call in Recorder.told if isinstance(call[0], int)]
    assert rounds == [1, 2, 3, True, 4, 5, True]


def test_a_stopped_run_is_ended_as_unfinished(tmp_path, monkeypatch):
    def stop(row):
        raise KeyboardInterrupt

    monkeypatch.setattr("flwr_frl.strategies.server.loop.describe", stop)
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path)
    assert Recorder.told[-1] == (False, {})


@pytest.mark.parametrize("where", ["init", "start", "add", "end"])
def test_a_failing_tracker_does_not_change_the_run(tmp_path, caplog, where):
    summary = go(tmp_path, tracker="recorders:Failing", tracker_uri=where)
    assert summary["rounds"] == len(rows_in(tmp_path)) == 3
    (line,) = failures(caplog)
    assert line.endswith(f"OSError: no {where} for anybody")
    ended = [("end", True)] if where == "end" else []
    assert Failing.ended == ended


def test_a_tracker_that_exits_does_not_end_a_run(tmp_path, caplog):
    assert go(tmp_path, tracker="recorders:Exiting")["rounds"] == 3
    assert failures(caplog)[0].endswith("SystemExit: 3")


@pytest.mark.parametrize("tracker", ["tensorbord", "nothing:Here", "json:dumps"])
def test_bad_input_is_refused_before_any_output(tmp_path, tracker):
    assert code_of(go, tmp_path / "out", tracker=tracker) == "tracker"
    assert not (tmp_path / "out").exists()
