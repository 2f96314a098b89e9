"""Missing optional packages are reported in one line with their extra."""

import logging

import pytest
from named_tasks import task_of
from refusals import assert_says, uninstall

from flwr_frl import running
from flwr_frl.common.errors import need
from flwr_frl.strategies import FedAvg
from flwr_frl.strategies.grids.simulation import RayGrid

PRIVATE = {"server_dp_noise": 1.0, "server_dp_clip": 2.0, "server_dp_delta": 1e-5}


@pytest.fixture
def lean(monkeypatch):
    """Pretend that no extra is installed."""
    packages = ("ray", "sklearn", "matplotlib", "huggingface_hub")
    uninstall(monkeypatch, *packages, "dp_accounting")


def test_a_missing_package_is_named_with_its_extra(lean, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    need("json", "anything", "what is installed")
    for call, package, extra in (
        (lambda: RayGrid(lambda message, context: message, 2), "ray", "simulation"),
        (lambda: task_of("digits", 5), "sklearn", "simulation"),
        (lambda: task_of("hf:some/set", 5), "huggingface_hub", "hf"),
        (lambda: FedAvg(**PRIVATE), "dp_accounting", "privacy"),
    ):
        line = f"needs the package {package!r}, which is missing: pip install "
        assert_says(f"{line}'flwr-frl[{extra}]'", call)


def test_run_without_extras_lacks_only_the_plot(lean, tmp_path, caplog, figures):
    caplog.set_level(logging.INFO, "flwr")
    settings = {"task": "linear", "clients": 3, "rounds": 2, "fraction": 1.0}
    run = running.simulate("fedrep", "inline", **settings, output=str(tmp_path))
    assert run.summary["rounds"] == 2
    assert "no accuracy.png: matplotlib is missing" in caplog.text
    names = {path.name for path in tmp_path.iterdir()}
    assert {"fedrep", "summary.json", "report.html"} <= names
    assert "accuracy.png" not in names
