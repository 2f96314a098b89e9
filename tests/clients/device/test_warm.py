"""A SuperExec that forks one process per message."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
from importlib import import_module

import numpy as np
import pytest
import torch
from flwr.supercore.exit import exit_handler

from flwr_frl.clients.device import warm

ARGUMENTS = ["flwr-clientapp", "--token", "x"]


def said_in_a_fork(monkeypatch, work) -> tuple[str, int]:
    """Run a function in place of a ClientApp; return its output and exit status."""
    reading, writing = os.pipe()
    client_app = lambda: os.write(writing, str(work()).encode())  # noqa: E731
    monkeypatch.setattr(warm, "command", {warm.CLIENT_APP: client_app}.get)
    warm.Forking(ARGUMENTS)
    (child,) = multiprocessing.process._children
    os.close(writing)
    with os.fdopen(reading) as stream:
        text = stream.read()
    child.join()
    return text, child.exitcode


def drawn() -> list[float]:
    return [random.random(), np.random.random(), torch.rand(1).item()]


def test_a_fork_reloads_our_code_but_not_torch(monkeypatch):
    import_module("flwr_frl.clients.base")

    def left() -> list[str]:
        tops = {name.partition(".")[0] for name in sys.modules}
        return sorted(tops & {"flwr_frl", "clients", "strategies", "task", "torch"})

    assert said_in_a_fork(monkeypatch, left) == ("['torch']", 0)
    assert "flwr_frl.clients.base" in sys.modules


def test_forks_draw_different_random_numbers(monkeypatch):
    (first, _), (second, _) = (said_in_a_fork(monkeypatch, drawn) for _ in range(2))
    for one, other in zip(eval(first), eval(second), strict=True):
        assert one != other


def test_a_fork_has_its_command_s_arguments_and_default_signal_handlers(monkeypatch):
    work = lambda: (sys.argv, signal.getsignal(signal.SIGTERM).name)  # noqa: E731
    assert said_in_a_fork(monkeypatch, work) == (str((ARGUMENTS, "SIG_DFL")), 0)


def test_a_fork_exits_with_the_status_of_its_work(monkeypatch):
    assert said_in_a_fork(monkeypatch, lambda: sys.exit(3)) == ("", 3)
    assert said_in_a_fork(monkeypatch, lambda: 1 / 0)[1] == 1


def test_other_commands_are_started_as_usual():
    assert warm.Forking([sys.executable, "-c", "exit(3)"]).wait() == 3


@pytest.mark.parametrize("alive", [True, False])
@pytest.mark.parametrize("known", [True, False])
def test_main_loads_and_forks_as_far_as_it_can(alive, known, monkeypatch, caplog):
    loaded = []
    load = lambda name: loaded.append(name) or exit_handler  # noqa: E731
    monkeypatch.setattr(warm, "import_module", load)
    # As in another release of Flower
    if not known:
        monkeypatch.delattr(exit_handler, "registered_exit_handlers")
    monkeypatch.setattr(warm, "command", lambda name: lambda: loaded.append(name))
    monkeypatch.setattr(subprocess, "Popen", subprocess.Popen)
    supernode = os.getppid() + (not alive)
    monkeypatch.setattr(sys, "argv", ["warm", "--parent-pid", str(supernode)])
    warm.main()
    ends = ["flwr.clientapp", "flower-superexec"] if alive else []
    assert loaded[:1] + loaded[-1:] == ends
    assert (subprocess.Popen is warm.Forking) is (alive and known)
    assert ("loads torch for each message" in caplog.text) is (alive and not known)
