"""Real SuperLink and SuperNode processes on loopback, which are always terminated."""

import atexit
import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from deploy_commands import DEPLOY, ROOT, command

BIN = Path(sys.executable).parent
# Folder of a SuperExec that keeps torch loaded
WARM = DEPLOY / "warm"
MARK = "FRL_STARTED_BY"
REGISTER = """
import sys
from pathlib import Path
from flwr.cli.app import app
for key in sys.argv[1:]:
    name = Path(key).stem
    app(["supernode", "register", key, "test", "--name", name], standalone_mode=False)
"""


# Below the ephemeral ports of the system, and different in each test process, so that
# no other program takes a port before it is used.
PORTS = itertools.count(20_000 + os.getpid() % 120 * 100)


def free_port() -> int:
    """Return a port that is not in use; no two calls return the same."""
    for port in PORTS:
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return port
    raise AssertionError("there are infinitely many")


def wait_until(
    condition: Callable[[], bool], seconds: float, what: str, every: float = 0.1
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds} s for {what}")
        time.sleep(every)


def processes_with(setting: str, program: str = "") -> list[int]:
    """Return the ids of the processes with a setting in their environment."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        # Processes of other users are not readable, and some have just ended.
        with contextlib.suppress(OSError):
            settings = (process / "environ").read_bytes().split(b"\0")
            command = (process / "cmdline").read_bytes()
            if setting.encode() in settings and program.encode() in command:
                pids.append(int(process.name))
    return pids


def kill_9(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def environment_of(home: Path) -> dict[str, str]:
    """Return the environment of Flower's programs with a home of their own."""
    return {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        # SuperLink and SuperNode start their apps by name.
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }


class Federation:
    """A SuperLink and SuperNodes, each in its own process group.

    With ``nodes``, connections use TLS, and the SuperLink authenticates these nodes by
    their keys.
    """

    def __init__(self, home: Path, nodes: Sequence[str] = ()) -> None:
        self.home = home
        self.port = free_port()
        self.nodes = nodes
        self.keys = home / "keys"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {**environment_of(home / "flwr"), "OMP_NUM_THREADS": "1"}
        (home / "flwr").mkdir(parents=True)
        trust = "insecure = true"
        if nodes:
            self.make_keys(*nodes)
            trust = f'root-certificates = "{self.keys / "ca.crt"}"'
        (home / "flwr" / "config.toml").write_text(
            f'[superlink]\ndefault = "test"\n\n[superlink.test]\n'
            f'address = "127.0.0.1:{self.port}"\n{trust}\n'
        )

    def make_keys(self, *nodes: str) -> None:
        arguments = [self.keys, "--server", "127.0.0.1", "--node", *nodes]
        command(DEPLOY / "certificates.sh", *arguments, check=True)

    def flwr(self, *arguments: str) -> str:
        """Run a command of Flower and return its output."""
        result = command(BIN / "flwr", *arguments, seconds=120, env=self.environment)
        return result.stdout + result.stderr

    def start(self, name: str, *words: str, **settings: str) -> subprocess.Popen[bytes]:
        """Start a program of Flower; ``settings`` are added to its environment."""
        with (self.home / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [str(BIN / words[0]), *words[1:]],
                # Child processes inherit the mark.
                env={**self.environment, **settings, MARK: f"{self.home / name}"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes[name] = process
        return process

    def start_superlink(self, *options: str) -> None:
        trust = ["--insecure"]
        if self.nodes:
            files = {"ca-certfile": "ca.crt", "certfile": "server.crt"}
            files["keyfile"] = "server.key"
            trust = ["--enable-supernode-auth"]
            for option, name in files.items():
                trust += [f"--ssl-{option}", str(self.keys / name)]
        port = str(self.port)
        self.start("superlink", "flower-superlink", *trust, "--port", port, *options)
        # The first start in a new virtual environment compiles all modules.
        wait_until(self.listens, 240, "the SuperLink")

    def register(self) -> None:
        """Run ``flwr supernode register`` for all nodes, in a single process."""
        keys = [str(self.keys / "nodes" / f"{name}.pub") for name in self.nodes]
        words = (sys.executable, "-c", REGISTER, *keys)
        command(*words, seconds=120, check=True, env=self.environment)

    def listens(self) -> bool:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.port), timeout=1),
        ):
            return True
        return False

    def start_supernode(
        self,
        name: str,
        node_config: str,
        *options: str,
        before: Sequence[str] = (),
        warm: bool = True,
        port: int = 0,
        program: Path = BIN / "flower-supernode",
    ) -> None:
        """Start a node; ``before`` is a prefix of its command, such as a wrapper.

        A ``warm`` node loads torch once; otherwise Flower starts each app in a new
        process, which loads it again. ``port`` is that of the SuperLink, or that of a
        proxy. The node finds Flower's other programs next to its ``program``.
        """
        if not options:
            options = ("--insecure",) if not self.nodes else self.credentials(name)
        path = f"{program.parent}{os.pathsep}{self.environment['PATH']}"
        link = ("--superlink", f"127.0.0.1:{port or self.port}")
        words = (str(program), *link, "--port", str(free_port()))
        path = f"{WARM}{os.pathsep}{path}" if warm else path
        node = ("--node-config", node_config)
        self.start(name, *before, *words, *node, *options, PATH=path)

    def credentials(self, name: str) -> tuple[str, ...]:
        key = ("--auth-supernode-private-key", str(self.keys / "nodes" / name))
        return ("--root-certificates", str(self.keys / "ca.crt"), *key)

    def run(self, app: Path, run_config: str, seconds: float) -> str:
        """Run an app, wait for its end, and return the log."""
        words = [BIN / "flwr", "run", app, "test", "--stream"]
        if run_config:
            words += ["--run-config", run_config]
        # Flower looks at every file below the folder in which it starts.
        where = {"env": self.environment, "cwd": self.home / "flwr"}
        result = command(*words, seconds=seconds, **where)
        return result.stdout + result.stderr

    def kill(self, name: str) -> None:
        """Kill a process and all of its descendants with SIGKILL."""
        process = self.processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        # Flower starts apps in separate sessions.
        for pid in self.started_by(name):
            kill_9(pid)

    def started_by(self, name: str, program: str = "") -> list[int]:
        """Return the ids of a process and of its descendants."""
        return processes_with(f"{MARK}={self.home / name}", program)

    def close(self) -> None:
        for name in list(self.processes):
            self.kill(name)
        for pid in processes_with(f"FLWR_HOME={self.home / 'flwr'}"):
            kill_9(pid)


@cache
def project() -> Path:
    """Return a copy of the files of the app, which ``flwr run`` builds in a second.

    Flower looks at every file below an app, such as the 80,000 of an environment in a
    checkout, which takes 6 s of CPU time.
    """
    copy = Path(tempfile.mkdtemp(prefix="flwr-frl-"))
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = settings["tool"]["flwr"]["app"]["fab-include"]
    for name in {
        "pyproject.toml",
        *(line.strip("/").split("/")[0] for line in included),
    }:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, copy)
    return copy


@contextlib.contextmanager
def local_flower(home: Path) -> Iterator[dict[str, str]]:
    """Yield the environment for ``flwr run . local``, with a separate SuperLink."""
    try:
        yield {
            **environment_of(home),
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
            "FLWR_LOCAL_CONTROL_API_PORT": str(free_port()),
        }
    finally:
        # The local SuperLink is a daemon.
        for pid in processes_with(f"FLWR_HOME={home}"):
            kill_9(pid)


def read_lines(path: Path) -> list[dict[str, object]]:
    if not path.is_file():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    # Devices may have different names from simulated clients.
    return [{n: v for n, v in row.items() if n != "client-metrics"} for row in rows]
