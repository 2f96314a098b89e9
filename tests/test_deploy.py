"""The folder deploy/: certificates, systemd units and the watchdog."""

import hashlib
import re
import shutil
import sys
from pathlib import Path

import pytest
from deploy_commands import DEPLOY, command

SCRIPT = DEPLOY / "certificates.sh"


def contents(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def names_of(certificate: Path) -> str:
    text = command("openssl", "x509", "-in", certificate, "-noout", "-text").stdout
    return re.search(r"Alternative Name: \n\s*(.*)", text)[1]


# Certificates


needs_tools = pytest.mark.skipif(
    not (shutil.which("openssl") and shutil.which("ssh-keygen")),
    reason="openssl and ssh-keygen are not installed",
)


@pytest.fixture
def made(tmp_path):
    arguments = ["--server", "link.example", "192.0.2.7", "--node", "pi-1", "pi-2"]
    result = command(SCRIPT, tmp_path / "keys", *arguments, check=True)
    assert result.stderr == ""
    return tmp_path / "keys"


@needs_tools
def test_certificates_are_valid_and_private_keys_are_private(made):
    ca, server = made / "ca.crt", made / "server.crt"
    check = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver"]
    for name in ("-verify_hostname=link.example", "-verify_hostname=localhost"):
        option, value = name.split("=")
        result = command(*check, option, value, "-CAfile", ca, server)
        assert result.returncode == 0, result.stderr
    for address in ("192.0.2.7", "127.0.0.1"):
        result = command(*check, "-verify_ip", address, "-CAfile", ca, server)
        assert result.returncode == 0, result.stderr
    # Negative control: the certificate is not valid for another host name.
    wrong = command(*check, "-verify_hostname", "other.example", "-CAfile", ca, server)
    assert wrong.returncode != 0
    modes = {
        str(p.relative_to(made)): p.stat().st_mode & 0o777 for p in made.rglob("*")
    }
    private = ["ca.key", "server.key", "nodes/pi-1", "nodes/pi-2"]
    assert {name: modes[name] for name in private} == dict.fromkeys(private, 0o600)
    public = ["ca.crt", "server.crt", "nodes/pi-1.pub"]
    assert {name: modes[name] for name in public} == dict.fromkeys(public, 0o644)
    assert made.stat().st_mode & 0o777 == 0o700
    # No unfinished files are left.
    assert not [name for name in modes if "partial" in name]


@needs_tools
def test_node_keys_have_the_format_of_flower(made):
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        load_ssh_private_key,
        load_ssh_public_key,
    )

    private = load_ssh_private_key((made / "nodes" / "pi-1").read_bytes(), None)
    public = load_ssh_public_key((made / "nodes" / "pi-1.pub").read_bytes())
    assert isinstance(private.curve, ec.SECP384R1)
    assert private.public_key() == public
    assert (made / "nodes" / "pi-1.pub").read_text().split()[-1] == "pi-1"


@needs_tools
def test_a_second_run_changes_nothing(made):
    before = contents(made)
    arguments = ["--server", "link.example", "192.0.2.7", "--node", "pi-1", "pi-2"]
    result = command(SCRIPT, made, *arguments, check=True)
    assert contents(made) == before
    assert result.stdout.splitlines() == [
        "ca.crt: kept",
        "server.crt: kept",
        "nodes/pi-1: kept",
        "nodes/pi-2: kept",
    ]


@needs_tools
def test_new_names_and_nodes_do_not_change_the_ca_and_other_keys(made):
    before = contents(made)
    command(SCRIPT, made, "--server", "new.example", "--node", "pi-3", check=True)
    after = contents(made)
    changed = {name for name in after if before.get(name) != after[name]}
    assert changed == {
        "server.crt",
        "server.key",
        "server.names",
        "nodes/pi-3",
        "nodes/pi-3.pub",
    }
    assert "DNS:new.example" in names_of(made / "server.crt")
    result = command(
        "openssl", "verify", "-CAfile", made / "ca.crt", made / "server.crt"
    )
    assert result.returncode == 0


@needs_tools
def test_the_ca_key_can_be_stored_elsewhere(made, tmp_path):
    (made / "ca.key").rename(tmp_path / "safe")
    command(SCRIPT, made, "--node", "pi-9", check=True)
    before = contents(made)
    result = command(SCRIPT, made, "--server", "new.example")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "no ca.key in" in result.stderr
    # A new CA would lock out all devices.
    assert contents(made) == before


@needs_tools
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no DIR; expected the first argument"),
        (["{dir}"], "nothing to make; give --server or --node"),
        (["{dir}", "more", "--node", "a"], "what is 'more'? one DIR is allowed"),
        (
            ["{dir}", "--nodes", "a"],
            "unknown option '--nodes'; known: --server, --node",
        ),
        (["{dir}", "--server", "a b"], "server 'a b' must be a host name or an IP"),
        (["{dir}", "--server", "x,IP:1.2.3.4"], "server 'x,IP:1.2.3.4' is no IP"),
        (["{dir}", "--node", "../x"], "node '../x' must be of letters"),
        (["{dir}", "--node", "x.pub"], "node 'x.pub' must be of letters"),
    ],
)
def test_bad_input_gives_a_one_line_error_and_no_files(arguments, message, tmp_path):
    formatted = [argument.format(dir=tmp_path / "keys") for argument in arguments]
    result = command(SCRIPT, *formatted)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_script_is_valid_and_executable():
    assert command("bash", "-n", SCRIPT).returncode == 0
    assert SCRIPT.stat().st_mode & 0o111


# systemd units


def options_in(text: str, program: str) -> set[str]:
    joined = text.replace("\\\n", " ")
    lines = [line for line in joined.splitlines() if program in line]
    return {option for line in lines for option in re.findall(r" (--[a-z-]+)", line)}


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["superlink", "supernode"])
def test_units_use_options_that_exist(name):
    unit = (DEPLOY / f"{name}.service").read_text()
    used = options_in(unit, f"flower-{name}")
    assert len(used) > 3
    program = Path(sys.executable).parent / f"flower-{name}"
    existing = set(re.findall(r"--[a-z-]+", command(program, "--help").stdout))
    assert used <= existing
    assert "Restart=always" in unit
    # A refused SuperNode must not retry too often. Flower ends its former session after
    # a minute.
    assert int(re.search(r"RestartSec=(\d+)", unit)[1]) >= 15


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")
@pytest.mark.parametrize("name", ["superlink", "supernode"])
def test_systemd_accepts_the_units(name, tmp_path):
    unit = (DEPLOY / f"{name}.service").read_text()
    here = str(Path(sys.executable).parent)
    path = tmp_path / f"{name}.service"
    path.write_text(unit.replace("/opt/flwr-frl/.venv/bin", here))
    result = command("systemd-analyze", "verify", "--man=no", path)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


# The watchdog


# Log of a SuperNode after its SuperLink's database had been locked for 35 s
LOST = """\x1b[91mERROR \x1b[0m:     Server error '500 Internal Server Error' for url \
'https://127.0.0.1:8000/v1/fleet/pull-messages'
For more information check: https://developer.mozilla.org/en-US/docs/Web/HTTP/Status/500
"""


PASSED = """\x1b[91mERROR \x1b[0m:     Failed to receive message 1: Server error '500 …'
\x1b[92mINFO \x1b[0m:      Received successfully
"""


HEARTBEAT = "Exception in thread Thread-2 (_run):\nTraceback (most recent call last):\n"


NODE_EXEC = "python -P -m flwr_frl.clients.device.warm --insecure --parent-pid 4711"


LINK_EXEC = "flower-superexec --parent-pid 4711 --root-certificates x"


RUNS = "flwr-serverapp --parent-pid 4712"


FAKES = {
    "systemctl": """case "$*" in
        restart*) echo "$2" >>"$HERE/restarted";;
        *ActiveState*) cat "$HERE/state";;
        *MainPID*) echo 4711;;
        *InvocationID*) echo abc;;
        *) exit 1;;
    esac""",
    "ps": 'cat "$HERE/age"',
    "pgrep": 'shift; [ "$1" != -- ] || shift; grep -Eqe "$1" "$HERE/processes"',
    "journalctl": """case "$*" in
        *_SYSTEMD_INVOCATION_ID=abc) cat "$HERE/log";;
        *) exit 1;;
    esac""",
}


@pytest.fixture(scope="module")
def fakes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bin")
    for name, body in FAKES.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("unit", "processes", "log", "said"),
    [
        ("supernode", NODE_EXEC, "", ""),
        ("supernode", NODE_EXEC, PASSED, ""),
        ("supernode", NODE_EXEC, LOST, "it has lost the SuperLink for good; restarted"),
        (
            "supernode",
            NODE_EXEC,
            HEARTBEAT,
            "it has lost the SuperLink for good; restarted",
        ),
        ("supernode", "", PASSED, "its SuperExec has died; restarted"),
        # The SuperExec of another SuperNode
        ("supernode", NODE_EXEC + "2", "", "its SuperExec has died; restarted"),
        ("superlink", LINK_EXEC, LOST, ""),
        ("superlink", f"{LINK_EXEC}\n{RUNS}", "", ""),
        ("superlink", "", "", "its SuperExec has died; restarted"),
        (
            "superlink",
            RUNS,
            "",
            "its SuperExec has died; it is restarted when its run has ended",
        ),
    ],
)
def test_the_watchdog_restarts_units_that_cannot_recover(
    unit, processes, log, said, fakes, tmp_path
):
    files = {"state": "active", "age": "61", "processes": processes, "log": log}
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    environment = {"PATH": f"{fakes}:/usr/bin:/bin", "HERE": str(tmp_path)}
    result = command(DEPLOY / "watchdog", unit, env=environment)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == (f"{unit}: {said}\n" if said else "")
    restarted = tmp_path / "restarted"
    units = restarted.read_text() if restarted.exists() else ""
    assert units == (f"{unit}\n" if said.endswith("; restarted") else "")


@pytest.mark.parametrize(("state", "age"), [("activating", "99"), ("active", " 59")])
def test_the_watchdog_ignores_units_that_have_just_started(state, age, fakes, tmp_path):
    for name, text in (("state", state), ("age", age), ("processes", "")):
        (tmp_path / name).write_text(f"{text}\n")
    environment = {"PATH": f"{fakes}:/usr/bin:/bin", "HERE": str(tmp_path)}
    result = command(DEPLOY / "watchdog", "supernode", env=environment)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_the_watchdog_without_a_unit_gives_a_one_line_error():
    result = command(DEPLOY / "watchdog")
    assert result.returncode == 2
    assert result.stderr == "error: give one unit, supernode or superlink\n"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")
def test_systemd_accepts_the_units_of_the_watchdog(tmp_path):
    paths = [tmp_path / f"watchdog@supernode.{kind}" for kind in ("service", "timer")]
    for path in paths:
        unit = (DEPLOY / f"watchdog@{path.suffix}").read_text()
        path.write_text(unit.replace("/opt/flwr-frl/deploy", str(DEPLOY)))
    result = command("systemd-analyze", "verify", "--man=no", *paths)
    assert (result.returncode, result.stderr) == (0, "")
