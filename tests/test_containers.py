"""Container files agree with the units, Flower and the package.

Whether the containers work was checked by hand: ``benchmarks/results/containers.md``.
"""

import re
import shlex
import tomllib

import pytest
import yaml
from deploy_commands import DEPLOY, ROOT, command
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


def test_the_image_has_the_whole_package_and_allowed_versions():
    copied = {name for line in instructions("COPY") for name in line.split()[:-1]}
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    packages = {name.split("/")[0] for name in wheel["only-include"]}
    assert {*packages, "pyproject.toml", "README.md", "LICENSE"} <= copied
    assert all((ROOT / name).exists() for name in copied)
    pairs = [part for line in instructions("ARG") for part in shlex.split(line)]
    arguments = dict(pair.split("=") for pair in pairs)
    given = map(Requirement, PROJECT["project"]["dependencies"])
    allowed = {requirement.name: requirement.specifier for requirement in given}
    for name in ("torch", "torchvision", "flwr"):
        assert arguments[name.upper()] in allowed[name]


@pytest.mark.e2e
def test_the_health_check_reports_the_status_of_the_api():
    assert command(DEPLOY / "healthy", "http://127.0.0.1:9/health").returncode == 1
    nothing = command(DEPLOY / "healthy")
    assert (nothing.returncode, nothing.stderr.count("\n")) == (2, 1)
    asked = [s["healthcheck"]["test"] for s in SERVICES.values() if "healthcheck" in s]
    assert {test[1] for test in asked} == {"/opt/flwr-frl/deploy/healthy"}
