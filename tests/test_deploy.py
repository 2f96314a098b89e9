"""The folder deploy/: certificates, systemd units and the watchdog."""

import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from deploy_commands import DEPLOY, command

SCRIPT = DEPLOY / "certificates.sh"
ARGUMENTS = ["--server", "link.example", "192.0.2.7", "--node", "pi-1", "pi-2"]


def contents(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


# Certificates


needs_tools = pytest.mark.skipif(
    not (shutil.which("openssl") and shutil.which("ssh-keygen")),
    reason="openssl and ssh-keygen are not installed",
)


@pytest.fixture
def made(tmp_path):
    result = command(SCRIPT, tmp_path / "keys", *ARGUMENTS, check=True)
    assert result.stderr == ""
    return tmp_path / "keys"


@needs_tools
def test_certificates_are_valid_and_private_keys_are_private(made):
    check = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver"]
    for named, valid in (
        (("-verify_hostname", "link.example"), True),
        (("-verify_hostname", "localhost"), True),
        (("-verify_ip", "192.0.2.7"), True),
        (("-verify_ip", "127.0.0.1"), True),
        (("-verify_hostname", "other.example"), False),
    ):
        files = ("-CAfile", made / "ca.crt", made / "server.crt")
        result = command(*check, *named, *files)
        assert (result.returncode == 0) is valid, result.stderr
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

    path = made / "nodes" / "pi-1"
    private = load_ssh_private_key(path.read_bytes(), None)
    public = load_ssh_public_key(path.with_name("pi-1.pub").read_bytes())
    assert isinstance(private.curve, ec.SECP384R1)
    assert private.public_key() == public


@needs_tools
def test_further_runs_add_only_new_names_and_nodes(made):
    before = contents(made)
    assert "kept" in command(SCRIPT, made, *ARGUMENTS, check=True).stdout
    assert contents(made) == before
    command(SCRIPT, made, "--server", "new.example", "--node", "pi-3", check=True)
    after = contents(made)
    changed = {name for name in after if before.get(name) != after[name]}
    server = {"server.crt", "server.key", "server.names"}
    assert changed == server | {"nodes/pi-3", "nodes/pi-3.pub"}
    check = ["openssl", "verify", "-verify_hostname", "new.example", "-CAfile"]
    assert command(*check, made / "ca.crt", made / "server.crt").returncode == 0


@needs_tools
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "no DIR; expected the first argument"),
        ("keys --nodes a", "unknown option '--nodes'; known: --server, --node"),
        ("keys --server 'a b'", "server 'a b' must be a host name or an IP"),
        ("keys --node ../x", "node '../x' must be of letters"),
    ],
)
def test_bad_input_gives_a_one_line_error_and_no_files(arguments, message, tmp_path):
    result = command(SCRIPT, *shlex.split(arguments), cwd=tmp_path)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


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
def test_systemd_accepts_the_units(tmp_path):
    names = {"watchdog@.service", "watchdog@.timer"}
    for unit in {"superlink.service", "supernode.service", *names}:
        text = (DEPLOY / unit).read_text()
        programs = str(Path(sys.executable).parent)
        text = text.replace("/opt/flwr-frl/.venv/bin", programs)
        text = text.replace("/opt/flwr-frl/deploy", str(DEPLOY))
        (tmp_path / unit.replace("@.", "@supernode.")).write_text(text)
    for unit in sorted(tmp_path.iterdir()):
        result = command("systemd-analyze", "verify", "--man=no", unit)
        assert (result.returncode, result.stderr) == (0, "")


# The watchdog


# Log of a SuperNode after its SuperLink's database had been locked for 35 s
LOST = """\x1b[91mERROR \x1b[0m:     Server error '500 Internal Server Error' for url \
'https://127.0.0.1:8000/v1/fleet/pull-messages'
For more information check: https://developer.mozilla.org/en-US/docs/Web/HTTP/Status/500
"""
PASSED = """\x1b[91mERROR \x1b[0m:     Failed to receive message 1: Server error '500 …'
\x1b[92mINFO \x1b[0m:      Received successfully
"""
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


@pytest.fixture
def watch(tmp_path):
    """Run the watchdog on a unit; return its output and the restarted units."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in FAKES.items():
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)

    def run(unit: str, **files: str) -> tuple[str, str]:
        usual = {"state": "active", "age": "61", "processes": "", "log": ""}
        for name, text in {**usual, **files}.items():
            (tmp_path / name).write_text(f"{text}\n")
        environment = {"PATH": f"{programs}:/usr/bin:/bin", "HERE": str(tmp_path)}
        result = command(DEPLOY / "watchdog", unit, env=environment)
        assert (result.returncode, result.stderr) == (0, "")
        restarted = tmp_path / "restarted"
        return result.stdout, restarted.read_text() if restarted.exists() else ""

    return run


LOST_SAID = "it has lost the SuperLink for good; restarted"
DEAD = "its SuperExec has died; restarted"
LATER = "its SuperExec has died; it is restarted when its run has ended"


@pytest.mark.parametrize(
    ("unit", "processes", "log", "said"),
    [
        ("supernode", NODE_EXEC, PASSED, ""),
        ("supernode", NODE_EXEC, LOST, LOST_SAID),
        ("supernode", "", PASSED, DEAD),
        ("superlink", f"{LINK_EXEC}\n{RUNS}", "", ""),
        ("superlink", "", "", DEAD),
        ("superlink", RUNS, "", LATER),
    ],
)
def test_the_watchdog_restarts_units_that_cannot_recover(
    unit, processes, log, said, watch
):
    printed, restarted = watch(unit, processes=processes, log=log)
    assert printed == (f"{unit}: {said}\n" if said else "")
    assert restarted == (f"{unit}\n" if said.endswith("; restarted") else "")


def test_the_watchdog_ignores_units_that_have_just_started(watch):
    for state, age in (("activating", "99"), ("active", " 59")):
        assert watch("supernode", state=state, age=age) == ("", "")


# The memory of a device


def test_memory_of_the_processes_of_a_device_is_counted_once():
    environment = {**os.environ, "FRL_MEASURED": "pi-3"}
    code = "import os, time; data = b'x' * 2**26; os.fork(); time.sleep(60)"
    words = [sys.executable, "-c", code, "flower-supernode"]
    process = subprocess.Popen(words, env=environment, start_new_session=True)
    try:
        printed = command(DEPLOY / "memory", "2", "FRL_MEASURED=pi-3", check=True)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    peaks = {name: int(mb) for name, mb in map(str.split, printed.stdout.splitlines())}
    assert peaks.keys() == {"supernode", "together"}
    # Both processes have the 64 MB.
    assert 64 < peaks["supernode"] <= peaks["together"] < 100
    result = command(DEPLOY / "memory")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
