"""Runs do not depend on private names of Flower; each use of one has a fallback."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace as Grid

import flwr
import httpx
import pytest
from command_line import ROOT, assert_same_rows, rows_of
from flwr.common.config import parse_config_args
from flwr.common.constant import SUPERLINK_NODE_ID, SType
from refusals import code_of

from flwr_frl.common import arrays
from flwr_frl.common.command_line import run_config

PRIVATE = "_data|_metadata|_content|_message_id|_chunks"
COMMAND = "fedrep squarm-sgd --clients 5 --rounds 2 --backend inline --output out"


def another_flower(folder: Path, attributes: str) -> None:
    """Copy Flower with other names for attributes and for two private modules."""
    source, copy = Path(flwr.__file__).parent, folder / "flwr"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for path in copy.rglob("*.py"):
        text = re.sub(rf"\b({attributes})\b", r"\1_moved", path.read_text())
        path.write_text(
            re.sub(r"(supercore\.(run|task_identity))\b", r"\1_moved", text)
        )
    for name in "run", "task_identity":
        (copy / "supercore" / f"{name}.py").rename(
            copy / "supercore" / f"{name}_moved.py"
        )


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    line = [sys.executable, ROOT / "simulation.py", *COMMAND.split()]
    line += ["--run-config", 'model="logistic" fraction-train=1.0']
    return subprocess.run(
        line, cwd=folder, env=environment, capture_output=True, text=True
    )


def test_runs_have_the_same_numbers_if_private_names_have_moved(tmp_path):
    for name in "this", "next":
        (tmp_path / name).mkdir()
    another_flower(tmp_path / "next", PRIVATE)
    for name in "this", "next":
        result = run(tmp_path / name)
        assert result.returncode == 0, result.stderr
        assert "Traceback" not in result.stderr
    for algorithm in "fedrep", "squarm-sgd":
        rows = (rows_of(tmp_path / n / "out", algorithm) for n in ("this", "next"))
        assert_same_rows(*rows, within=0)


def test_a_release_that_builds_no_messages_outside_a_run_is_one_line(tmp_path):
    another_flower(tmp_path, "TaskIdentity")
    result = run(tmp_path)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "builds messages only" in line


@pytest.mark.parametrize(
    ("connected", "used"),
    [
        (Grid(_runtime_client=Grid(_client=httpx.Client())), True),
        *((Grid(_runtime_client=Grid(client=httpx.Client())), False), (Grid(), False)),
    ],
)
def test_a_grid_without_a_connection_of_httpx_has_no_hooks(connected, used):
    hooks = arrays.response_hooks(connected)
    if used:
        hooks.append(print)
    assert (print in arrays.response_hooks(connected)) is used


def test_constants_are_those_of_flower():
    assert (arrays.SUPERLINK, arrays.NPY) == (SUPERLINK_NODE_ID, SType.NUMPY)


TABLE = "seed = 3\n[own]\nrate = 0.5\n[own.deep]\nname = 'x'\n"


@pytest.mark.parametrize(
    "text",
    [
        *('seed=1 model="mlp" momentum=0.5 tls=true', "a='b c' seed=2", "", "a=1e-3"),
        *("own.rate=2", "seed='x=y'", "file='parts.toml'", "table.toml"),
    ],
)
def test_run_config_is_read_as_flower_reads_it(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("table.toml").write_text(TABLE)
    expected = parse_config_args([text])
    assert run_config([text]) == expected


@pytest.mark.parametrize(
    ("text", "path"),
    [
        *((r'data-dir="C:\temp"', None), (r'data-dir="C:\data"', None)),
        *((r"data-dir='C:\temp'", r"C:\temp"), ('data-dir="C:/temp"', "C:/temp")),
    ],
)
def test_paths_of_windows_are_read_or_refused(text, path):
    if path:
        assert run_config([text]) == {"data-dir": path}
    else:
        assert code_of(run_config, [text]) == "run-config"
