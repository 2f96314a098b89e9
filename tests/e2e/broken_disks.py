"""A full and a read-only disk, for one SuperNode each."""

import shutil
import subprocess
from pathlib import Path

# $0 is the path of the disk. The mounts are private to the process and end with it.
MOUNTS = {
    "full": 'mount -t tmpfs -o size=64k none "$0"; cat /dev/zero >"$0/rest" || true',
    "read-only": 'mount -t tmpfs -o ro,size=64k none "$0"',
}
# The pipe exempts the log from the limit. The largest state has 18 kB.
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
    """Break the disks; return the prefix of each SuperNode's command."""
    if may_mount(disks["healthy"]):
        return {
            kind: in_namespace(f'{script}; exec "$@"', disks[kind])
            for kind, script in MOUNTS.items()
        }
    # Root may write to a directory regardless of its mode, but not below a file.
    disks["read-only"].rmdir()
    disks["read-only"].touch()
    shell = shutil.which("sh") or "sh"
    return {"full": (shell, "-c", SMALL_FILES, "sh")}
