"""A Flower SuperExec that loads torch only once.

Run as ``python -m flwr_frl.clients.device.warm``.

A SuperNode starts a process for each message. That process spends its first seconds (15
on a Raspberry Pi) loading torch and Flower. This SuperExec loads them in advance and
forks a process for each ClientApp. Messages remain isolated: each process loads the
run's code and shares no state with other runs.

It accepts the arguments of ``flower-superexec``. A SuperNode looks that command up by
name, so it suffices that ``deploy/warm`` comes first in the SuperNode's ``PATH``.
"""

import argparse
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from logging import WARNING
from multiprocessing import get_context
from typing import Any

from flwr.common import log

LOADED = ("flwr.clientapp", "flwr.client", "flwr.serverapp", "safetensors", "torch")
# Packages that each run provides in its own version.
APP = ("flwr_frl", "clients", "strategies", "task")
# The command that a SuperExec starts for a message to a ClientApp.
CLIENT_APP = "flwr-clientapp"


class Forking(subprocess.Popen[Any]):
    """Start a process; for a ClientApp, fork this one instead."""

    def __init__(self, args: Any, *more: Any, **options: Any) -> None:
        if args[0] != CLIENT_APP or more or options:
            super().__init__(args, *more, **options)
            return
        # Reaps the forks that have ended, flushes the streams of a fork when it ends,
        # and never lets it continue as a second SuperExec.
        get_context("fork").Process(target=handle_message, args=(args,)).start()


def handle_message(arguments: list[str]) -> None:
    """Handle one message in a fork, as the command with these arguments does."""
    client_app = command(CLIENT_APP)
    # The handlers would close the parent's connections.
    exit_handlers().clear()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    for name in [name for name in sys.modules if name.partition(".")[0] in APP]:
        del sys.modules[name]
    # Otherwise every message would draw the same noise. Python's own generator starts
    # anew in each fork.
    import_module("numpy").random.seed()
    import_module("torch").seed()
    sys.argv = arguments
    client_app()


def command(name: str) -> Callable[[], Any]:
    """Return the function behind one of Flower's commands."""
    (entry,) = entry_points(group="console_scripts", name=name)
    function: Callable[[], Any] = entry.load()
    return function


def exit_handlers() -> list[Any]:
    """Return the functions that Flower calls when it exits; its API has no access."""
    module = import_module("flwr.supercore.exit.exit_handler")
    handlers: list[Any] = module.registered_exit_handlers
    return handlers


def main() -> None:
    """Load the libraries that every message needs, then run Flower's SuperExec."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--parent-pid", type=int)
    supernode = parser.parse_known_args()[0].parent_pid
    for name in LOADED:
        # Stop if the SuperNode has exited. One that cannot connect exits at once and is
        # restarted repeatedly.
        if supernode not in (None, os.getppid()):
            return
        import_module(name)
    # Otherwise a collection in a fork would copy the pages of all objects of torch.
    gc.collect()
    gc.freeze()
    try:
        exit_handlers()
        command(CLIENT_APP)
        vars(subprocess)["Popen"] = Forking
    except (ImportError, AttributeError, ValueError) as error:
        log(WARNING, "this release of Flower loads torch for each message: %s", error)
    command("flower-superexec")()


if __name__ == "__main__":
    main()
