"""One device's disk is full and another's is read-only: training goes on."""

import json
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from command_line import rows_of, run
from devices import write_folders
from federation import Federation, read_lines

APP = Path(__file__).parent / "disk_app"
NAMES = {"healthy": "000000", "full": "000001", "read-only": "000002"}
ROUNDS = (1, 2)
# $0 is the disk. The mounts are seen by nobody else and end with the process.
MOUNTS = {
    "full": 'mount -t tmpfs -o size=64k none "$0"; cat /dev/zero >"$0/rest" || true',
    "read-only": 'mount -t tmpfs -o ro,size=64k none "$0"',
}
# In a pipe, so that the log may grow; a state has 18 kB.
SMALL_FILES = 'prlimit --fsize=8192 "$@" 2>&1 | cat'


def in_namespace(script: str, disk: Path) -> tuple[str, ...]:
    unshare = shutil.which("unshare") or "unshare"
    return (unshare, "--map-root-user", "--mount", "sh", "-ec", script, str(disk))


def may_mount(disk: Path) -> bool:
    try:
        results = [
            subprocess.run(
                in_namespace(script, disk), capture_output=True, check=False
            ).returncode
            for script in MOUNTS.values()
        ]
    except FileNotFoundError:
        return False
    return not any(results)


def prefixes(disks: dict[str, Path]) -> dict[str, tuple[str, ...]]:
    """Return what goes before the command of each SuperNode, and break the disks."""
    if may_mount(disks["healthy"]):
        return {
            kind: in_namespace(f'{script}; exec "$@"', disks[kind])
            for kind, script in MOUNTS.items()
        }
    # Root may write whatever the mode says, but not below a file.
    disks["read-only"].rmdir()
    disks["read-only"].touch()
    shell = shutil.which("sh") or "sh"
    return {"full": (shell, "-c", SMALL_FILES, "sh")}


def simulated(tmp_path: Path) -> list[dict[str, object]]:
    project = tomllib.loads((APP / "pyproject.toml").read_text())
    config = project["tool"]["flwr"]["app"]["config"]
    pairs = " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())
    arguments = (config["algorithm"], "--data-dir", str(tmp_path / "data"))
    assert run(tmp_path / "inline", *arguments, "--run-config", pairs) == 0
    return rows_of(tmp_path / "inline", config["algorithm"])


@pytest.mark.e2e
def test_training_goes_on_from_memory(federation: Federation, tmp_path: Path) -> None:
    disks = {kind: tmp_path / f"disk-{kind}" for kind in NAMES}
    for disk in disks.values():
        disk.mkdir()
    before = prefixes(disks)
    write_folders(tmp_path / "data", len(NAMES))
    federation.start_superlink()
    for kind, name in NAMES.items():
        federation.start_supernode(
            name,
            f'client-name="{name}" data-dir="{tmp_path / "data" / name}" '
            f'state-dir="{disks[kind]}"',
            before=before.get(kind, ()),
        )
    output = tmp_path / "deployed"
    log = federation.run(APP, f'output="{output}"', 900)

    found = read_lines(output / "fedrep" / "metrics.jsonl")
    expected = simulated(tmp_path)
    assert len(found) == len(expected) == len(ROUNDS), log
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["clients"] == len(NAMES), log
        del ours["seconds"], theirs["seconds"]
        assert ours == pytest.approx(theirs, abs=1e-5)
    for kind, name in NAMES.items():
        text = (federation.home / f"{name}.log").read_text(errors="replace")
        for server_round in ROUNDS:
            line = f"state of round {server_round} is kept in memory only, not in "
            assert (f"{line}{disks[kind]}" in text) == (kind != "healthy"), text
    assert list(disks["healthy"].rglob("*-00000002.safetensors"))
