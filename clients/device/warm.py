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
# Packages that each run provides in its own version.
APP = ("flwr_frl", "clients", "strategies", "task")


class ForkingExecutor(SubprocessExecutor):
    """Run each ClientApp in a fork of this process, other tasks as Flower does."""

    def __init__(self) -> None:
        self.forks: set[int] = set()

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start the process that handles one message without waiting for it."""
        if spec.task_type is not TaskType.CLIENT_APP:
            return super().launch(spec)
        fork = os.fork()
        if fork == 0:
            in_child(lambda: run(spec))
        self.forks.add(fork)
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Reap the forks that have ended; called once a second."""
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
    """Call ``work`` and exit this forked process without clean-up."""
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
            # Exit in any case, so that the fork never continues as a second SuperExec.
            os._exit(status)


def forget_the_parent() -> None:
    """Reset the inherited state of a fork to that of a new process."""
    # The handlers would close the parent's connections.
    exit_handler.registered_exit_handlers.clear()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    for name in [name for name in sys.modules if name.partition(".")[0] in APP]:
        del sys.modules[name]
    # Otherwise every message would draw the same noise.
    random.seed()
    import_module("numpy").random.seed()
    import_module("torch").seed()


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
    vars(run_superexec)["get_executor"] = lambda *_, **__: ForkingExecutor()
    flower_superexec()


if __name__ == "__main__":
    main()
