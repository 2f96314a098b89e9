"""Runs on a Ray cluster of two nodes on one machine, each with its own folder."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from command_line import run
from deploy_commands import command
from federation import ROOT, free_port, kill_9, processes_with, read_lines, wait_until

START = (
    *(Path(sys.executable).with_name("ray"), "start", "--num-cpus", "1"),
    *("--object-store-memory", "80000000", "--disable-usage-stats"),
)
ENVIRONMENT = os.environ | {
    **{"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    **{"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4},
    # A process that hangs is aborted, and prints its tracebacks.
    "PYTHONFAULTHANDLER": "1",
}
COMMAND = ("fedrep", "--seed", "3", "--run-config")
COMMAND += ("evaluate-every=2 head-epochs=1 cohort='off'",)


def start(folder: Path, home: str, *arguments: str) -> str:
    """Start a Ray node with one core and a folder as its working directory.

    Ray writes its files to ``home``. In the default place, other runs would find the
    address of the cluster, and wait for it after it has ended.
    """
    folder.mkdir()
    environment = ENVIRONMENT | {"FRL_NODE": str(folder), "RAY_TMPDIR": home}
    where = {"cwd": folder, "env": environment}
    return command(*START, *arguments, seconds=180, check=True, **where).stdout


def numbers_of(output: Path) -> list[dict]:
    rows = read_lines(output / "fedrep" / "metrics.jsonl")
    return [{name: row[name] for name in row.keys() - {"seconds"}} for row in rows]


@pytest.fixture
def nodes(tmp_path):
    """Addresses and folders of a cluster of two nodes."""
    folders = tmp_path / "one", tmp_path / "two"
    port = free_port()
    address = f"127.0.0.1:{port}"
    # Paths of sockets must be short.
    home = tempfile.mkdtemp(prefix="ray-")
    try:
        head = "--head", "--include-dashboard", "false"
        start(folders[0], home, *head, "--port", str(port))
        start(folders[1], home, "--address", address)
        yield address, folders
    finally:
        for folder in folders:
            for pid in processes_with(f"FRL_NODE={folder}"):
                kill_9(pid)
        shutil.rmtree(home, ignore_errors=True)


def simulate(folder: Path, rounds: int, address: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    chosen = "--rounds", str(rounds), "--backend", "ray"
    return subprocess.Popen(
        [sys.executable, ROOT / "simulation.py", *COMMAND, *chosen],
        cwd=folder,
        env=ENVIRONMENT | {"RAY_ADDRESS": address},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )


def said_by(process: subprocess.Popen[str], seconds: float) -> str:
    """Return the standard error of a process, which must end within ``seconds``."""
    try:
        return process.communicate(timeout=seconds)[1]
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        output = process.communicate()[1]
    return pytest.fail(f"still there after {seconds:g} s:\n{output}")


@pytest.mark.e2e
def test_a_run_survives_a_node_that_dies_in_a_round(tmp_path, nodes):
    address, folders = nodes
    rounds = 40
    process = simulate(tmp_path / "cluster", rounds, address)
    metrics = tmp_path / "cluster" / "results" / "fedrep" / "metrics.jsonl"

    def made() -> int:
        return metrics.read_text().count("\n") if metrics.is_file() else 0

    def stands() -> bool:
        before = made()
        time.sleep(3)
        return made() == before

    # Both nodes must take part. One may start so late that the other would finish the
    # run alone, so the run is paused until both have workers.
    settings = [f"FRL_NODE={folder}" for folder in folders]
    try:
        wait_until(lambda: made() >= 3, 600, "three rounds")
        process.send_signal(signal.SIGSTOP)
        wait_until(
            lambda: all(processes_with(node, "ray::") for node in settings),
            600,
            "a worker on each node",
        )
        alone = made()
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: made() >= alone + 3, 600, "three rounds of both nodes")
        # Stopped workers keep the next round from ending, so that the node dies in it.
        for pid in processes_with(settings[1], "ray::"):
            os.kill(pid, signal.SIGSTOP)
        wait_until(stands, 600, "a round that a stopped worker holds")
        for pid in processes_with(settings[1]):
            kill_9(pid)
        assert made() < rounds
        output = said_by(process, 400)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert "Ray worker failed" in output
    assert run(tmp_path / "inline", *COMMAND, "--rounds", str(rounds)) == 0
    rows, expected = map(numbers_of, (metrics.parents[1], tmp_path / "inline"))
    for row, other in zip(rows, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-6, abs=1e-6)
    assert all(row["rejected"] == 0 for row in rows)


@pytest.mark.e2e
def test_an_address_that_does_not_respond_gives_a_one_line_error(tmp_path):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        # The server accepts connections, but never responds.
        server.listen()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        process = simulate(tmp_path / "out", 1, address)
        output = said_by(process, 200)
    assert process.returncode == 2
    line = f"RAY_ADDRESS is {address!r}, where no Ray cluster answers within 10 s; "
    errors = [text for text in output.splitlines() if text.startswith("error: ")]
    assert errors == [f"error: {line}expected HOST:PORT of one, or not be set"]
    assert "Traceback" not in output
    assert not (tmp_path / "out" / "results").exists()
