"""Runs side by side, each in a process of its own."""

import subprocess
import sys
import time
from pathlib import Path

from strategies.server.parallel import side_by_side

SCRIPT = """
import os, pathlib, sys, time
from strategies.server.parallel import side_by_side

def work(folder, number):
    pathlib.Path(folder, str(number)).write_text(str(os.getpid()))
    time.sleep(120)

if __name__ == "__main__":
    side_by_side(work, [(sys.argv[1], i) for i in range(4)], 2)
"""


def is_alive(process: int) -> bool:
    """Return whether a process runs; a dead one may wait for somebody to ask."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False
    return "State:\tZ" not in status


def soon(is_so) -> bool:
    """Return whether something comes to be so within a minute."""
    for _ in range(1200):
        if is_so():
            return True
        time.sleep(0.05)
    return False


def test_nothing_stays_of_a_command_that_was_killed(tmp_path):
    script, folder = tmp_path / "script.py", tmp_path / "pids"
    script.write_text(SCRIPT)
    folder.mkdir()
    first = subprocess.Popen([sys.executable, str(script), str(folder)])
    written = [folder / "0", folder / "1"]
    try:
        assert soon(lambda: all(p.is_file() and p.read_text() for p in written))
    finally:
        first.kill()
        first.wait()
    assert soon(lambda: not any(is_alive(int(p.read_text())) for p in written))
    assert not (folder / "2").exists()


def test_results_have_the_order_of_the_items():
    assert side_by_side(divmod, [(7, 2), (9, 5), (3, 4)], 2) == [(3, 1), (1, 4), (0, 3)]
