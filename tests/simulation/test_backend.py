"""The default backend of a run."""

import pytest

from flwr_frl import running
from flwr_frl.running import check, choose_backend

SETTINGS = {"num-clients": 10, "num-server-rounds": 40, "fraction-train": 0.5}


@pytest.fixture
def chosen(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(running.os, "sched_getaffinity", lambda pid: {0, 1})

    def choose(**more):
        own = {n.replace("_", "-"): v for n, v in more.items() if n != "algorithm"}
        overrides = {**SETTINGS, "output": str(tmp_path), **own}
        algorithm = more.get("algorithm", "fedrep")
        checked = check(["fedrep"], overrides, "auto")
        return choose_backend({**checked, "algorithm": algorithm})

    return choose


LARGE = {"model": "mlp"}


def test_large_models_run_on_ray_if_there_are_several_cores(monkeypatch, chosen):
    assert chosen(model="mlp-2") == "inline"
    assert chosen(**LARGE) == "ray"
    assert chosen(**LARGE, num_server_rounds=39) == "inline"
    # Workers cannot import classes of a script.
    assert chosen(**LARGE, algorithm="__main__:Mine") == "inline"
    with monkeypatch.context() as patched:
        patched.setattr(running, "find_spec", lambda name: None)
        assert chosen(**LARGE) == "inline"
    monkeypatch.setattr(running.os, "sched_getaffinity", lambda pid: {0})
    assert chosen(**LARGE) == "inline"
    # As on macOS
    monkeypatch.delattr(running.os, "sched_getaffinity")
    monkeypatch.setattr(running.os, "cpu_count", lambda: 10)
    assert chosen(**LARGE) == "ray"


def test_a_cluster_and_several_gpus_are_used(monkeypatch, chosen):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    assert chosen() == "ray"
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(running.torch.cuda, "device_count", lambda: 2)
    assert chosen() == "ray"
