"""Missing optional packages are reported in one line with their extra."""

import logging
from importlib.util import find_spec

import pytest

from flwr_frl import running
from flwr_frl.common.settings import SettingsError, need, resolve
from flwr_frl.results import plot
from flwr_frl.strategies.grids.simulation import RayGrid
from flwr_frl.task.tasks import build_task


@pytest.fixture
def lean(monkeypatch):
    """Pretend that no extra is installed."""
    extras = {"ray", "sklearn", "matplotlib", "datasets"}
    lacking = lambda name: None if name in extras else find_spec(name)  # noqa: E731
    monkeypatch.setattr("flwr_frl.common.settings.find_spec", lacking)
    monkeypatch.setattr("flwr_frl.results.plot.find_spec", lacking)


@pytest.mark.parametrize(
    ("call", "package", "extra"),
    [
        (lambda: RayGrid(lambda message, context: message, 2), "ray", "simulation"),
        (lambda: build_task(resolve({}), 5), "sklearn", "simulation"),
        (lambda: build_task(resolve({"task": "hf:some/set"}), 5), "datasets", "hf"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    lean, tmp_path, monkeypatch, call, package, extra
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    need("json", "anything", "what is installed")
    with pytest.raises(SettingsError) as raised:
        call()
    line = f"needs the package {package!r}, which is missing: "
    assert str(raised.value).endswith(f"{line}pip install 'flwr-frl[{extra}]'")


def test_run_without_extras_lacks_only_the_plot(lean, tmp_path, caplog, figures):
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
    names = {path.name for path in tmp_path.iterdir()}
    assert {"fedrep", "summary.json", "report.html", "metrics.csv"} <= names
    assert "accuracy.png" not in names


def test_plot_is_drawn_if_matplotlib_is_installed(tmp_path):
    plot.plot(tmp_path, [])
    assert (tmp_path / "accuracy.png").is_file()
