"""Ray workers: their number, chunks, and recovery from failures. Ray is a fake."""

import os
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from flwr_frl.common.errors import ResourceError, SettingsError
from flwr_frl.strategies.grids import ray_workers
from flwr_frl.strategies.grids.ray_workers import resources_of_a_worker
from flwr_frl.strategies.grids.simulation import RayGrid, split


@pytest.mark.parametrize(
    ("device", "cores", "gpus", "expected"),
    [
        ("cpu", 16, 2, (16, 1, 0)),
        ("auto", 16, 0, (16, 1, 0)),
        ("auto", 16, 2, (8, 1, 0.25)),
        ("cuda", 2, 1, (2, 1, 0.25)),
        # Ray must not hide a GPU that is selected by its index.
        ("cuda:1", 16, 2, (4, 4, 0)),
        ("mps", 6, 0, (3, 2, 0)),
    ],
)
def test_workers_share_cores_and_gpus(device, cores, gpus, expected):
    resources = {"CPU": float(cores), "GPU": float(gpus)}
    count, share = resources_of_a_worker(device, resources)
    assert (count, share["num_cpus"], share["num_gpus"]) == expected


def by_worker(lengths: list[int], workers: int) -> list[int]:
    """Return the number of messages per worker if all messages take the same time."""
    loads = [0] * workers
    for length in lengths:
        loads[loads.index(min(loads))] += length
    return loads


@given(st.integers(0, 300), st.integers(1, 20), st.sampled_from([1, 4, 32]))
def test_chunks_preserve_the_order_and_balance_the_workers(number, workers, together):
    chunks = split(list(range(number)), workers, together)
    assert [m for chunk in chunks for m in chunk] == list(range(number))
    loads = by_worker([len(chunk) for chunk in chunks], workers)
    assert max(loads) == -(-number // workers)
    assert max(map(len, chunks), default=0) <= max(together, -(-number // workers))


class DeadError(Exception):
    """Stands in for Ray's base class of errors."""


class KilledError(BaseException):
    """Raised by a client whose worker dies."""


@pytest.fixture
def ray(monkeypatch):
    """A fake Ray with two cores, whose tasks run when their results are read."""
    tasks, cancelled = {}, []

    def remote(**options):
        def task(function):
            def start(*arguments):
                handle = object()
                tasks[handle] = function, arguments
                return handle

            return SimpleNamespace(remote=start)

        return task

    def get(handle, timeout=None):
        function, arguments = tasks.pop(handle)
        try:
            return function(*arguments)
        except KilledError:
            raise DeadError("it has died\nof a signal") from None

    fake = SimpleNamespace(
        __spec__="found",
        is_initialized=lambda: True,
        cluster_resources=lambda: {"CPU": 2.0},
        put=lambda value: value,
        remote=remote,
        wait=lambda handles, timeout: (handles[:1], handles[1:]),
        get=get,
        cancel=lambda handle, force: cancelled.append(handle),
        cancelled=cancelled,
        exceptions=SimpleNamespace(RayError=DeadError),
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


def send(grid: RayGrid, timeout: float | None = None) -> list[tuple[int, bool]]:
    """Return each reply's node, and whether it is an error."""
    messages = [Message(RecordDict(), node, "train") for node in grid.get_node_ids()]
    replies = grid.send_and_receive(messages, timeout=timeout)
    return [(reply.metadata.src_node_id, reply.has_error()) for reply in replies]


@pytest.mark.parametrize("always", [True, False])
def test_only_the_message_that_kills_its_worker_is_lost(ray, always) -> None:
    killed: list[int] = []

    def client(message, context):
        if context.node_id == 7 and (always or not killed):
            killed.append(7)
            raise KilledError
        context.state["own"] = ConfigRecord({"answers": 1})
        return Message(RecordDict(), reply_to=message)

    grid = RayGrid(client, 40)
    # The messages of its chunk are repeated one by one.
    assert send(grid) == [(node, always and node == 7) for node in range(1, 41)]
    assert len(killed) == (2 if always else 1)
    held = [context.node_id for context in grid.contexts_with_state()]
    assert held == [node for node in range(1, 41) if not (always and node == 7)]


def test_tasks_are_cancelled_after_a_timeout_or_an_interruption(ray) -> None:
    grid = RayGrid(lambda message, context: Message(RecordDict(), reply_to=message), 8)
    assert send(grid, timeout=0.0) == []
    assert len(ray.cancelled) == 8

    def interrupt(handles, timeout):
        raise KeyboardInterrupt

    ray.wait = interrupt
    with pytest.raises(KeyboardInterrupt):
        send(grid)
    assert len(ray.cancelled) == 16


def test_lack_of_resources_ends_the_run(ray) -> None:
    error = DeadError("the task failed")
    error.cause = ResourceError("out of memory; lower batch-size")
    grid = RayGrid(lambda message, context: Message(RecordDict(), reply_to=message), 2)

    def get(handle, timeout=None):
        raise error

    ray.get = get
    with pytest.raises(ResourceError, match="out of memory"):
        send(grid)


def test_worker_that_cannot_start_is_a_one_line_error(ray) -> None:
    def get(handle, timeout=None):
        raise DeadError("it has died\nof a missing module")

    ray.get = get
    with pytest.raises(SettingsError, match=r"^no Ray worker starts: of"):
        RayGrid(lambda message, context: message, 2)


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

    ray.is_initialized, ray.init = lambda: False, init
    monkeypatch.setattr(ray_workers, "_authentication", lambda **_: nullcontext())
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    with pytest.raises(SettingsError) as caught:
        ray_workers.start_ray()
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

    tokens = set()
    for _ in range(2):
        with ray_workers._authentication(starts_ray):
            within = present()
        assert within.keys() == chosen.keys() | added
        assert chosen.items() <= within.items()
        assert present() == chosen
        tokens.add(within.get(TOKEN))
    # Each session has a new token.
    assert len(tokens) == (2 if TOKEN in added else 1)
