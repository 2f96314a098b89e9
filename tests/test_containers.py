"""Container files agree with the units, Flower and the package.

Whether the containers work was checked by hand: ``benchmarks/results/containers.md``.
"""

import re
import shlex
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from deploy_commands import DEPLOY, ROOT, command
from flwr.supercore.cli.flower_superexec import _parse_args as superexec
from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink as superlink
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode as supernode
from packaging.requirements import Requirement

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def services(name: str) -> dict[str, dict]:
    return yaml.safe_load((DEPLOY / f"compose.{name}.yml").read_text())["services"]


def instructions(word: str) -> list[str]:
    text = (DEPLOY / "Dockerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return re.findall(rf"^{word} +(.*)$", text, flags=re.MULTILINE)


SERVICES = {f"{f}.{n}": s for f in ("server", "device") for n, s in services(f).items()}


@pytest.mark.parametrize("name", SERVICES)
def test_services_are_unprivileged_and_have_read_only_images_and_keys(name):
    service = SERVICES[name]
    assert service["user"] == instructions("USER")[-1] == "10001:10001"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service
    assert all(v.endswith(":ro") for v in service["volumes"] if "/etc/" in v)


def test_the_code_of_runs_has_no_external_network_and_no_keys():
    device = services("device")
    assert device["superexec"]["networks"] == ["inside"]
    compose = yaml.safe_load((DEPLOY / "compose.device.yml").read_text())
    assert compose["networks"]["inside"] == {"internal": True}
    assert not any("/etc/flwr-frl" in v for v in device["superexec"]["volumes"])
    # The SuperNode is not reachable from outside, the SuperLink only from this machine.
    assert not any("ports" in service for service in device.values())
    server = services("server")
    assert server.pop("proxy")["ports"] == ["8443:8443"]
    published = [port for service in server.values() for port in service["ports"]]
    assert all(port.startswith("127.0.0.1:") for port in published)


def of_unit(name: str, parser) -> dict[str, object]:
    unit = (DEPLOY / f"{name}.service").read_text().replace("\\\n", " ")
    line = re.search(r"^ExecStart=\S+ (.*)$", unit, re.MULTILINE)[1]
    line = re.sub(r"\$\{(\w+)\}", r"$\1", line).replace("$SUPERLINK_PORT", "8000")
    return vars(parser().parse_args(line.split()))


def of_service(name: str, parser) -> dict[str, object]:
    words = [re.sub(r"\$\{(\w+)[^}]*\}", r"$\1", c) for c in SERVICES[name]["command"]]
    return vars(parser().parse_args(words[1:]))


def test_services_have_the_arguments_of_the_units():
    # The port is published on 127.0.0.1 only.
    link = {**of_unit("superlink", superlink), "host": "0.0.0.0"}
    assert of_service("server.superlink", superlink) == link
    node = {**of_unit("supernode", supernode), "isolation": "process"}
    assert of_service("device.supernode", supernode) == {**node, "host": "0.0.0.0"}
    arguments = of_service("device.superexec", superexec)
    assert arguments["runtime_api_address"] == "supernode:9094"
    program = SERVICES["device.superexec"]["command"][0]
    assert (DEPLOY / Path(program).relative_to("/opt/flwr-frl/deploy")).is_file()


def test_the_image_has_the_whole_package_and_allowed_versions():
    copied = {name for line in instructions("COPY") for name in line.split()[:-1]}
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    packages = {name.split("/")[0] for name in wheel["only-include"]}
    assert {*packages, "pyproject.toml", "README.md", "LICENSE"} <= copied
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == copied
    assert all((ROOT / name).exists() for name in copied)
    pairs = [part for line in instructions("ARG") for part in shlex.split(line)]
    arguments = dict(pair.split("=") for pair in pairs)
    given = map(Requirement, PROJECT["project"]["dependencies"])
    allowed = {requirement.name: requirement.specifier for requirement in given}
    for name in ("torch", "torchvision", "flwr"):
        assert arguments[name.upper()] in allowed[name]
    assert arguments["PYTHON"] == PROJECT["project"]["requires-python"].lstrip(">=")


@pytest.fixture
def api():
    """The URL of an API that is healthy at /health and fails elsewhere."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/health" else 500)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.e2e
def test_the_health_check_reports_the_status_of_the_api(api):
    codes = {"/health": 0, "/other": 1}
    assert {p: command(DEPLOY / "healthy", api + p).returncode for p in codes} == codes
    assert command(DEPLOY / "healthy", "http://127.0.0.1:9/health").returncode == 1
    nothing = command(DEPLOY / "healthy")
    assert (nothing.returncode, nothing.stderr.count("\n")) == (2, 1)
    asked = [s["healthcheck"]["test"] for s in SERVICES.values() if "healthcheck" in s]
    assert {test[1] for test in asked} == {"/opt/flwr-frl/deploy/healthy"}
