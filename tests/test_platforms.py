"""What other systems lack is not needed: POSIX modules, attributes and Ray."""

import subprocess
import sys
from pathlib import Path

import pytest

from flwr_frl.common.settings import is_path

ROOT = Path(__file__).parents[1]
WITHOUT = """
import os, sys
import windows

del os.O_CLOEXEC, os.getuid

from flwr_frl import cli, simulate

for _ in range(2):
    run = simulate("fedrep", clients=5, rounds=1, model="logistic", fraction=1.0)
    run.model("000004")
words = "fedavg --clients 5 --rounds 1 --seeds 2 --output seeds --run-config".split()
sys.exit(cli.main([*words, 'model="logistic"']))
"""


def test_a_simulation_runs_without_what_windows_lacks(tmp_path):
    environment = {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'kit'}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    environment |= {"PATH": "", "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"}
    command = [sys.executable, "-c", WITHOUT]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    earlier = (tmp_path / "results").glob("earlier-*/fedrep/checkpoint.safetensors")
    assert len(list(earlier)) == 1
    assert (tmp_path / "seeds" / "summary.json").is_file()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("mine.task:table", True), ("C:\\data\\parts.json", False)),
        *(("c:/parts.json", False), ("hf:owner/name", False), ("a:b", True)),
    ],
)
def test_files_of_windows_are_not_import_paths(text, expected):
    assert bool(is_path(text)) is expected
