"""Simulation on Ray: same results as inline, dying workers, leftover processes."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from algorithm_runs import assert_same, run_tiny
from deploy_commands import command
from federation import ROOT, kill_9, processes_with, wait_until

from flwr_frl.clients.client_app import make_app
from flwr_frl.common.settings import SettingsError
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
        # Random compression, and a trigger that suppresses some messages
        ("squarm-sgd", {"compressor": "rand-k", "trigger": "0.5"}),
    ],
)
def test_ray_and_inline_give_the_same_results(algorithm, more):
    result = run_tiny(algorithm, grid=ray_grid, **more)
    expected = run_tiny(algorithm, **more)
    assert result.rows == expected.rows
    assert_same(result, expected)


@pytest.mark.e2e
def test_workers_with_different_examples_end_the_run():
    with pytest.raises(SettingsError) as raised:
        run_tiny("fedrep", grid=ray_grid, task="guest.task:unseeded")
    assert raised.value.code == "other-examples"


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
    reachable = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
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


@pytest.mark.e2e
def test_a_run_on_ray_is_resumed_inline(tmp_path):
    more = {"evaluate_every": 1}
    run_tiny("fedrep", tmp_path, ray_grid, num_server_rounds=2, **more)
    resumed = run_tiny("fedrep", tmp_path, resume=str(tmp_path), **more)
    expected = run_tiny("fedrep", **more)
    assert resumed.rows == expected.rows
    assert_same(resumed, expected)


def script(folder: Path, text: str, *arguments: Path):
    """Run a script with its own Ray."""
    (folder / "script.py").write_text(text)
    where = {"cwd": folder, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    return command(sys.executable, "script.py", *arguments, seconds=300, **where)


DYING = """
import os, sys
from pathlib import Path
from flwr.app import Message, RecordDict
from flwr_frl.strategies.grids.simulation import RayGrid
from flwr_frl.common.settings import SettingsError

marker = Path(sys.argv[1])

def client_that_dies(always):
    def client(message, context):
        if context.node_id == 7 and (always or not marker.exists()):
            marker.touch()
            os.kill(os.getpid(), 9)
        return Message(RecordDict(), reply_to=message)

    return client

for always in (False, True):
    grid = RayGrid(client_that_dies(always), 40)
    for _ in range(2):
        messages = [Message(RecordDict(), n, "train") for n in grid.get_node_ids()]
        replies = grid.send_and_receive(messages)
        failed = sorted(r.metadata.src_node_id for r in replies if r.has_error())
        print(len(replies), failed)
"""


@pytest.mark.e2e
def test_the_chunk_of_a_dead_worker_is_retried_once(tmp_path):
    result = script(tmp_path, DYING, tmp_path / "marker")
    # Ray also writes to standard output.
    lines = [line for line in result.stdout.splitlines() if line.startswith("40 ")]
    assert lines == ["40 []", "40 []", "40 [7]", "40 [7]"], result.stderr


SLOW = """
import sys, time
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr_frl.strategies.grids.simulation import RayGrid
from flwr_frl.common.settings import SettingsError

go, begun = Path(sys.argv[1]), Path(sys.argv[2])

def client(message, context):
    with begun.open("a") as file:
        file.write(".")
    while not go.exists():
        time.sleep(0.05)
    before = context.state.config_records.get("own", {"answers": 0})["answers"]
    context.state["own"] = ConfigRecord({"answers": before + 1})
    return Message(RecordDict(), reply_to=message)

grid = RayGrid(client, 40)

def exchange(timeout):
    messages = [Message(RecordDict(), n, "train") for n in grid.get_node_ids()]
    replies = len(list(grid.send_and_receive(messages, timeout=timeout)))
    states = [c.state.config_records.get("own", {}) for c in grid.contexts.values()]
    print(f"{replies} replies", {own.get("answers", 0) for own in states})

go.touch()
exchange(None)
go.unlink()
exchange(1.0)
go.touch()
exchange(None)
"""


@pytest.mark.e2e
def test_replies_after_a_timeout_are_neither_awaited_nor_used(tmp_path):
    result = script(tmp_path, SLOW, tmp_path / "go", tmp_path / "begun")
    lines = [line for line in result.stdout.splitlines() if " replies " in line]
    assert lines == ["40 replies {1}", "0 replies {1}", "40 replies {2}"], result.stderr
    # In the second exchange, each worker finishes only the chunk that it had begun.
    assert len((tmp_path / "begun").read_text()) < 3 * 40


def simulate(folder: Path, rounds: int) -> subprocess.Popen[str]:
    chosen = "--rounds", str(rounds), "--backend", "ray"
    return subprocess.Popen(
        [sys.executable, ROOT / "simulation.py", "fedavg", *chosen],
        cwd=folder,
        env=os.environ | {"FRL_RAY_TEST": str(folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.e2e
def test_after_kill_9_workers_end(tmp_path):
    mark = f"FRL_RAY_TEST={tmp_path}"
    metrics = tmp_path / "results" / "fedavg" / "metrics.jsonl"
    process = simulate(tmp_path, 1000)
    try:
        wait_until(lambda: metrics.is_file() and metrics.stat().st_size > 0, 200, "Ray")
        assert len(processes_with(mark, "ray::")) > 0
        process.kill()
        process.wait()
        wait_until(lambda: not processes_with(mark, "raylet"), 60, "the raylet")
        _, errors = simulate(tmp_path, 1).communicate(timeout=300)
        assert "error" not in errors
    finally:
        for pid in processes_with(mark):
            kill_9(pid)
