"""Run the commands of the folder ``deploy``."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


DEPLOY = ROOT / "deploy"


def command(*arguments: object, **more) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(a) for a in arguments], capture_output=True, text=True, timeout=60, **more
    )
