"""The guide to tasks of one's own, followed as it stands."""

import json
import os
from pathlib import Path

import pytest
from federation import BIN
from guides import blocks, follow


@pytest.fixture(scope="module")
def own_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which somebody has done what the guide to tasks says."""
    home = tmp_path_factory.mktemp("tasks")
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    follow(
        "your-task.md", home, {**environment, "XDG_CACHE_HOME": str(home / ".cache")}
    )
    return home


def final(home: Path) -> dict[str, dict]:
    return json.loads((home / "summary.json").read_text())["algorithms"]


@pytest.mark.e2e
def test_the_guide_to_tasks_has_its_blocks():
    kinds = [kind.split(":")[0] for kind, _ in blocks("your-task.md")]
    assert kinds[:6] == ["file", "file", "run", "run", "python", "python"]
    assert kinds[6:] == ["file", "run", "file", "python", "file", "run", "file", "run"]


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
def test_an_own_model_learns_our_data(own_tasks):
    home = own_tasks / "digits-results"
    config = json.loads((home / "summary.json").read_text())["config"]
    assert config["task"] == "mine.digits:OnDigits"
    assert final(home)["fedrep"]["accuracy"] > 0.6


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
