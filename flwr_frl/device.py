"""The command ``flwr-frl device init``, which writes the files that a device needs."""

import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from getpass import getuser
from json import dumps
from pathlib import Path
from shutil import chown

from cryptography.hazmat.primitives import serialization as ssh
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, generate_private_key

from flwr_frl.common.command_line import Parser
from flwr_frl.common.files import PRIVATE, atomic_file, write_atomically
from flwr_frl.common.settings import require

KEY = "node.key"
# The unit's StateDirectory; a SuperNode can write to no other folder by default.
LIBRARY = "/var/lib/flwr-frl"
# Files of `deploy` that are copied, with the paths of the device.
UNITS = "supernode.service", "watchdog@.service", "watchdog@.timer"
NEXT = """\
wrote key, node config and systemd units of {name} to {folder}

On the server, register the device's public key:
  echo '{public}' >{name}.pub
  flwr supernode register {name}.pub federation --name {name}

On the device, start the SuperNode with systemd:
  sudo systemctl link {units}
  sudo systemctl enable --now supernode watchdog@supernode.timer systemd-time-wait-sync
or in a terminal:
  flower-supernode --superlink {link} --root-certificates {folder}/ca.crt \
--auth-supernode-private-key {folder}/node.key --node-config {folder}/node.toml"""


def main(arguments: Sequence[str]) -> int:
    """Run ``flwr-frl device`` with the arguments after it; return 0."""
    parser = Parser(prog="flwr-frl device", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    about = "write the key, the node config and the systemd units of a device"
    add = commands.add_parser("init", help=about, description=about).add_argument
    add("name", metavar="NAME", help="the device's name in all runs")
    add("--superlink", required=True, help="HOST:PORT of the server")
    add("--ca", required=True, help="ca.crt, the certificate of the federation's CA")
    add("--data-dir", required=True, help="the folder of the device's data")
    add("--state-dir", default="/var/lib/flwr-frl/state", help="heads: %(default)s")
    add("--folder", default="/etc/flwr-frl", help="the new files: %(default)s")
    add("--user", help="the user that runs the SuperNode (default: the current one)")
    print(init(parser.parse_args(arguments)))
    return 0


def init(options: Namespace) -> str:
    """Write the files of a device, and return the next steps.

    Raises
    ------
    SettingsError
        If an option is invalid, or the folder already has the key of a device.
    OSError
        If a file cannot be read or written.
    """
    name, link, folder = options.name, options.superlink, _path(options.folder)
    valid = re.fullmatch(r"\w[\w.-]*", name, re.ASCII) is not None
    require(valid, "NAME", name, "letters, digits, '.', '_' and '-'", "NAME")
    require(re.fullmatch(r"\S+:\d+", link) is not None, "superlink", link, "HOST:PORT")
    data = _path(options.data_dir)
    require(data.is_dir(), "data-dir", str(data), "a folder")
    states = _path(options.state_dir)
    for option, path in (("folder", folder), ("state-dir", states)):
        allowed = "a path without spaces and %, which systemd interprets"
        require(not re.search(r"[\s%]", str(path)), option, str(path), allowed)
    authority = Path(options.ca).read_text(errors="replace")
    require("BEGIN CERTIFICATE" in authority, "ca", options.ca, "the file ca.crt")
    allowed = f"a folder without {KEY}, the key of another device"
    require(not (folder / KEY).exists(), "folder", str(folder), allowed)

    key = generate_private_key(SECP384R1())
    private = ssh.Encoding.PEM, ssh.PrivateFormat.OpenSSH, ssh.NoEncryption()
    openssh = ssh.Encoding.OpenSSH, ssh.PublicFormat.OpenSSH
    public = f"{key.public_key().public_bytes(*openssh).decode()} {name}"
    config = {"client-name": name, "data-dir": str(data)}
    config["state-dir"] = str(states)
    # JSON strings are strings of TOML, with the backslashes of Windows escaped.
    toml = "".join(f"{n} = {dumps(v, ensure_ascii=False)}\n" for n, v in config.items())
    texts = {
        "ca.crt": authority,
        f"{KEY}.pub": f"{public}\n",
        "node.toml": toml,
        "supernode.env": f"SUPERLINK={link}\nNODE_CONFIG={folder / 'node.toml'}\n",
        **{unit: _unit(unit, folder, options.user or getuser()) for unit in UNITS},
    }
    is_own = not states.is_relative_to(LIBRARY)
    if is_own:
        unit, strict = UNITS[0], "ProtectSystem=strict\n"
        texts[unit] = texts[unit].replace(strict, f"{strict}ReadWritePaths={states}\n")
    try:
        with atomic_file(folder / KEY, mode=PRIVATE) as file:
            file.write(key.private_bytes(*private))
            if options.user:
                chown(file.fileno(), options.user)
    except LookupError:
        require(False, "user", options.user, "a user of this system")
    if is_own:
        states.mkdir(mode=0o700, parents=True, exist_ok=True)
        if options.user:
            chown(states, options.user)
    for file_name, text in texts.items():
        write_atomically(folder / file_name, text.encode(), mode=0o644)
    at = shlex.quote(str(folder))
    units = " ".join(f"{at}/{unit}" for unit in UNITS)
    return NEXT.format(folder=at, name=name, link=link, public=public, units=units)


def _path(text: str) -> Path:
    return Path(text).expanduser().absolute()


def _unit(name: str, folder: Path, user: str) -> str:
    """Return a systemd unit of `deploy` with the paths of this device."""
    package = Path(__file__).resolve().parent
    # The wheel contains the folder; in a checkout it is beside the package.
    places = [package / "deploy", package.parent / "deploy"]
    deploy = next(place for place in places if place.is_dir())
    text = (deploy / name).read_text()
    for former, new in (
        ("/opt/flwr-frl/.venv/bin", str(Path(sys.executable).parent)),
        ("/opt/flwr-frl/deploy", str(deploy)),
        ("/etc/flwr-frl", str(folder)),
        ("User=flwr-frl\nGroup=flwr-frl", f"User={user}"),
    ):
        text = text.replace(former, new)
    return text
