"""Simulation on Ray: same results as inline, dying workers, leftover processes."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from algorithm_runs import assert_same, run_tiny
from deploy_commands import command
from federation import ROOT, kill_9, processes_with, wait_until
from flwr.app import ConfigRecord, Message, RecordDict

from flwr_frl.clients.client_app import make_app
from flwr_frl.strategies.grids.simulation import RayGrid

GUEST = ROOT / "tests" / "guest"


@pytest.fixture(scope="module", autouse=True)
def one_ray_for_all_runs() -> Iterator[None]:
    """Share Ray's workers between the runs in this process, and stop them."""
    with pytest.MonkeyPatch.context() as patched:
        # The import path of all workers is fixed when the first of them starts.
        patched.syspath_prepend(str(GUEST))
        patched.setenv("PYTHONPATH", "")
        patched.setenv("RAY_DISABLE_DOCKER_CPU_WARNING", "1")
        patched.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        yield
        # Imported here, as these tests are also collected when they are deselected.
        import ray

        ray.shutdown()


def ray_grid(settings: dict) -> RayGrid:
    return RayGrid(make_app(settings), int(settings["num-clients"]))


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        # `test_contract.py` compares all algorithms; these have their own messages.
        *((name, {}) for name in ("scaffold", "flute", "fedfomo", "fedpac", "pfedhn")),
        *((name, {}) for name in ("representation-transfer", "choco-sgd", "fedbuff")),
        *((name, {}) for name in ("multi-task", "srpfl", "guest.algorithm:Guest")),
        ("fedrep", {"task": "linear"}),
        ("scaffold", {"secure_aggregation": True}),
        # Random compression, and a trigger that suppresses some messages
        ("squarm-sgd", {"compressor": "rand-k", "trigger": "0.5"}),
    ],
)
def test_ray_and_inline_give_the_same_results(algorithm, more):
    result = run_tiny(algorithm, grid=ray_grid, **more)
    expected = run_tiny(algorithm, **more)
    assert result.rows == expected.rows
    assert_same(result, expected)


INTRUDER = """
import sys
from pathlib import Path
import ray

ray.init(sys.argv[1], log_to_driver=False)

# The workers hold all cores.
@ray.remote(num_cpus=0)
def intrude():
    Path(sys.argv[2]).touch()

ray.get(intrude.remote())
"""


def address_of_ray() -> str:
    import ray

    RayGrid(lambda message, context: message, 1)
    return str(ray.get_runtime_context().gcs_address)


@pytest.mark.e2e
def test_a_process_without_the_token_cannot_run_code_in_the_workers(tmp_path):
    mark, address = tmp_path / "mark", address_of_ray()
    assert not [name for name in os.environ if name.startswith("RAY_AUTH_")]
    # Otherwise the intruder's Ray would look for loopback addresses on the network.
    reachable = {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_NUM_REDIS_GET_RETRIES": "1",
    }
    words = (sys.executable, "-c", INTRUDER, address, mark)
    result = command(*words, seconds=120, env=os.environ | reachable)
    assert "ConnectionError" in result.stderr
    assert not mark.exists()


@pytest.mark.e2e
def test_ray_listens_on_loopback_only():
    host, _, port = address_of_ray().rpartition(":")
    assert host == "127.0.0.1"
    socket.create_connection((host, int(port))).close()
    # This address reaches servers that listen on all interfaces.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", int(port)))


def exchange(grid: RayGrid, timeout: float | None = None) -> list[Message]:
    """Send a message to each node; return the replies."""
    messages = [Message(RecordDict(), n, "train") for n in grid.get_node_ids()]
    return list(grid.send_and_receive(messages, timeout=timeout))


@pytest.mark.e2e
def test_the_chunk_of_a_dead_worker_is_retried_once(tmp_path):
    marker = tmp_path / "marker"

    def client(message, context):
        if context.node_id == 7 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return Message(RecordDict(), reply_to=message)

    def always_dying(message, context):
        if context.node_id == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return Message(RecordDict(), reply_to=message)

    for app, failing in ((client, []), (always_dying, [7])):
        grid = RayGrid(app, 40)
        for _ in range(2):
            replies = exchange(grid)
            assert len(replies) == 40
            failed = [r.metadata.src_node_id for r in replies if r.has_error()]
            assert failed == failing


@pytest.mark.e2e
def test_replies_after_a_timeout_are_neither_awaited_nor_used(tmp_path):
    go, begun = tmp_path / "go", tmp_path / "begun"

    def client(message, context):
        with begun.open("a") as file:
            file.write(".")
        while not go.exists():
            time.sleep(0.05)
        before = context.state.config_records.get("own", {"answers": 0})["answers"]
        context.state["own"] = ConfigRecord({"answers": before + 1})
        return Message(RecordDict(), reply_to=message)

    grid = RayGrid(client, 40)

    def answers(timeout: float | None) -> tuple[int, set[int]]:
        replies = len(exchange(grid, timeout))
        states = [c.state.config_records["own"] for c in grid.contexts.values()]
        return replies, {own["answers"] for own in states}

    go.touch()
    assert answers(None) == (40, {1})
    go.unlink()
    assert answers(1.0) == (0, {1})
    go.touch()
    assert answers(None) == (40, {2})
    # In the second exchange, each worker finishes only the chunk that it had begun.
    assert len(begun.read_text()) < 3 * 40


@pytest.mark.e2e
def test_after_kill_9_workers_end(tmp_path):
    mark = f"FRL_RAY_TEST={tmp_path}"
    metrics = tmp_path / "results" / "fedavg" / "metrics.jsonl"
    words = ("simulation.py", "fedavg", "--rounds", "1000", "--backend", "ray")
    process = subprocess.Popen(
        [sys.executable, ROOT / words[0], *words[1:]],
        cwd=tmp_path,
        env=os.environ | {"FRL_RAY_TEST": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_until(lambda: metrics.is_file() and metrics.stat().st_size > 0, 200, "Ray")
        assert len(processes_with(mark, "ray::")) > 0
        process.kill()
        process.wait()
        wait_until(lambda: not processes_with(mark, "raylet"), 60, "the raylet")

        def workers() -> set[int]:
            # Ray's own agents may live on for a minute.
            every = processes_with(mark, "ray::")
            return {*every} - {*processes_with(mark, "Agent")}

        wait_until(lambda: not workers(), 60, "the workers")
    finally:
        for pid in processes_with(mark):
            kill_9(pid)
