"""What is in deploy/: the certificates, the units, and the guide's examples."""

import hashlib
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
from torch import nn

from flwr_frl.clients.client_app import make_app
from flwr_frl.strategies import FedRep
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.rounds import run_rounds
from flwr_frl.task.settings import resolve

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
SCRIPT = DEPLOY / "certificates.sh"


def command(*arguments: object, **more) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(a) for a in arguments], capture_output=True, text=True, timeout=60, **more
    )


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
def test_certificates_are_good_and_private_keys_are_private(made):
    ca, server = made / "ca.crt", made / "server.crt"
    check = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver"]
    for name in ("-verify_hostname=link.example", "-verify_hostname=localhost"):
        option, value = name.split("=")
        result = command(*check, option, value, "-CAfile", ca, server)
        assert result.returncode == 0, result.stderr
    for address in ("192.0.2.7", "127.0.0.1"):
        result = command(*check, "-verify_ip", address, "-CAfile", ca, server)
        assert result.returncode == 0, result.stderr
    # The checks can fail.
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
def test_node_keys_are_what_flower_takes(made):
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
def test_new_names_and_nodes_leave_the_ca_and_other_keys(made):
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
def test_the_ca_s_key_can_be_kept_elsewhere(made, tmp_path):
    (made / "ca.key").rename(tmp_path / "safe")
    command(SCRIPT, made, "--node", "pi-9", check=True)
    before = contents(made)
    result = command(SCRIPT, made, "--server", "new.example")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "no ca.key in" in result.stderr
    # A new CA would shut out all devices.
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
def test_bad_input_is_one_line_and_makes_nothing(arguments, message, tmp_path):
    given = [argument.format(dir=tmp_path / "keys") for argument in arguments]
    result = command(SCRIPT, *given)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_script_s_syntax():
    assert command("bash", "-n", SCRIPT).returncode == 0
    assert SCRIPT.stat().st_mode & 0o111


# Units


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
    known = set(re.findall(r"--[a-z-]+", command(program, "--help").stdout))
    assert used <= known
    assert "Restart=always" in unit
    # A refused SuperNode must not hammer; Flower ends its session after a minute.
    assert int(re.search(r"RestartSec=(\d+)", unit)[1]) >= 15


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")
@pytest.mark.parametrize("name", ["superlink", "supernode"])
def test_systemd_takes_the_units(name, tmp_path):
    unit = (DEPLOY / f"{name}.service").read_text()
    here = str(Path(sys.executable).parent)
    path = tmp_path / f"{name}.service"
    path.write_text(unit.replace("/opt/flwr-frl/.venv/bin", here))
    result = command("systemd-analyze", "verify", "--man=no", path)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


# The watchdog

# What a SuperNode said when its SuperLink's database had been locked for 35 s.
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
        # Another one's.
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
def test_the_watchdog(unit, processes, log, said, fakes, tmp_path):
    files = {"state": "active", "age": "61", "processes": processes, "log": log}
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    environment = {"PATH": f"{fakes}:/usr/bin:/bin", "HERE": str(tmp_path)}
    result = command(DEPLOY / "watchdog", unit, env=environment)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == (f"{unit}: {said}\n" if said else "")
    restarted = tmp_path / "restarted"
    found = restarted.read_text() if restarted.exists() else ""
    assert found == (f"{unit}\n" if said.endswith("; restarted") else "")


@pytest.mark.parametrize(("state", "age"), [("activating", "99"), ("active", " 59")])
def test_the_watchdog_leaves_what_is_about_to_begin(state, age, fakes, tmp_path):
    for name, text in (("state", state), ("age", age), ("processes", "")):
        (tmp_path / name).write_text(f"{text}\n")
    environment = {"PATH": f"{fakes}:/usr/bin:/bin", "HERE": str(tmp_path)}
    result = command(DEPLOY / "watchdog", "supernode", env=environment)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_the_watchdog_s_bad_input():
    result = command(DEPLOY / "watchdog")
    assert result.returncode == 2
    assert result.stderr == "error: give one unit, supernode or superlink\n"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")
def test_systemd_takes_the_watchdog_s_units(tmp_path):
    for kind in ("service", "timer"):
        unit = (DEPLOY / f"watchdog@.{kind}").read_text()
        path = tmp_path / f"watchdog@supernode.{kind}"
        path.write_text(unit.replace("/opt/flwr-frl/deploy", str(DEPLOY)))
    result = command("systemd-analyze", "verify", "--man=no", path)
    assert (result.returncode, result.stderr) == (0, "")


# The guide


def guide() -> str:
    return (DEPLOY / "README.md").read_text()


def test_what_the_guide_links_to_is_there():
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", guide()):
        # Measured with the whole of a deployment, on its own.
        if not link.endswith("memory.md"):
            assert (DEPLOY / link).exists(), link


def test_the_guide_s_settings_exist():
    text = re.search(r"--run-config '(.*?)'", guide(), re.DOTALL)[1]
    from flwr.common.config import parse_config_args

    given = parse_config_args([text])
    assert given["task"] == "image-folder"
    resolve(given)


class Net(nn.Module):
    """A model that somebody else has written."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 3)
        self.head = nn.Linear(3, 2)


def train_locally(net: Net) -> tuple[float, int]:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.5)
    return 0.25, 7


@pytest.fixture
def example(monkeypatch):
    """Run a Python block of the guide and return its app."""
    yours = ModuleType("your_app")
    yours.Net, yours.train_locally = Net, train_locally
    monkeypatch.setitem(sys.modules, "your_app", yours)

    def run(name: str):
        pattern = rf"<!-- {name} -->\n```python\n(.*?)```\n<!-- end -->"
        scope: dict[str, object] = {}
        exec(re.search(pattern, guide(), re.DOTALL)[1], scope)
        return scope["app"]

    return run


def named(grid: InlineGrid) -> InlineGrid:
    for i, context in grid.contexts.items():
        context.node_config = {"client-name": f"pi-{i:02}"}
    return grid


class Spy(InlineGrid):
    """Keeps all messages and replies."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.seen: list[tuple[object, object]] = []

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        replies = super().send_and_receive(messages)
        self.seen += list(zip(messages, replies, strict=True))
        return replies


def test_the_guide_s_own_app_with_differential_privacy(example):
    grid = named(Spy(example("client"), 10))
    context = Context(1, 0, {}, RecordDict(), {})
    example("server")(grid, context)
    trained = [(m, r) for m, r in grid.seen if str(m.metadata.message_type) == "train"]
    # Ten rounds of five of ten clients each.
    assert len(trained) == 50
    assert not any(reply.has_error() for _, reply in trained)
    assert len({m.metadata.dst_node_id for m, _ in trained}) > 5
    for message, reply in trained:
        for part in (message, reply):
            (record,) = part.content.array_records.values()
            assert set(record) == {"weight", "bias"}
            assert record["weight"].numpy().shape == (3, 4)
    # By hand: every weight of 15 moves by 0.5, a norm of 0.5 √15 = 1.94, is clipped to
    # 1, and gets noise of 0.2 · 1 / 5 = 0.04 in each of the ten rounds.
    first = trained[0][0].content["arrays"]
    last = trained[-1][0].content["arrays"]
    moved = np.concatenate(
        [(last[n].numpy() - first[n].numpy()).ravel() for n in first]
    )
    step = 1 / np.sqrt(15)
    assert moved.mean() == pytest.approx(9 * step, abs=4 * 0.04 * 3 / np.sqrt(15))
    assert 0.03 < moved.std() < 0.25
    # Each client's own head went on from its last.
    counts = {}
    for message, _ in trained:
        node = message.metadata.dst_node_id
        counts[node] = counts.get(node, 0) + 1
    for node, count in counts.items():
        head = grid.contexts[node].state["head"].to_torch_state_dict()
        expected = Net().head.bias + 0.5 * count
        torch.testing.assert_close(head["bias"], expected.detach())


def test_the_guide_s_mod_adds_noise_on_the_device(example):
    settings = {"algorithm": "fedrep", "head-epochs": 1, "batch-size": 100}

    def trained(app):
        grid = Spy(app, 5, settings)
        strategy = FedRep(seed=1, fraction_train=1.0)
        initial = strategy.initialize(grid)
        run_rounds(strategy, grid, initial, range(1, 2))
        errors = [reply.error for _, reply in grid.seen if reply.has_error()]
        assert errors == []
        return initial, {
            message.metadata.dst_node_id: reply.content["arrays"]
            for message, reply in grid.seen
            if message.metadata.message_type == "train"
        }

    np.random.seed(0)
    initial, noisy = trained(example("mod"))
    _, plain = trained(make_app())
    assert len(noisy) == 5
    # As Flower's mod has it: sensitivity √(2 ln(1.25 / δ)) / ε.
    sigma = np.sqrt(2 * np.log(1.25 / 1e-5)) / 100
    for node, arrays in noisy.items():
        differences = [
            (arrays[n].numpy() - plain[node][n].numpy()).ravel() for n in arrays
        ]
        spread = np.concatenate(differences).std()
        assert spread == pytest.approx(sigma, rel=0.05)
        assert list(arrays) == list(initial)


# Flower's own file


@pytest.mark.e2e
@pytest.mark.parametrize("times", [1, 2])
def test_the_federation_is_added_to_the_file_that_flower_makes(
    tmp_path, monkeypatch, times
):
    from flwr.cli.flower_config import init_flwr_config

    home = tmp_path / ".flwr"
    monkeypatch.setenv("FLWR_HOME", str(home))
    init_flwr_config()
    made = tomllib.loads((home / "config.toml").read_text())["superlink"]
    guide = (DEPLOY / "README.md").read_text()
    marked = re.search(r"<!-- superlink -->\n```sh\n(.*?)```", guide, re.DOTALL)
    # What makes the file has been done.
    lines = marked[1].replace("flwr config list >/dev/null\n", "")
    assert lines != marked[1]
    for _ in range(times):
        environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
        assert command("bash", "-euc", lines, env=environment).returncode == 0
    found = tomllib.loads((home / "config.toml").read_text())["superlink"]
    assert found == {
        **made,
        "default": "federation",
        "federation": {
            "address": "127.0.0.1:8000",
            "root-certificates": "/etc/flwr-frl/ca.crt",
        },
    }


@pytest.mark.parametrize("name", ["README.md", "proxy.conf"])
def test_the_proxy_takes_a_piece_of_an_array_and_little_more(name):
    text = (DEPLOY / name).read_text()
    (megabytes,) = re.findall(r"^ *client_max_body_size (\d+)m;", text, re.MULTILINE)
    piece = FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
    assert piece < int(megabytes) * 2**20 < 2 * piece
