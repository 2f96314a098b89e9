"""Run commands to their end."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


def command(
    *arguments: object, seconds: float = 60, check: bool = False, **more
) -> subprocess.CompletedProcess[str]:
    words = [str(argument) for argument in arguments]
    how = {"capture_output": True, "text": True, "timeout": seconds, "check": check}
    return subprocess.run(words, **{**how, **more})
