"""A run on a page is reused only if it is valid and its settings are unchanged."""

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import render
from benchmarks.run import CONFIGS, RESERVED, Bench, read, reduced
from benchmarks.runs import DEFAULTS, alike, kept, load
from flwr_frl.results.results import write_json

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


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
def test_runs_are_alike_if_the_settings_that_matter_are_equal(other, same):
    settings = {"seed": 0, "num-clients": 100}
    assert DEFAULTS["nc-weight"] == 0.25
    assert alike(settings, {**settings, **other}) is same


def test_a_run_that_failed_or_used_uncommitted_code_is_repeated():
    sound = {"accuracy": 0.5, "commit": "0123456789"}
    assert kept(sound) == sound
    assert kept(None) is None
    assert kept({**sound, "failed": "ValueError"}) is None
    assert kept({**sound, "commit": "0123456789-dirty"}) is None


NAMES = sorted(path.stem for path in CONFIGS.glob("*.toml"))


@pytest.mark.parametrize("name", NAMES)
def test_every_config_names_settings_functions_and_partners_that_exist(name):
    config = read(name)
    given = {**config.common}
    for function in (config.function, config.measure, config.derive, config.seeds_from):
        assert not function or callable(load(function))
    for table in (*config.cells.values(), *config.rows.values()):
        assert {*table.get("cells", config.cells)} & config.cells.keys()
        assert {*table.get("only", [])} <= config.rows.keys()
        given |= table
    if not config.function:
        custom = {"rows", "log-softmax"}
        unknown = given.keys() - DEFAULTS.keys() - {*RESERVED, *custom}
        assert not {n for n in unknown if "algorithm" not in n}


@pytest.mark.parametrize("name", ["clustered", "privacy", "fedrep_samples"])
def test_a_small_run_of_a_config_is_rendered_and_reused(name, tmp_path, monkeypatch):
    config = reduced(read(name))
    bench = Bench(config, tmp_path, {}, anew=True)
    bench.make(1)
    data = bench.content()
    runs = [run for cells in data["results"].values() for run in cells.values()]
    assert len(runs) == 2
    assert not [run for run in runs if "failed" in run[0]]
    assert config.metric.replace("-", " ") in render.body(config, data)
    monkeypatch.setattr("benchmarks.common.RESULTS", tmp_path / "pages")
    (tmp_path / "pages").mkdir()
    page = {**data, "about": {}}
    for cells in page["results"].values():
        for found in cells.values():
            found[0]["commit"] = "0123456789"
    write_json(tmp_path / "pages" / f"{name}.json", page)
    assert Bench(config, tmp_path / "elsewhere", {}).waiting() == []
    changed = replace(config, common={**config.common, "batch-size": 7})
    assert len(Bench(changed, tmp_path / "elsewhere", {}).waiting()) == 2


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
