"""Ray workers: their number, and recovery from failures. Ray itself is a fake."""

import itertools
import os
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest

from flwr_frl.common.settings import SettingsError
from flwr_frl.strategies.grids import ray_workers
from flwr_frl.strategies.grids.ray_workers import RayWorkers, shares


@pytest.mark.parametrize(
    ("device", "cores", "gpus", "expected"),
    [
        ("cpu", 16, 2, (16, 0.0)),
        ("auto", 16, 0, (16, 0.0)),
        ("auto", 16, 2, (8, 0.25)),
        ("cuda", 2, 1, (2, 0.25)),
        # Ray must not hide a GPU that is selected by its index.
        ("cuda:1", 16, 2, (4, 0.0)),
        ("mps", 8, 0, (4, 0.0)),
    ],
)
def test_workers_share_cores_and_gpus(device, cores, gpus, expected):
    assert shares(device, {"CPU": float(cores), "GPU": float(gpus)}) == expected


class DeadError(Exception):
    """Stands in for Ray's base class of errors."""


class Worker:
    """A fake worker. Whether it starts depends on the fake Ray."""

    names = itertools.count()

    def __init__(self) -> None:
        self.name = next(Worker.names)
        ready = SimpleNamespace(remote=lambda: ("ready", self))
        self.ready = SimpleNamespace(options=lambda max_task_retries: ready)


@pytest.fixture
def ray(monkeypatch):
    """A fake Ray with two cores; ``dead`` holds the workers that no longer respond."""
    dead: set[Worker] = set()

    def get(handle):
        if handle[1] in dead or fake.broken:
            raise DeadError("it has died\nof a missing module")

    actor_class = SimpleNamespace(remote=Worker)
    fake = SimpleNamespace(
        is_initialized=lambda: True,
        cluster_resources=lambda: {"CPU": 2.0},
        remote=lambda **_: lambda kind: actor_class,
        get=get,
        exceptions=SimpleNamespace(RayError=DeadError),
        dead=dead,
        kill=dead.add,
        broken=False,
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(ray_workers, "_pool", {})
    return fake


def hear(workers: RayWorkers) -> None:
    for handle in list(workers.starting):
        workers.welcome(handle)


def test_workers_become_idle_once_they_report_ready(ray):
    workers = RayWorkers(object, "cpu")
    assert (workers.count, workers.idle, len(workers.starting)) == (2, [], 2)
    hear(workers)
    assert len(workers.idle) == 2
    assert not workers.starting
    # The next run reuses these workers, and waits for them to respond again.
    same = RayWorkers(object, "cpu")
    assert set(same.starting.values()) == set(workers.idle)


def test_edited_module_replaces_the_workers(ray, monkeypatch, tmp_path):
    # Modules of other tests are left out, since their files may come and go.
    modules: dict[str, ModuleType] = {}
    places = {"prefix": sys.prefix, "base_prefix": sys.base_prefix}
    fake_sys = SimpleNamespace(modules=modules, **places)
    monkeypatch.setattr(ray_workers, "sys", fake_sys)
    monkeypatch.setattr(ray_workers, "_written", {})
    module, path = ModuleType("of_mine"), tmp_path / "of_mine.py"
    module.__file__ = str(path)
    path.write_text("x = 1")
    first = RayWorkers(object, "cpu")
    # The module is added after the workers have started, and they import it.
    modules["of_mine"] = module
    same = RayWorkers(object, "cpu")
    assert set(same.starting.values()) == set(first.starting.values())
    path.write_text("x = 2")
    os.utime(path, ns=(1, 1))
    new = set(RayWorkers(object, "cpu").starting.values())
    assert len(new) == 2
    assert ray.dead == set(first.starting.values())
    assert not new & ray.dead


def test_after_a_worker_died_the_idle_ones_are_checked_again(ray):
    workers = RayWorkers(object, "cpu")
    hear(workers)
    first, second = workers.idle
    workers.idle.remove(first)
    workers.await_restart(first)
    assert workers.idle == []
    hear(workers)
    assert set(workers.idle) == {first, second}


def test_failed_start_ends_the_run_and_the_next_run_starts_new_workers(ray):
    ray.broken = True
    workers = RayWorkers(object, "cpu")
    assert workers.patience() > 0
    hear(workers)
    with pytest.raises(SettingsError, match="no Ray worker starts: of a missing"):
        workers.patience()
    ray.broken = False
    again = RayWorkers(object, "cpu")
    hear(again)
    assert len(again.idle) == again.count == 2
    # If one of two workers is left, it is kept.
    left, lost = again.idle
    ray_workers._pool[2, 0.0].remove(lost)
    last = RayWorkers(object, "cpu")
    hear(last)
    assert left in last.idle
    assert len(last.idle) == 2


def test_waiting_for_the_first_worker_times_out(ray, monkeypatch):
    workers = RayWorkers(object, "cpu")
    began = ray_workers.time.monotonic()
    assert workers.patience() == pytest.approx(300, abs=5)
    clock = SimpleNamespace(monotonic=lambda: began + 301)
    monkeypatch.setattr(ray_workers, "time", clock)
    with pytest.raises(SettingsError, match="no Ray worker has started within 300 s"):
        workers.patience()


def test_worker_whose_work_is_ended_is_awaited(ray, monkeypatch):
    workers, killed = RayWorkers(object, "cpu"), []
    hear(workers)
    busy, free = workers.idle
    workers.idle.remove(busy)
    monkeypatch.setattr(ray, "kill", lambda *args, **how: killed.append((*args, how)))
    workers.restart([busy])
    assert killed == [(busy, {"no_restart": False})]
    assert set(workers.starting.values()) == {busy, free}


def test_workers_of_an_earlier_ray_session_are_not_reused(ray, monkeypatch):
    former = set(RayWorkers(object, "cpu").starting.values())
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray_workers, "_start_ray", lambda: None)
    assert not former & set(RayWorkers(object, "cpu").starting.values())


@pytest.mark.parametrize(
    ("address", "line"),
    [
        ("", "Ray does not start, without which there is --backend inline: The node"),
        ("auto", "RAY_ADDRESS is 'auto', where no Ray cluster answers: The node timed"),
    ],
)
def test_failed_start_of_ray_is_a_one_line_error(ray, monkeypatch, address, line):
    def init(*_, **__):
        raise Exception("The node timed out.\nIt may be busy.")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init, raising=False)
    monkeypatch.setattr(ray_workers, "_authentication", lambda **_: nullcontext())
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    with pytest.raises(SettingsError) as caught:
        RayWorkers(object, "cpu")
    assert str(caught.value).startswith(line)
    assert str(caught.value).endswith("It may be busy.")


MODE, TOKEN, PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


@pytest.mark.parametrize(
    ("starts_ray", "chosen", "added"),
    [
        (True, {}, {MODE, TOKEN}),
        (True, {TOKEN: "a" * 64}, {MODE}),
        (True, {PATH: "/a/file"}, {MODE}),
        (True, {MODE: "token"}, set()),
        (True, {MODE: "disabled"}, set()),
        (False, {}, set()),
        (False, {TOKEN: "a" * 64}, set()),
    ],
)
def test_authentication_settings_of_the_user_are_kept(
    monkeypatch, starts_ray, chosen, added
):
    for name in (MODE, TOKEN, PATH):
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)

    def present() -> dict[str, str]:
        return {n: os.environ[n] for n in (MODE, TOKEN, PATH) if n in os.environ}

    with ray_workers._authentication(starts_ray):
        within = present()
    assert within.keys() == chosen.keys() | added
    assert chosen.items() <= within.items()
    assert present() == chosen


def test_each_ray_session_has_a_new_token(monkeypatch):
    for name in (MODE, TOKEN, PATH):
        monkeypatch.delenv(name, raising=False)
    tokens = set()
    for _ in range(3):
        with ray_workers._authentication(starts_ray=True):
            tokens.add(os.environ[TOKEN])
    assert [len(token) for token in tokens] == [64] * 3
