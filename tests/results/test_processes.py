"""Parallel runs, each in its own process."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flwr_frl.results.processes import run_parallel, signals_as_ctrl_c

SCRIPT = """
import pathlib, signal, sys, time
from flwr_frl.results.processes import run_parallel
from flwr_frl.results.processes import signals_as_ctrl_c

FOLDER = pathlib.Path(sys.argv[1])

def work(number, seconds):
    import os
    path = FOLDER / str(number)
    try:
        path.write_text(f"{os.getpid()} ")
        time.sleep(seconds)
    except KeyboardInterrupt:
        # A checkpoint.
        time.sleep(1)
        path.write_text(path.read_text() + "written")
        raise
    path.write_text(path.read_text() + "done")

if __name__ == "__main__":
    # Also where the tests themselves run with nohup.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    times = [float(text) for text in sys.argv[2:]]
    with signals_as_ctrl_c():
        run_parallel(work, list(enumerate(times)), 2)
"""


def is_alive(process: int) -> bool:
    """Return whether a process is running; a zombie counts as dead."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False
    return "State:\tZ" not in status


def soon(is_so) -> bool:
    """Poll a condition for up to ten minutes, and return whether it became true."""
    for _ in range(12_000):
        if is_so():
            return True
        time.sleep(0.05)
    return False


class Command:
    """A command that runs jobs of the given durations in seconds, two at a time."""

    def __init__(self, folder: Path, *seconds: float) -> None:
        script, self.pids = folder / "script.py", folder / "pids"
        script.write_text(SCRIPT)
        self.pids.mkdir()
        self.first = subprocess.Popen(
            [sys.executable, str(script), str(self.pids), *map(str, seconds)],
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def said(self, number: int) -> list[str]:
        """Return a job's process ID and how it ended; empty if it has not started."""
        path = self.pids / str(number)
        return path.read_text().split() if path.is_file() else []

    def begun(self, *numbers: int) -> bool:
        """Wait for these jobs to start, and return whether they did."""
        return soon(lambda: all(self.said(number) for number in numbers))

    def gone(self) -> bool:
        """Wait for all processes of the command to end, and return whether they did."""
        runs = [int(self.said(int(p.name))[0]) for p in self.pids.iterdir()]
        return soon(lambda: not any(map(is_alive, [*runs, self.first.pid])))


@pytest.fixture
def command(tmp_path):
    commands: list[Command] = []

    def make(*seconds: float) -> Command:
        commands.append(Command(tmp_path, *seconds))
        return commands[-1]

    yield make
    for each in commands:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(each.first.pid, signal.SIGKILL)
        each.first.wait()


@pytest.mark.e2e
def test_killed_command_leaves_no_processes(command):
    killed = command(100, 100, 100)
    assert killed.begun(0, 1)
    killed.first.kill()
    assert killed.gone()
    assert not killed.said(2)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("send", "signals"),
    [
        (os.kill, [signal.SIGINT]),
        (os.kill, [signal.SIGTERM]),
        # SIGHUP is sent to all processes when a terminal closes.
        (os.killpg, [signal.SIGHUP, signal.SIGTERM]),
    ],
)
def test_signalled_command_writes_checkpoints_and_starts_no_jobs(
    command, send, signals
):
    ended = command(100, 100, 100, 100, 100)
    assert ended.begun(0, 1)
    for number in signals:
        send(ended.first.pid, number)
        time.sleep(0.2)
    assert ended.first.wait(60)
    assert [ended.said(i)[1] for i in (0, 1)] == ["written", "written"]
    assert not any(ended.said(i) for i in (2, 3, 4))
    assert ended.gone()


@pytest.mark.e2e
def test_results_have_the_order_of_the_items():
    assert run_parallel(divmod, [(7, 2), (9, 5), (3, 4)], 2) == [(3, 1), (1, 4), (0, 3)]


def test_second_ctrl_c_is_ignored_and_a_third_interrupts():
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with signals_as_ctrl_c():
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, former)
