"""The guides, followed as they stand: files written, commands run."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from federation import BIN, ROOT, local_flower, read_lines

BLOCK = re.compile(r"<!-- (.*?) -->\n```\w+\n(.*?)```\n<!-- end -->", flags=re.DOTALL)


def blocks(name: str) -> list[tuple[str, str]]:
    """Return the marked blocks of a guide: what each is, and its text."""
    return BLOCK.findall((ROOT / "docs" / name).read_text(encoding="utf-8"))


def follow(name: str, home: Path, environment: dict[str, str]) -> None:
    """Do in a folder what a guide says; what its blocks print is in ``KIND.out``."""
    for kind, text in blocks(name):
        if kind.startswith("file: "):
            path = home / kind.removeprefix("file: ")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            continue
        shell = ["bash", "-euo", "pipefail", "-c", text]
        command = [sys.executable, "-c", text] if kind == "python" else shell
        result = subprocess.run(
            command,
            cwd=home,
            env={**environment, "PYTHONPATH": os.pathsep.join([str(home), str(ROOT)])},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        printed = result.stderr + result.stdout
        assert result.returncode == 0, printed
        (home / f"{kind}.out").write_text(printed, encoding="utf-8")


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which somebody has done what the guide to algorithms says."""
    home = tmp_path_factory.mktemp("cautious")
    with local_flower(home / ".flwr") as environment:
        follow("your-algorithm.md", home, environment)
        yield home


@pytest.fixture(scope="module")
def own_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which somebody has done what the guide to tasks says."""
    home = tmp_path_factory.mktemp("tasks")
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    follow(
        "your-task.md", home, {**environment, "XDG_CACHE_HOME": str(home / ".cache")}
    )
    return home


@pytest.mark.e2e
def test_the_guide_has_blocks_of_all_kinds():
    kinds = [kind.split(":")[0] for kind, _ in blocks("your-algorithm.md")]
    assert kinds == ["file", "file", "file", "run", "python", "file", "flwr"]


@pytest.mark.e2e
def test_the_algorithm_of_the_guide_runs_and_beats_fedavg(followed):
    summary = json.loads((followed / "results" / "summary.json").read_text())
    algorithms = summary["algorithms"]
    assert list(algorithms) == ["fedavg", "Cautious"]
    assert algorithms["Cautious"]["accuracy"] > algorithms["fedavg"]["accuracy"] + 0.2
    assert summary["config"]["caution"] == 0.7
    assert len(read_lines(followed / "results" / "Cautious" / "metrics.jsonl")) == 20


@pytest.mark.e2e
def test_from_python_it_gives_summary_and_rows(followed):
    # Above it is the progress bar.
    printed = (followed / "python.out").read_text().splitlines()[-1]
    accuracy, losses = printed.split(" ", 1)
    assert 0 < float(accuracy) <= 1
    assert len(losses.split(",")) == 5


@pytest.mark.e2e
def test_with_flwr_run_all_five_clients_train(followed):
    rows = read_lines(followed / "flwr-results" / "Cautious" / "metrics.jsonl")
    assert [row["clients"] for row in rows] == [5, 5, 5]


def final(home: Path) -> dict[str, dict]:
    return json.loads((home / "summary.json").read_text())["algorithms"]


@pytest.mark.e2e
def test_the_guide_to_tasks_has_its_blocks():
    kinds = [kind.split(":")[0] for kind, _ in blocks("your-task.md")]
    assert kinds[:5] == ["file", "file", "run", "run", "file"]
    assert kinds[5:] == ["python", "file", "run", "file", "run"]


@pytest.mark.e2e
def test_own_heads_beat_one_model_for_all_greenhouses(own_tasks):
    algorithms = final(own_tasks / "results")
    assert algorithms["fedrep"]["near"] > 2 * algorithms["fedavg"]["near"]
    assert algorithms["fedrep"]["loss"] < algorithms["fedavg"]["loss"] / 3
    assert "near" in (own_tasks / "run: tables.out").read_text()


@pytest.mark.e2e
def test_the_table_s_model_predicts_from_a_row(own_tasks):
    line = (own_tasks / "run: predict.out").read_text().splitlines()[-1]
    place, value = line.split("\t")
    assert place == "now.csv:1"
    assert abs(float(value)) < 5


@pytest.mark.e2e
def test_own_heads_know_what_follows_a_word(own_tasks):
    algorithms = final(own_tasks / "texts")
    assert algorithms["fedrep"]["accuracy"] > algorithms["fedavg"]["accuracy"] + 0.03
    # The most frequent of 27 letters is right at one in six.
    assert algorithms["fedavg"]["accuracy"] > 0.5


@pytest.mark.e2e
def test_a_data_set_of_hugging_face_is_learned_by_its_writers(own_tasks):
    home = own_tasks / "letters-results"
    clients = json.loads((home / "fedrep" / "clients.json").read_text())
    # 1,797 digits, by turns of six.
    counts = [c["num-examples"] + c["num-test-examples"] for c in clients.values()]
    assert sorted(counts) == [299, 299, 299, 300, 300, 300]
    for result in final(home).values():
        assert result["accuracy"] > 0.7


@pytest.mark.e2e
def test_twenty_photos_are_enough_with_a_backbone(own_tasks):
    algorithms = final(own_tasks / "photos-results")
    # Five places of each client: chance is 20 %.
    assert algorithms["fedrep"]["accuracy"] > 0.4
    assert algorithms["fedrep"]["accuracy"] > algorithms["fedavg"]["accuracy"] + 0.2
