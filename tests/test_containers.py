"""Container files agree with the units, the guide, Flower and the package.

Whether the containers work was checked by hand: ``benchmarks/results/containers.md``.
"""

import re
import shlex
import subprocess
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from flwr.common.config import parse_config_args
from flwr.supercore.cli.flower_superexec import _parse_args as superexec
from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink as superlink
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode as supernode
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
GUIDE = (DEPLOY / "README.md").read_text()


def services(name: str) -> dict[str, dict]:
    return yaml.safe_load((DEPLOY / f"compose.{name}.yml").read_text())["services"]


def instructions(word: str) -> list[str]:
    text = (DEPLOY / "Dockerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return re.findall(rf"^{word} +(.*)$", text, flags=re.MULTILINE)


SERVICES = {f"{f}.{n}": s for f in ("server", "device") for n, s in services(f).items()}
ARGUMENTS = {
    name: value
    for line in instructions("ARG")
    for name, value in (part.split("=") for part in shlex.split(line))
}
ENVIRONMENT = {
    name: value
    for line in instructions("ENV")
    for name, value in (part.split("=") for part in shlex.split(line))
}


@pytest.mark.parametrize("name", SERVICES)
def test_services_are_unprivileged_and_have_read_only_images(name):
    service = SERVICES[name]
    assert service["user"] == instructions("USER")[-1] == "10001:10001"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert (service["tmpfs"], service["init"]) == ("/tmp", True)
    assert service["restart"] == "always"
    assert "privileged" not in service


def test_volumes_with_keys_are_read_only():
    mounted = [v for s in SERVICES.values() for v in s["volumes"] if "/etc/" in v]
    assert len(mounted) == 4
    assert all(volume.endswith(":ro") for volume in mounted)


def test_the_code_of_runs_has_no_external_network_and_no_keys():
    device = services("device")
    assert device["superexec"]["networks"] == ["inside"]
    compose = yaml.safe_load((DEPLOY / "compose.device.yml").read_text())
    assert compose["networks"]["inside"] == {"internal": True}
    assert not any("/etc/flwr-frl" in v for v in device["superexec"]["volumes"])
    # The SuperNode is not reachable from outside, the SuperLink only from this machine.
    assert not any("ports" in service for service in device.values())
    published = {n: s["ports"] for n, s in services("server").items()}
    assert published == {
        "superlink": ["127.0.0.1:8000:8000"],
        "proxy": ["8443:8443"],
        "page": ["127.0.0.1:8765:8765"],
    }


def of_unit(name: str, parser) -> dict[str, object]:
    unit = (DEPLOY / f"{name}.service").read_text().replace("\\\n", " ")
    command = re.search(r"^ExecStart=\S+ (.*)$", unit, re.MULTILINE)[1]
    command = re.sub(r"\$\{(\w+)\}", r"$\1", command).replace("$SUPERLINK_PORT", "8000")
    return vars(parser().parse_args(command.split()))


def of_service(name: str, parser) -> dict[str, object]:
    command = [
        re.sub(r"\$\{(\w+)[^}]*\}", r"$\1", c) for c in SERVICES[name]["command"]
    ]
    return vars(parser().parse_args(command[1:]))


def test_the_superlink_has_the_arguments_of_its_unit():
    assert of_service("server.superlink", superlink) == {
        **of_unit("superlink", superlink),
        # The port is published on 127.0.0.1 only.
        "host": "0.0.0.0",
    }


def test_the_supernode_has_the_arguments_of_its_unit():
    assert of_service("device.supernode", supernode) == {
        **of_unit("supernode", supernode),
        "isolation": "process",
        "host": "0.0.0.0",
    }
    arguments = of_service("device.superexec", superexec)
    assert arguments["runtime_api_address"] == "supernode:9094"
    program = SERVICES["device.superexec"]["command"][0]
    assert (DEPLOY / Path(program).relative_to("/opt/flwr-frl/deploy")).is_file()


def test_environment_and_folders_are_those_of_the_units():
    for name, count in (("superlink", 2), ("supernode", 3)):
        unit = (DEPLOY / f"{name}.service").read_text()
        variables = re.findall(
            r"^Environment=((?!PATH|SUPERLINK).*)$", unit, re.MULTILINE
        )
        assert len(variables) == count
        assert (
            dict(line.split("=") for line in variables).items() <= ENVIRONMENT.items()
        )
    assert instructions("WORKDIR") == ["/opt/flwr-frl", "/var/lib/flwr-frl"]
    # Volumes are mounted on the folders that the image has created for its user.
    owned = {v.split(":")[1] for s in SERVICES.values() for v in s["volumes"]}
    assert {p for p in owned if p.startswith("/var")} == {
        "/var/lib/flwr-frl",
        "/var/lib/flwr-frl/results",
    }


def test_the_image_has_the_whole_package_and_allowed_versions():
    copied = {name for line in instructions("COPY") for name in line.split()[:-1]}
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    packages = {name.split("/")[0] for name in wheel["only-include"]}
    assert {*packages, "pyproject.toml", "README.md", "LICENSE"} <= copied
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == copied
    assert all((ROOT / name).exists() for name in copied)
    allowed = {
        r.name: r.specifier
        for r in map(Requirement, PROJECT["project"]["dependencies"])
    }
    for name in ("torch", "torchvision", "flwr"):
        assert ARGUMENTS[name.upper()] in allowed[name]
    assert ARGUMENTS["PYTHON"] == PROJECT["project"]["requires-python"].lstrip(">=")


def test_the_proxy_is_configured_as_in_the_guide():
    of_guide = re.search(r"```nginx\n(.*?)```", GUIDE, re.DOTALL)[1].splitlines()
    of_file = (DEPLOY / "proxy.conf").read_text().splitlines()
    ours = [line for line in of_file if not line.lstrip().startswith("#")]
    assert set(ours) - set(of_guide) == {
        "    resolver 127.0.0.11 valid=10s;",
        "    set $superlink https://superlink:8000;",
        "        proxy_pass $superlink;",
    }
    assert set(of_guide) - set(ours) == {"        proxy_pass https://127.0.0.1:8000;"}


def test_the_guide_uses_the_same_run_with_containers():
    runs = re.findall(
        r"--run-config '(algorithm.*?|\s+algorithm.*?)'\n", GUIDE, re.DOTALL
    )
    first, second = (parse_config_args([text]) for text in runs)
    assert first == second


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
    def healthy(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [DEPLOY / "healthy", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert healthy(f"{api}/health").returncode == 0
    ill = healthy(f"{api}/other")
    assert (ill.returncode, ill.stderr.count("\n")) == (1, 1)
    assert healthy("http://127.0.0.1:9/health").returncode == 1
    nothing = healthy()
    assert nothing.returncode == 2
    assert nothing.stderr == "error: give the URL of Flower's API\n"


def test_health_checks_use_addresses_of_the_services():
    asked = {
        n: s["healthcheck"]["test"] for n, s in SERVICES.items() if "healthcheck" in s
    }
    assert {name: test[2:] for name, test in asked.items()} == {
        "server.superlink": ["https://127.0.0.1:8000/health", "superlink"],
        "server.page": ["http://127.0.0.1:8765/"],
        "device.supernode": ["http://127.0.0.1:9094/health"],
        "device.superexec": ["http://supernode:9094/health"],
    }
    assert {test[1] for test in asked.values()} == {"/opt/flwr-frl/deploy/healthy"}
