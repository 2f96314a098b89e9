"""The guides: their blocks are run as they stand, and what is generated is current."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs import settings as settings_page

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"<!-- (.*?) -->\n```\w+\n(.*?)```\n<!-- end -->", flags=re.DOTALL)


def blocks(name: str) -> list[tuple[str, str]]:
    """Return the marked blocks of a guide: what each is, and its text."""
    return BLOCK.findall((ROOT / "docs" / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def followed(tmp_path_factory) -> Path:
    """A folder in which somebody has done what the guide says."""
    home = tmp_path_factory.mktemp("cautious")
    environment = {
        **os.environ,
        "PYTHONPATH": str(home),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    for kind, text in blocks("your-algorithm.md"):
        if kind.startswith("file: "):
            path = home / kind.removeprefix("file: ")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            continue
        # Without Ray, which the end-to-end tests start.
        text = text.replace("--rounds 20", "--rounds 20 --backend inline")
        command = {"run": ["bash", "-euo", "pipefail", "-c", text]}.get(
            kind, [sys.executable, "-c", text]
        )
        result = subprocess.run(
            command,
            cwd=home,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        (home / f"{kind}.out").write_text(result.stdout, encoding="utf-8")
    return home


def test_the_guide_has_blocks_of_all_kinds():
    kinds = [kind.split(":")[0] for kind, _ in blocks("your-algorithm.md")]
    assert kinds == ["file", "file", "file", "run", "python", "file"]


def test_the_algorithm_of_the_guide_runs_and_beats_fedavg(followed):
    summary = json.loads((followed / "results" / "summary.json").read_text())
    algorithms = summary["algorithms"]
    assert list(algorithms) == ["fedavg", "Cautious"]
    assert algorithms["Cautious"]["accuracy"] > algorithms["fedavg"]["accuracy"] + 0.2
    assert summary["config"]["caution"] == 0.7
    assert (followed / "results" / "Cautious" / "metrics.jsonl").is_file()


def test_from_python_it_gives_summary_and_rows(followed):
    # Above it is the progress bar.
    printed = (followed / "python.out").read_text().splitlines()[-1]
    accuracy, losses = printed.split(" ", 1)
    assert 0 < float(accuracy) <= 1
    assert len(losses.split(",")) == 5


def test_the_page_of_settings_is_current():
    written = settings_page.PAGE.read_text(encoding="utf-8")
    assert written == settings_page.page(), "run `python -m docs.settings`"
