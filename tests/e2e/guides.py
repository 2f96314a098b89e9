"""Execute guides as they are written: create their files and run their commands."""

import re
import sys
from pathlib import Path

from deploy_commands import ROOT, command

BLOCK = re.compile(r"<!-- (.*?) -->\n```\w+\n(.*?)```\n<!-- end -->", flags=re.DOTALL)


def blocks(name: str) -> list[tuple[str, str]]:
    """Return the marked blocks of a guide as pairs of kind and text."""
    return BLOCK.findall((ROOT / "docs" / name).read_text(encoding="utf-8"))


def follow(name: str, home: Path, environment: dict[str, str]) -> None:
    """Execute a guide in a folder; the output of each block goes to ``KIND.out``."""
    for kind, text in blocks(name):
        if kind.startswith("file: "):
            path = home / kind.removeprefix("file: ")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            continue
        shell = ("bash", "-euo", "pipefail", "-c", text)
        words = (sys.executable, "-c", text) if kind == "python" else shell
        result = command(*words, seconds=400, cwd=home, env=environment)
        printed = result.stderr + result.stdout
        assert result.returncode == 0, printed
        (home / f"{kind}.out").write_text(printed, encoding="utf-8")
