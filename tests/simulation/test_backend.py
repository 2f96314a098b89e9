"""The default backend of a run."""

import pytest
import torch

from flwr_frl import backend
from flwr_frl.running import check

SETTINGS = {"num-clients": 10, "num-server-rounds": 20, "fraction-train": 0.5}


@pytest.fixture
def settings(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(backend.os, "sched_getaffinity", lambda pid: {0, 1})
    overrides = {**SETTINGS, "model": "mlp-2", "output": str(tmp_path)}
    return {**check(["fedrep"], overrides, "auto"), "algorithm": "fedrep"}


def seconds_a_fit(monkeypatch, seconds):
    monkeypatch.setattr(backend, "fit_seconds", lambda settings: seconds)


def test_long_training_runs_on_ray_if_there_are_several_cores(monkeypatch, settings):
    seconds_a_fit(monkeypatch, 0.01)
    assert backend.choose_backend(settings) == "inline"
    seconds_a_fit(monkeypatch, 10.0)
    assert backend.choose_backend(settings) == "ray"
    # Workers cannot import classes of a script.
    custom = {**settings, "algorithm": "__main__:Mine"}
    assert backend.choose_backend(custom) == "inline"
    with monkeypatch.context() as patched:
        patched.setattr(backend, "find_spec", lambda name: None)
        assert backend.choose_backend(settings) == "inline"
    monkeypatch.setattr(backend.os, "sched_getaffinity", lambda pid: {0})
    assert backend.choose_backend(settings) == "inline"
    # As on macOS
    monkeypatch.delattr(backend.os, "sched_getaffinity")
    monkeypatch.setattr(backend.os, "cpu_count", lambda: 10)
    assert backend.usable_cores() == 10


def test_a_cluster_and_several_gpus_are_used(monkeypatch, settings):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    assert backend.choose_backend(settings) == "ray"
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(backend.torch.cuda, "device_count", lambda: 2)
    assert backend.choose_backend(settings) == "ray"


def test_measuring_a_step_does_not_change_later_random_numbers(settings):
    torch.manual_seed(0)
    state = torch.get_rng_state()
    assert 0 < backend.fit_seconds(settings) < 10
    assert torch.equal(torch.get_rng_state(), state)
