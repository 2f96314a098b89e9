"""A run on a page is reused only if it is valid and its settings are unchanged."""

import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def runs(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("runs")


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ({}, True),
        ({"nc-weight": 0.25}, True),
        ({"data-dir": "elsewhere", "evaluate-every": 7}, True),
        ({"nc-weight": 0.5}, False),
        ({"seed": 1}, False),
    ],
)
def test_runs_are_alike_if_the_settings_that_matter_are_equal(runs, other, same):
    settings = {"seed": 0, "num-clients": 100}
    assert runs.DEFAULTS["nc-weight"] == 0.25
    assert runs.alike(settings, {**settings, **other}) is same


def test_a_run_that_failed_or_used_uncommitted_code_is_repeated(runs):
    sound = {"accuracy": 0.5, "commit": "0123456789"}
    assert runs.kept(sound) == sound
    assert runs.kept(None) is None
    assert runs.kept({**sound, "failed": "ValueError"}) is None
    assert runs.kept({**sound, "commit": "0123456789-dirty"}) is None


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("changed", "dirty"),
    [
        ("benchmarks/results/table.md", False),
        ("benchmarks/results/table-2x2.json", False),
        ("benchmarks/results/other.json", True),
        ("benchmarks/table.py", True),
    ],
)
def test_changed_pages_of_a_benchmark_do_not_make_its_commit_dirty(
    tmp_path, changed, dirty
):
    def git(*arguments):
        about = ["-c", "user.name=n", "-c", "user.email=e"]
        subprocess.run(["git", *about, *arguments], cwd=tmp_path, check=True)

    files = ["table.md", "table-2x2.json", "other.json"]
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    for name in files:
        (tmp_path / "benchmarks" / "results" / name).write_text("before")
    shutil.copy(BENCHMARKS / "common.py", tmp_path / "benchmarks")
    script = tmp_path / "benchmarks" / "table.py"
    script.write_text("from common import COMMIT\nprint(COMMIT)\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "all")
    clean = subprocess.check_output([sys.executable, script], text=True)
    assert re.fullmatch("[0-9a-f]{10}\n", clean)
    with (tmp_path / changed).open("a") as file:
        file.write("# after")
    commit = subprocess.check_output([sys.executable, script], text=True)
    assert commit == (clean.replace("\n", "-dirty\n") if dirty else clean)


@pytest.mark.e2e
def test_the_provenance_names_the_command(tmp_path):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    shutil.copy(BENCHMARKS / "common.py", tmp_path / "benchmarks")
    text = "{}import provenance\nprint(provenance()['command'])\n"
    for name, package in (("module", "benchmarks."), ("script", "")):
        path = tmp_path / "benchmarks" / f"{name}.py"
        path.write_text(text.format(f"from {package}common "))
    for how in (["-m", "benchmarks.module"], ["benchmarks/script.py"]):
        words = [*how, "--seed", "3"]
        command = [sys.executable, *words]
        output = subprocess.check_output(command, cwd=tmp_path, text=True)
        assert output == " ".join(["python", *words]) + "\n"
