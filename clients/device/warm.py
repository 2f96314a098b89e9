"""Flower's SuperExec with torch loaded once.

Run as ``python -m flwr_frl.clients.device.warm``.

A SuperNode starts a process of its own for each message, and that process spends its
first seconds (on a Raspberry Pi a quarter of a minute) on loading torch and Flower.
This SuperExec loads them before the first message comes, and each ClientApp is a fork
of it. What a message costs in isolation stays: a process of its own, which loads the
run's own code and nothing that another run has left.

It takes the arguments of ``flower-superexec``. A SuperNode finds that command by its
name, so ``deploy/warm`` before all else in the SuperNode's ``PATH`` is all it takes.
"""

import argparse
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable
from importlib import import_module

from flwr.supercore.cli import flower_superexec
from flwr.supercore.constant import TaskType
from flwr.supercore.exit import exit_handler
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResult
from flwr.supercore.tls import validate_and_resolve_root_certificates
from flwr.supernode.runtime.run_clientapp import run_clientapp

LOADED = ("flwr.clientapp", "flwr.client", "flwr.serverapp", "safetensors", "torch")
# A run brings its own version of these.
APP = ("clients", "strategies", "task")


class ForkingExecutor(SubprocessExecutor):
    """Runs each ClientApp in a fork of this process, anything else as Flower does."""

    def __init__(self) -> None:
        self.forks: set[int] = set()

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start the process that handles one message, and do not wait for it."""
        if spec.task_type is not TaskType.CLIENT_APP:
            return super().launch(spec)
        fork = os.fork()
        if fork == 0:
            in_child(lambda: run(spec))
        self.forks.add(fork)
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Collect those that have ended; called once a second."""
        for fork in list(self.forks):
            if os.waitpid(fork, os.WNOHANG)[0]:
                self.forks.remove(fork)


def run(spec: ExecutionSpec) -> None:
    """Handle one message, as ``flwr-clientapp`` does."""
    run_clientapp(
        runtime_api_address=spec.runtime_api_address,
        token=spec.token,
        insecure=spec.insecure,
        certificates=validate_and_resolve_root_certificates(
            spec.root_certificates_path, spec.insecure
        ),
        parent_pid=spec.parent_pid,
        runtime_dependency_install=spec.runtime_dependency_install,
    )


def in_child(work: Callable[[], None]) -> None:
    """Do something and end this process, which was forked, without any clean-up."""
    status = 1
    try:
        forget_the_parent()
        work()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            # Whatever happens: this must not become a second SuperExec.
            os._exit(status)


def forget_the_parent() -> None:
    """Make a fork what a new process would be."""
    # The parent's connections are not this process's to close.
    exit_handler.registered_exit_handlers.clear()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    for name in [name for name in sys.modules if name.partition(".")[0] in APP]:
        del sys.modules[name]
    # Or every message would draw the same noise; `random` sees to itself.
    random.seed()
    import_module("numpy").random.seed()
    import_module("torch").seed()


def main() -> None:
    """Load what every message needs, then be Flower's SuperExec."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--parent-pid", type=int)
    supernode = parser.parse_known_args()[0].parent_pid
    for name in LOADED:
        # One that cannot connect ends at once, and is started again and again.
        if supernode not in (None, os.getppid()):
            return
        import_module(name)
    vars(run_superexec)["get_executor"] = lambda *_, **__: ForkingExecutor()
    flower_superexec()


if __name__ == "__main__":
    main()
