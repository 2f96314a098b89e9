"""What a lean installation lacks is asked for in one line, with its extra."""

import logging
from importlib.util import find_spec

import pytest

from flwr_frl import running
from flwr_frl.strategies.grids.simulation import RayGrid
from flwr_frl.strategies.report import plot
from flwr_frl.task.settings import SettingsError, need, resolve
from flwr_frl.task.tasks import build_task


@pytest.fixture
def lean(monkeypatch):
    """As if none of the extras were installed."""
    extras = {"ray", "sklearn", "matplotlib", "datasets"}
    lacking = lambda name: None if name in extras else find_spec(name)  # noqa: E731
    monkeypatch.setattr("flwr_frl.task.allowed.find_spec", lacking)
    monkeypatch.setattr("flwr_frl.strategies.report.plot.find_spec", lacking)


def test_what_is_there_is_not_asked_for():
    need("json", "anything", "this")


def test_ray_is_asked_for(lean):
    with pytest.raises(SettingsError) as raised:
        RayGrid(lambda message, context: message, 2)
    assert str(raised.value) == (
        "backend 'ray' (not 'inline') needs the package 'ray', which is missing: "
        "pip install 'flwr-frl[simulation]'"
    )


def test_the_digits_are_asked_for(lean, tmp_path):
    with pytest.raises(SettingsError) as raised:
        build_task(resolve({"cache-dir": str(tmp_path)}), 5)
    assert str(raised.value) == (
        "the task 'digits' needs the package 'sklearn', which is missing: "
        "pip install 'flwr-frl[simulation]'"
    )


def test_data_sets_of_hugging_face_are_asked_for(lean, tmp_path):
    with pytest.raises(SettingsError) as raised:
        build_task(resolve({"task": "hf:some/set", "cache-dir": str(tmp_path)}), 5)
    assert str(raised.value) == (
        "the data set 'some/set' needs the package 'datasets', which is missing: "
        "pip install 'flwr-frl[hf]'"
    )


def test_a_run_without_them_lacks_the_plot_alone(lean, tmp_path, caplog, figures):
    caplog.set_level(logging.INFO, "flwr")
    run = running.simulate(
        *("fedrep", "inline"),
        task="linear",
        clients=3,
        rounds=2,
        fraction=1.0,
        output=str(tmp_path),
    )
    assert run.summary["rounds"] == 2
    text = "no accuracy.png: matplotlib is missing"
    assert text in caplog.text
    found = {path.name for path in tmp_path.iterdir()}
    assert {"fedrep", "summary.json", "report.html", "metrics.csv"} <= found
    assert "accuracy.png" not in found


def test_the_plot_is_drawn_where_matplotlib_is(tmp_path):
    plot.plot(tmp_path, [])
    assert (tmp_path / "accuracy.png").is_file()
