"""Emulate Docker for the files of deploy/, as far as a bare Debian can.

A Dockerfile becomes a folder, by debootstrap and by executing its lines. A service of a
compose file becomes a process in its own namespaces, by bubblewrap. Unsupported entries
end the program; nothing in the files is ignored silently. Used by ``containers.py``.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
# Packages that replace python:3.11-slim-bookworm, Docker's init and the proxy's image
PACKAGES = "python3,python3-venv,ca-certificates,tini,nginx-light"
# Environment variables with which pip reaches its index on this machine
SETTINGS = ("PIP_CERT", "PIP_INDEX_URL", "PIP_DEFAULT_TIMEOUT")
# Default command of the proxy's image
PROXY = ("nginx", "-e", "stderr", "-c", "/nginx.conf")
CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")
NGINX = """daemon off; pid /tmp/nginx.pid; error_log stderr; events {}
http { access_log off; client_body_temp_path /tmp/body; proxy_temp_path /tmp/proxy;
fastcgi_temp_path /tmp/fastcgi; uwsgi_temp_path /tmp/uwsgi; scgi_temp_path /tmp/scgi;
include /etc/nginx/conf.d/*.conf; }
"""


def call(*command: object, **more: Any) -> str:
    """Run a command; return its output, or exit with it if the command fails."""
    result = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, **more
    )
    if result.returncode:
        sys.exit(f"{shlex.join(map(str, command))}\n{result.stdout}{result.stderr}")
    return result.stdout


def megabytes(folder: Path) -> float:
    """Return the size of a folder on the disk."""
    return int(call("du", "-sk", folder).split()[0]) / 1000


class Image:
    """A root folder that is built from a Dockerfile."""

    def __init__(self, root: Path, arguments: dict[str, str]) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root, self.arguments = root, arguments
        self.environment: dict[str, str] = {}
        self.user, self.directory = "0:0", "/"
        self.layers: list[tuple[str, float, float]] = []

    def build(self, dockerfile: Path, again: bool = True) -> None:
        """Execute a Dockerfile; without ``again``, reuse the folder that it built."""
        text = re.sub(r"^\s*#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE)
        for line in text.replace("\\\n", "").splitlines():
            if not line.strip():
                continue
            word, rest = line.split(maxsplit=1)
            if word in ("FROM", "RUN", "COPY") and not again:
                continue
            started, before = time.monotonic(), megabytes(self.root)
            getattr(self, f"do_{word.lower()}")(rest.strip())
            took, size = time.monotonic() - started, megabytes(self.root) - before
            if word in ("FROM", "RUN", "COPY"):
                shown = " ".join(f"{word} {rest}".split())
                self.layers.append((shown, size, took))
                print(f"{size:8.1f} MB {took:6.1f} s  {shown[:90]}", flush=True)

    def do_from(self, rest: str) -> None:
        """Create a bare Debian, unless it exists."""
        if not (self.root / "etc").exists():
            call("debootstrap", "--variant=minbase", f"--include={PACKAGES}",
                 "bookworm", self.root)  # fmt: skip
        link = self.root / "usr/local/bin/python"
        link.unlink(missing_ok=True)
        link.symlink_to("/usr/bin/python3")
        (self.root / "nginx.conf").write_text(NGINX)

    def do_arg(self, rest: str) -> None:
        """Store the default values of build arguments."""
        for name, _, value in (part.partition("=") for part in shlex.split(rest)):
            self.arguments.setdefault(name, value)

    def do_env(self, rest: str) -> None:
        """Store environment variables for all commands."""
        self.environment |= dict(part.split("=", 1) for part in shlex.split(rest))

    def do_user(self, rest: str) -> None:
        """Store the user; compose files set their own."""
        self.user = rest

    def do_workdir(self, rest: str) -> None:
        """Create and store the working directory."""
        self.directory = rest
        (self.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def do_copy(self, rest: str) -> None:
        """Copy files from the checkout."""
        *sources, to = rest.split()
        place = self.root / self.directory.lstrip("/") / to
        for source in sources:
            ignored = shutil.ignore_patterns("__pycache__")
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place, ignore=ignored)
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / source, place)

    def do_run(self, rest: str) -> None:
        """Run a command as root, with the folder as its root directory."""
        pip = {name: os.environ[name] for name in SETTINGS if name in os.environ}
        paths = ("/etc/resolv.conf", "/etc/hosts", pip.get("PIP_CERT", "/etc/hosts"))
        settings = {**pip, **self.arguments, **self.environment}
        call("bwrap", "--bind", self.root, "/", "--proc", "/proc", "--dev", "/dev",
             *(part for path in paths for part in ("--ro-bind", path, path)),
             "--chdir", self.directory, "--cap-add", "ALL", "--clearenv",
             *(p for k, v in settings.items() for p in ("--setenv", k, v)),
             "/bin/sh", "-c", rest)  # fmt: skip


class Network:
    """Network namespaces of containers, and bridges in a namespace of their own."""

    def __init__(self) -> None:
        self.switch = f"frl{os.getpid()}"
        self.bridges: dict[str, int] = {}
        self.spaces: dict[str, dict[str, str]] = {}
        call("ip", "netns", "add", self.switch)

    def join(self, space: str, bridge: str) -> str:
        """Connect a namespace to a bridge, and return its address."""
        inside = f"{self.switch}-{space}"
        if space not in self.spaces:
            self.spaces[space] = {}
            call("ip", "netns", "add", inside)
            call("ip", "-n", inside, "link", "set", "lo", "up")
        if bridge not in self.bridges:
            self.bridges[bridge] = len(self.bridges)
            name = f"br{self.bridges[bridge]}"
            call("ip", "-n", self.switch, "link", "add", name, "type", "bridge")
            call("ip", "-n", self.switch, "link", "set", name, "up")
        number = self.bridges[bridge]
        port = f"v{sum(map(len, self.spaces.values()))}"
        address = f"10.77.{number}.{10 + len(self.spaces)}"
        call("ip", "-n", self.switch, "link", "add", port, "type", "veth",
             "peer", "name", f"eth{number}", "netns", inside)  # fmt: skip
        call("ip", "-n", self.switch, "link", "set", port, "up",
             "master", f"br{number}")  # fmt: skip
        call(
            "ip", "-n", inside, "address", "add", f"{address}/24", "dev", f"eth{number}"
        )
        call("ip", "-n", inside, "link", "set", f"eth{number}", "up")
        self.spaces[space][bridge] = address
        return address

    def close(self) -> None:
        """Delete all namespaces."""
        for space in self.spaces:
            call("ip", "netns", "delete", f"{self.switch}-{space}")
        call("ip", "netns", "delete", self.switch)


class Container:
    """A service of a compose file, in its own namespaces."""

    def __init__(
        self, image: Image, network: Network, home: Path, name: str,
        service: dict[str, Any], binds: dict[str, Path],
    ) -> None:  # fmt: skip
        self.image, self.network, self.home, self.name = image, network, home, name
        self.service, self.binds = service, binds
        self.starts, self.pid, self.closing = 0, 0, False
        self.process: subprocess.Popen[bytes] | None = None
        for unknown in set(service) - {
            "image", "build", "command", "volumes", "ports", "networks", "healthcheck",
            "restart", "user", "read_only", "tmpfs", "cap_drop", "security_opt", "init",
            "logging", "depends_on",
        }:  # fmt: skip
            sys.exit(f"{name}: {unknown} is not done here")

    def mounts(self) -> list[str]:
        """Return bubblewrap's arguments for the volumes."""
        found = []
        volumes = self.service.get("volumes", [])
        for volume in sorted(volumes, key=lambda volume: volume.split(":")[1]):
            source, target, *options = volume.split(":")
            if source in self.binds:
                path = self.binds[source]
            else:
                path = self.home / "volumes" / f"{self.name.split('.')[0]}-{source}"
                # A new volume is a copy of the image's folder, as in Docker.
                inside = self.image.root / target.lstrip("/")
                if not path.exists():
                    path.parent.mkdir(exist_ok=True)
                    call("cp", "--archive", inside, path)
            found += ["--ro-bind" if options == ["ro"] else "--bind", str(path), target]
        return found

    def as_user(self) -> list[str]:
        """Return a command that drops all privileges and sets the environment."""
        user = self.service["user"].split(":")
        settings = [f"{k}={v}" for k, v in self.image.environment.items()]
        return [
            "/usr/bin/setpriv", f"--reuid={user[0]}", f"--regid={user[1]}",
            "--clear-groups", "--bounding-set=-all", "--inh-caps=-all",
            "--no-new-privs", "/usr/bin/env", "-i", "-C", self.image.directory,
            *settings,
        ]  # fmt: skip

    def start(self) -> None:
        """Start the service once."""
        assert self.service["read_only"]
        assert self.service["cap_drop"] == ["ALL"]
        names = self.home / f"{self.name}.hosts"
        (self.home / "resolv.conf").write_text("nameserver 127.0.0.11\n")
        log = (self.home / f"{self.name}.log").open("ab")
        traced = ["strace", "-f", "-qq", "-e", "trace=%file", "-e", "status=failed",
                  "-o", f"{self.home / self.name}.strace.{self.starts}"]  # fmt: skip
        read, wrote = os.pipe()
        command = [
            *traced,
            "ip", "netns", "exec", f"{self.network.switch}-{self.name}",
            "bwrap", "--unshare-pid", "--as-pid-1", "--unshare-ipc", "--unshare-uts",
            "--info-fd", str(wrote), "--die-with-parent",
            *(part for name in CAPABILITIES for part in ("--cap-add", name)),
            "--bind", str(self.image.root), "/", "--proc", "/proc", "--dev", "/dev",
            "--perms", "1777", "--tmpfs", self.service["tmpfs"],
            *self.mounts(),
            "--ro-bind", str(names), "/etc/hosts",
            "--ro-bind", str(self.home / "resolv.conf"), "/etc/resolv.conf",
            "--remount-ro", "/",
            *self.as_user(), "/usr/bin/tini", "--",
            *map(str, self.service.get("command", PROXY)),
        ]  # fmt: skip
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, pass_fds=[wrote]
        )
        os.close(wrote)
        text = b""
        # strace keeps the other end open, so the pipe has no end of file.
        while not text.endswith(b"}\n"):
            text += os.read(read, 1000)
        os.close(read)
        self.pid = json.loads(text)["child-pid"]
        self.process, self.starts = process, self.starts + 1

    def keep(self) -> None:
        """Restart the service as ``restart: always`` does, until it is closed."""
        assert self.service["restart"] == "always"
        while not self.closing:
            self.start()
            self.process.wait()
            time.sleep(1)

    def exec(self, *command: str, **more: Any) -> subprocess.CompletedProcess[str]:
        """Run a command in the container, as ``docker compose exec`` does."""
        inside = ["nsenter", f"--target={self.pid}", "--mount", "--net", "--pid",
                  "--ipc", "--uts", *self.as_user(), *command]  # fmt: skip
        return subprocess.run(inside, capture_output=True, text=True, **more)

    def healthy(self) -> bool:
        """Return the result of the health check."""
        check = self.service.get("healthcheck")
        if check is None:
            return self.process.poll() is None
        return self.exec(*map(str, check["test"][1:])).returncode == 0

    def until_healthy(self) -> float:
        """Wait until the service is healthy; return the seconds this took."""
        started = time.monotonic()
        while not (self.process and self.healthy()):
            if time.monotonic() - started > 300:
                sys.exit(f"{self.name} is not healthy:\n" + self.log()[-3000:])
            time.sleep(1)
        return time.monotonic() - started

    def log(self) -> str:
        """Return the output of the service."""
        return (self.home / f"{self.name}.log").read_text(errors="replace")

    def close(self) -> None:
        """Stop the service for good."""
        self.closing = True
        if self.process:
            # It is process 1 of its namespace, so all others end with it.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.process.wait()


def names_of(network: Network, space: str) -> dict[str, str]:
    """Return the addresses of the services on a container's networks, by name."""
    return {
        other.split(".")[-1]: address
        for other, bridges in network.spaces.items()
        for bridge, address in bridges.items()
        if bridge in network.spaces[space]
    }


# Replaces Docker's name server at 127.0.0.11, for services with IPv4 addresses.
NAME_SERVER = """
import json, socket, sys
names = json.loads(sys.argv[1])
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.11", 53))
while True:
    asked, client = server.recvfrom(512)
    end = asked.index(b"\\0", 12) + 5
    address = names.get(asked[13 : end - 5].decode(errors="replace"))
    found = address is not None and asked[end - 3] == 1
    flags = b"\\x81\\x80" if address else b"\\x81\\x83"
    answer = asked[:2] + flags + bytes([0, 1, 0, found, 0, 0, 0, 0]) + asked[12:end]
    if found:
        answer += bytes([192, 12, 0, 1, 0, 1, 0, 0, 0, 5, 0, 4])
        answer += socket.inet_aton(address)
    server.sendto(answer, client)
"""


def interpolate(text: str, settings: dict[str, str]) -> str:
    """Substitute ``${NAME}``, ``${NAME:?…}`` and ``${NAME:-…}`` as compose does."""

    def value(match: re.Match[str]) -> str:
        default = match[3] if match[2] == ":-" else None
        found = settings.get(match[1], default)
        return sys.exit(f"{match[1]} is not set") if found is None else found

    return re.sub(r"\$\{(\w+)(:[-?])?([^}]*)\}", value, text)


def load(path: Path, settings: dict[str, str]) -> dict[str, Any]:
    """Return the services of a compose file."""

    def walk(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: walk(value) for key, value in part.items()}
        if isinstance(part, list):
            return [walk(value) for value in part]
        return interpolate(part, settings) if isinstance(part, str) else part

    return walk(yaml.safe_load(path.read_text()))["services"]
