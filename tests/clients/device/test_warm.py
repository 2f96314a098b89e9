"""A SuperExec that forks one process per message."""

import os
import random
import signal
import sys
from importlib import import_module

import numpy as np
import pytest
import torch

from flwr_frl.clients.device import warm
from flwr_frl.clients.device.warm import ForkingExecutor, in_child


def said_in_a_child(work) -> tuple[str, int]:
    """Run a function in a forked child; return its output and the exit status."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        in_child(lambda: os.write(writing, str(work()).encode()))
    os.close(writing)
    with os.fdopen(reading) as stream:
        text = stream.read()
    return text, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def drawn() -> list[float]:
    return [random.random(), np.random.random(), torch.rand(1).item()]


def test_a_fork_reloads_our_code_but_not_torch():
    import_module("flwr_frl.clients.base")
    assert "flwr_frl.clients.base" in sys.modules

    def left() -> list[str]:
        tops = {name.partition(".")[0] for name in sys.modules}
        return sorted(tops & {"flwr_frl", "clients", "strategies", "task", "torch"})

    assert said_in_a_child(left) == ("['torch']", 0)
    assert "flwr_frl.clients.base" in sys.modules


def test_forks_draw_different_random_numbers():
    (first, _), (second, _) = said_in_a_child(drawn), said_in_a_child(drawn)
    for one, other in zip(eval(first), eval(second), strict=True):
        assert one != other


def test_a_fork_has_default_signal_handlers():
    reading = said_in_a_child(lambda: signal.getsignal(signal.SIGTERM).name)
    assert reading == ("SIG_DFL", 0)


def test_a_fork_exits_with_the_status_of_its_work():
    assert said_in_a_child(lambda: sys.exit(3)) == ("", 3)
    assert said_in_a_child(lambda: 1 / 0)[1] == 1


def test_ended_forks_are_reaped():
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    executor = ForkingExecutor()
    executor.forks.add(child)
    executor.reconcile()
    assert not executor.forks
    with pytest.raises(ChildProcessError):
        os.waitpid(child, 0)


@pytest.mark.parametrize("alive", [True, False])
def test_nothing_is_loaded_for_a_supernode_that_has_ended(alive, monkeypatch):
    loaded = []
    monkeypatch.setattr(warm, "import_module", loaded.append)
    monkeypatch.setattr(warm, "flower_superexec", lambda: loaded.append("SuperExec"))
    supernode = os.getppid() + (not alive)
    monkeypatch.setattr(sys, "argv", ["warm", "--parent-pid", str(supernode)])
    monkeypatch.setitem(vars(warm.run_superexec), "get_executor", None)
    warm.main()
    assert loaded == ([*warm.LOADED, "SuperExec"] if alive else [])
